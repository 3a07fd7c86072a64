"""How a run ends: exit codes and ``exit.json``."""

from __future__ import annotations

import json
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

from dist_ckpt.errors import DistCkptError, StateWriteError
from dist_ckpt.report import run_layout
from dist_ckpt.report.run_layout import RunLayout


class ExitCode(IntEnum):
    """A worker's exit code. torchrun itself exits with 1 for any code but 0, so ``exit.json`` records it."""

    DONE = 0
    """The run did what was asked."""
    FAULT = 1
    MISTAKE = 2
    """The user's mistake."""
    OUT_OF_MEMORY = run_layout.OUT_OF_MEMORY
    TERMINATED = 143
    """A SIGTERM, after the training state was saved."""


FINAL = (ExitCode.MISTAKE, ExitCode.OUT_OF_MEMORY)
"""Ends that a restart would only repeat."""


def root_mistake(error: BaseException) -> BaseException:
    """The user's mistake that caused an error, or else the error itself.

    torch.compile wraps what the code that it traces raises (an op rule that matches nothing, say), and appends its
    place in the graph to the message, which is one line without that.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DistCkptError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if cause is None or cause is error:
        return error
    return type(cause)(str(cause).partition("\n")[0])


def code_of(error: BaseException) -> ExitCode:
    """The exit code that an exception means."""
    from dist_ckpt.memory.out_of_memory.failure import out_of_memory_in  # imports torch

    if isinstance(error, StateWriteError):
        return ExitCode.FAULT
    if isinstance(error, DistCkptError):
        return ExitCode.MISTAKE
    if out_of_memory_in(error) is not None:
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAULT


def record_exit(run_dir: Path, code: ExitCode, reason: str, **details: Any) -> bool:
    """Writes ``exit.json`` unless it exists.

    The first rank that fails writes it before its process ends. Only then do the others fail, because their
    connections break, and that error is of no interest. gloo has no type for it (torch 2.13: a plain RuntimeError), so
    the order is what tells the cause from its consequences.

    Returns:
        Whether this call wrote it; False if it exists.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    record = {"code": int(code), "name": code.name.lower(), "reason": reason, "time": time.time(), **details}
    try:
        stream = RunLayout(run_dir).exit.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with stream:
            stream.write(json.dumps(record, indent=2) + "\n")
    except OSError:
        forget_exit(run_dir)
        raise
    return True


def forget_exit(run_dir: Path) -> None:
    """Removes the record of an earlier start."""
    RunLayout(run_dir).exit.unlink(missing_ok=True)


def recorded_exit(run_dir: Path, patience_s: float = 0.0) -> tuple[ExitCode, str] | None:
    """Code and reason from ``exit.json``; None if it does not exist or cannot be read.

    Args:
        patience_s: how long to wait for it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            record = json.loads(RunLayout(run_dir).exit.read_text(encoding="utf-8"))
            return ExitCode(record["code"]), str(record["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
