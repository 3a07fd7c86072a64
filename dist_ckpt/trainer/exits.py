"""How a run ends: exit codes and ``exit.json``."""

from __future__ import annotations

import json
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

from dist_ckpt.errors import DistCkptError


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
    """torch 2.13 has no type for a failed CPU allocation: it is a RuntimeError of the default allocator."""
    return type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in str(error)


def record_exit(run_dir: Path, code: ExitCode, reason: str, **details: Any) -> None:
    """Writes ``exit.json``, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    record = {"code": int(code), "name": code.name.lower(), "reason": reason, "time": time.time(), **details}
    temporary = run_dir / f".exit.json.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(run_dir / "exit.json")


def recorded_exit(run_dir: Path) -> tuple[ExitCode, str] | None:
    """Code and reason that an earlier start of this run recorded, if it did."""
    try:
        record = json.loads((run_dir / "exit.json").read_text(encoding="utf-8"))
        return ExitCode(record["code"]), str(record["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
