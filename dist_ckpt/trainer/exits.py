"""How a run ends: exit codes and ``exit.json``."""

from __future__ import annotations

import json
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

from dist_ckpt.errors import DistCkptError

FILE = "exit.json"


class ExitCode(IntEnum):
    """A worker's exit code. torchrun turns every other than 0 into 1, so ``exit.json`` keeps it."""

    DONE = 0
    """The run did what was asked."""
    FAULT = 1
    MISTAKE = 2
    """The user's mistake."""
    OUT_OF_MEMORY = 3
    TERMINATED = 143
    """A SIGTERM, after the training state was saved."""


FINAL = (ExitCode.MISTAKE, ExitCode.OUT_OF_MEMORY)
"""What would happen again at a restart."""


def code_of(error: BaseException) -> ExitCode:
    """The exit code that an exception means."""
    import torch

    if isinstance(error, DistCkptError):
        return ExitCode.MISTAKE
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _is_cpu_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAULT


def _is_cpu_out_of_memory(error: BaseException) -> bool:
    """torch 2.13 has no type for a failed CPU allocation, only its allocator's name in a plain RuntimeError."""
    return type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)


def record_exit(run_dir: Path, code: ExitCode, reason: str, **details: Any) -> bool:
    """Writes ``exit.json``, whole or not at all, if there is none yet.

    The first rank that fails records it before its process ends. The others notice only then, by their broken
    connections: what they would have to say is an echo. gloo has no type for that (torch 2.13: a plain RuntimeError),
    so the order tells the two apart.

    Returns:
        Whether this call wrote it; False if an earlier one stands.

    Raises:
        OSError: it cannot be written.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    record = {"code": int(code), "name": code.name.lower(), "reason": reason, "time": time.time(), **details}
    temporary = run_dir / f".{FILE}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.link(temporary, run_dir / FILE)  # unlike a rename, this fails where there is one
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def forget_exit(run_dir: Path) -> None:
    """Removes what an earlier start has recorded."""
    (run_dir / FILE).unlink(missing_ok=True)


def recorded_exit(run_dir: Path, patience_s: float = 0.0) -> tuple[ExitCode, str] | None:
    """Code and reason that stand in ``exit.json``; None if there is none, or none that can be read.

    Args:
        patience_s: how long to wait for one.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            record = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
            return ExitCode(record["code"]), str(record["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
