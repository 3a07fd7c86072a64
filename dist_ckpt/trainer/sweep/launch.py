"""One run as processes: started with torchrun, waited for, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost")
PATIENCE_S = 40.0
"""How long torchrun may take to end. It gives workers 30 s where it has just started them."""


class Terminated(BaseException):
    """A SIGTERM, as ``KeyboardInterrupt`` is a SIGINT."""


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Inside, a SIGTERM raises :class:`Terminated` wherever the program stands."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def torchrun(nproc: int, script: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs a script on ranks of this machine, at a port that nobody uses."""
    return [*_TORCHRUN, "--nproc_per_node", str(nproc), str(script), *arguments]


def run(command: Sequence[str], console: Path, keep_open: int) -> int:
    """Runs a command to its end, in a session of its own: a Ctrl-C in the terminal reaches this program alone.

    Args:
        console: takes its output.
        keep_open: a descriptor that it inherits, so that a lock on it lasts as long as the command.

    Returns:
        Its exit code.

    Raises:
        BaseException: whatever interrupts the wait; the command and all that it has started have ended by then.
    """
    with console.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(keep_open,),
        )
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and its descendants. torchrun's workers are sessions of their own, so no process group has all.

    Workers are killed outright: what they have measured is of no use without the rest, and asked politely they would
    first finish their update and save a training state.
    """
    parent = psutil.Process(process.pid)
    workers: list[psutil.Process] = []
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = parent.children(recursive=True)
        process.terminate()
        _kill(workers)
        process.wait(PATIENCE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, Terminated):  # out of patience, ours or the user's
        with contextlib.suppress(psutil.NoSuchProcess):
            workers += parent.children(recursive=True)
        process.kill()
        process.wait()
    finally:
        _kill(workers)
        psutil.wait_procs(workers)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
