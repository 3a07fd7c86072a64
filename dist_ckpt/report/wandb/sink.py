"""The trainer's side: hands every record to a process that talks to Weights & Biases, and never waits for it.

W&B in the training process would print, prompt, patch ``sys.exit``, leave temporary files behind ``os._exit``, and
hang where the network does. A process of its own can do none of that to the training, and it still has every record,
and the end of the run to tell, when this one is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.run_layout import RunLayout
from dist_ckpt.report.sinks import Sink

_LIMIT_BYTES = 64 * 2**20
"""Records that wait while W&B connects. More means that it never takes them."""
_PATIENCE_S, _PATIENCE_AFTER_FAILURE_S = 60.0, 15.0
"""For what is left to upload at the end. A failed run's ranks are to be gone soon: others wait for them."""


class WandbSink(Sink):
    """One W&B run for the job, on rank 0. Whatever is wrong with it is said once, and the training goes on.

    Args:
        folder: the run folder; all that W&B writes is in its ``wandb/``.
        mode: ``offline`` or ``online``. Online without connection or valid key becomes offline.
        project: of the run.
        max_ranks: up to so many ranks have curves of their own.
        world_size: ranks of the job.
        config: what is run, as JSON data.
        after_step: on resuming, the last step that counts.
        same_run: the folder's earlier W&B run goes on, if there is one; else a new one begins.
        say: shows a line to the user.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        project: str,
        max_ranks: int,
        world_size: int,
        config: Mapping[str, Any],
        after_step: int,
        same_run: bool,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._waiting, self._heard = bytearray(), bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._own = own = RunLayout(folder.absolute()).wandb
        try:
            own.mkdir(parents=True, exist_ok=True)
            start = {
                "folder": str(folder.absolute()),
                "mode": mode,
                "project": project,
                "id": _run_id(own / "run_id", same_run),
                "max_ranks": max_ranks,
                "world_size": world_size,
                "config": config,
                "after_step": after_step,
                "trainer": os.getpid(),
                "argv": sys.argv,
            }
            self._process = _start_process(own)
        except OSError as error:
            say(f"W&B: not recorded: {error}")
            return
        self._send(start)

    def step(self, line: Mapping[str, float | int]) -> None:
        self._send({"line": dict(line)})
        self._hear()

    def memory(self, report: MemoryReport) -> None:
        self._send({"memory": report.to_dict()})

    def profile(self, profiles: Sequence[StepProfile]) -> None:
        """Nothing: what W&B shows of the deep step, every rank's peak by kind, has come with its report."""

    def finish(self, exit_code: int) -> None:
        """Waits until W&B has everything, but not for ever."""
        patience_s = _PATIENCE_S if exit_code == 0 else _PATIENCE_AFTER_FAILURE_S
        deadline = time.monotonic() + patience_s  # which is the same clock there
        self._send({"finish": exit_code, "until_s": deadline})
        while (process := self._process) is not None and time.monotonic() < deadline:
            self._hear()
            self._write()
            if process.poll() is not None:
                self._close()
            time.sleep(0.01)
        if self._process is not None:
            recorded = sorted(self._own.glob("*run-*/run-*.wandb"))
            left = f"the rest with: wandb sync {recorded[-1].parent}" if recorded else "nothing was recorded"
            self._give_up(f"not finished after {patience_s:g} s; {left}")

    def _send(self, record: Mapping[str, Any]) -> None:
        if self._process is None:
            return
        self._waiting += json.dumps(record).encode() + b"\n"
        self._write()
        if len(self._waiting) > _LIMIT_BYTES:
            self._give_up("takes no records; no more are sent")

    def _write(self) -> None:
        """As much as fits into the pipe."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            while self._waiting:
                written = os.write(self._process.stdin.fileno(), self._waiting[: 2**16])
                del self._waiting[:written]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has ended, and has said why
            self._process.wait()
            self._close()

    def _hear(self) -> None:
        """Shows what the process has to say."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        try:
            self._heard += os.read(self._process.stdout.fileno(), 2**16)
        except BlockingIOError:
            return
        *lines, rest = self._heard.split(b"\n")
        self._heard = bytearray(rest)
        for line in lines:
            self._say(f"W&B: {line.decode(errors='replace')}")

    def _close(self) -> None:
        """After the process has ended."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        self._hear()
        self._process = None
        if process.returncode:
            self._say("W&B: its process has failed; wandb/process.log in the run folder says why")
        process.stdin.close()
        process.stdout.close()

    def _give_up(self, why: str) -> None:
        assert self._process is not None
        self._say(f"W&B: {why}")
        self._process.kill()
        self._process.wait()
        self._process.returncode = 0  # meant, so nothing more is said
        self._close()


def _run_id(path: Path, same_run: bool) -> str:
    """The id in a file, or a new one, which is written there."""
    if same_run and path.exists() and (found := path.read_text(encoding="utf-8").strip()):
        return found
    made = secrets.token_hex(4)  # W&B's own are eight characters too
    path.write_text(made + "\n", encoding="utf-8")
    return made


def _start_process(own: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: torchrun and terminals send their signals to whole groups.

    Raises:
        OSError: it cannot be started.
    """
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    # It finds the packages that this process has; -m alone would put the working directory, with any name in it, first.
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    # Where W&B would otherwise write into the home directory.
    environment |= {f"WANDB_{kind.upper()}_DIR": str(own / kind) for kind in ("cache", "data")}
    with (own / "process.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dist_ckpt.report.wandb.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return process
