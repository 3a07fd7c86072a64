"""A thread that ends this rank when another one has failed and nothing else does.

Usually connections break as soon as one rank has gone, and what waits for it raises. But a rank may be in a call that
notices nothing (NCCL between GPUs of one machine, a barrier over the store while groups are made), or in a computation
of its own. torchrun's SIGTERM is not heard there, since Python deals with signals between its own instructions; after
30 s it kills, and the exit code says nothing.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dist_ckpt.trainer.exits import ExitCode, recorded_exit
from dist_ckpt.trainer.process import leave

PATIENCE_S = 20.0
"""How long a rank may take to end after ``exit.json`` says that the run has failed: for what it has to write down."""
GRACE_S = 3.0
"""The same once a SIGTERM has come, as a rank that writes something down ignores it."""
_EVERY_S = 2.0


@contextmanager
def failures_watched(run_dir: Path, patience_s: float = PATIENCE_S, grace_s: float = GRACE_S) -> Iterator[None]:
    """Ends this process, with the code in ``exit.json``, some time after that says that the run has failed.

    Until training has a way of its own to deal with a SIGTERM, one ends the process at once, with that code if there is
    one. Only for the main thread.
    """
    over = threading.Event()
    heard, notes = os.pipe()  # which the signal's handler in C writes to, whatever Python is doing
    os.set_blocking(notes, False)
    usual = signal.set_wakeup_fd(notes, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: _terminated(run_dir, number, frame))

    def watch() -> None:
        since, left_s = None, patience_s
        while not over.is_set():
            if select.select([heard], [], [], _EVERY_S)[0] and signal.SIGTERM in os.read(heard, 64):
                left_s = grace_s
            code = _failure(run_dir)
            since = since or (time.monotonic() if code is not None else None)
            if code is not None and since is not None and time.monotonic() >= since + left_s and not over.is_set():
                leave(code)

    threading.Thread(target=watch, name="watch for failures", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(usual)


def _terminated(run_dir: Path, number: int, frame: FrameType | None) -> None:
    code = _failure(run_dir)
    if code is not None:
        leave(code)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _failure(run_dir: Path) -> ExitCode | None:
    """The code of a run that a rank has ended for all."""
    last = recorded_exit(run_dir)
    return None if last is None or last[0] in (ExitCode.DONE, ExitCode.TERMINATED) else last[0]
