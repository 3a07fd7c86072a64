"""What became of one run of a sweep, read from the run's own folder and kept beside it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.run_layout import WARM_UP_STEPS
from dist_ckpt.trainer.exits import ExitCode, recorded_exit
from dist_ckpt.trainer.run_folder import RunFolder
from dist_ckpt.typed import Choice

FILE = "outcome.json"
CONSOLE = "console.log"
"""What torchrun and all ranks of a run have printed."""


class Status(Choice):
    """How a run has ended."""

    done = "done"
    out_of_memory = "out of memory"
    refused = "refused"
    """The policy does not fit the model or the engine, or is not proven right for them."""
    failed = "failed"


@dataclass(frozen=True)
class Outcome:
    """One run. Figures are empty unless it is ``done``."""

    status: Status
    reason: str = ""
    """Why it is not done."""
    losses: tuple[float, ...] = ()
    """Of every update."""
    step_s: tuple[float, ...] = ()
    """Of those updates that are timed."""
    saved_bytes: int | None = None
    """Activations at their peak, on the rank that keeps the most."""
    peak_bytes: int | None = None
    """The allocator's peak in the last update, on the rank where it is highest; None if nothing was recorded."""

    @property
    def is_done(self) -> bool:
        return self.status is Status.done

    def to_json(self) -> str:
        data = dataclasses.asdict(self) | {"status": self.status.name}
        return json.dumps(data, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Outcome:
        """The inverse of :meth:`to_json`."""
        data: dict[str, Any] = json.loads(text)
        status, losses, step_s = Status[data.pop("status")], tuple(data.pop("losses")), tuple(data.pop("step_s"))
        return Outcome(status, losses=losses, step_s=step_s, **data)


def outcome_of(folder: Path, code: int) -> Outcome:
    """What a run that has ended left in its folder.

    Args:
        code: torchrun's exit code, which says no more than whether it is 0.
    """
    run = RunFolder(folder)
    if code != 0:
        return Outcome(*_failure(folder))
    lines = read_json_lines(run.metrics)
    ranks = read_json_lines(run.memory)[-1]["ranks"]
    return Outcome(
        Status.done,
        losses=tuple(line["loss"] for line in lines),
        step_s=tuple(line["step_s"] for line in lines[WARM_UP_STEPS:-1]),
        saved_bytes=_highest(rank["activations"] for rank in ranks),
        peak_bytes=_highest(rank["peak"] for rank in ranks),
    )


def stored(folder: Path) -> Outcome | None:
    """The outcome of a run that was done before; None if it never was, or not to its end."""
    try:
        return Outcome.from_json((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(folder: Path, outcome: Outcome) -> None:
    """Keeps an outcome; :func:`stored` reads it back."""
    unfinished = folder / f".{FILE}.new"
    unfinished.write_text(outcome.to_json(), encoding="utf-8")
    unfinished.replace(folder / FILE)


def _failure(folder: Path) -> tuple[Status, str]:
    console = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace")
    recorded = recorded_exit(folder)
    if recorded is not None and recorded[0] is ExitCode.OUT_OF_MEMORY:
        return Status.out_of_memory, recorded[1]
    if re.search(r"exitcode +: -9\b", console):
        # What the others record is but a connection that broke.
        return Status.out_of_memory, "a rank was killed (SIGKILL), which is what Linux does when memory has run out"
    if recorded is None:
        last = next((line for line in reversed(console.splitlines()) if line.strip()), "it has printed nothing")
        return Status.failed, last.strip()
    code, reason = recorded
    return (Status.refused if code is ExitCode.MISTAKE else Status.failed), reason


def _highest(counts: Any) -> int | None:
    known: Sequence[int] = [count for count in counts if count is not None]
    return max(known, default=None)
