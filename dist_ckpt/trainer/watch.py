"""A thread that ends this rank when another one has failed and nothing else does.

Usually connections break as soon as one rank has gone, and what waits for it raises. But a rank may be in a kernel that
waits for a peer for minutes (NCCL between GPUs of one machine notices nothing), or in a computation of its own that
takes as long; torchrun then kills it after 30 s, and its exit code says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_ckpt.trainer.exits import ExitCode, recorded_exit
from dist_ckpt.trainer.process import leave

PATIENCE_S = 20.0
"""How long a rank may take to end after ``exit.json`` says that the run has failed: for what it has to write down."""
_EVERY_S = 0.5


@contextmanager
def failures_watched(run_dir: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Ends this process, with the code in ``exit.json``, ``patience_s`` after that says that the run has failed."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            last = recorded_exit(run_dir)
            if last is None or last[0] in (ExitCode.DONE, ExitCode.TERMINATED):
                continue
            if not over.wait(patience_s):
                leave(last[0])
            return

    threading.Thread(target=watch, name="watch for failures", daemon=True).start()
    try:
        yield
    finally:
        over.set()
