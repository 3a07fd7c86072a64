"""A run's records as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.run_layout import RunLayout, of_rank
from dist_ckpt.report.sinks import Sink


class JsonLines:
    """A file with one JSON object per line, flushed after each, so that a killed run keeps its lines.

    Args:
        path: created with its folder; existing lines are kept.
        after_step: on resuming, the last step that counts: lines of later steps are dropped, as they will be written
            again.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in read_json_lines(path) if line["step"] <= after_step]
            shortened = path.with_name(f".{path.name}.new")  # then renamed: a kill in between loses nothing
            shortened.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            shortened.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunFiles(Sink):
    """The files of a run folder that are always written.

    Args:
        run: its folder.
        after_step: as for :class:`JsonLines`.
    """

    def __init__(self, run: RunLayout, after_step: int = 0) -> None:
        self._metrics, self._memory = JsonLines(run.metrics, after_step), JsonLines(run.memory, after_step)
        self._profiles = run.profiles

    def step(self, line: Mapping[str, float | int]) -> None:
        self._metrics.write(line)

    def memory(self, report: MemoryReport) -> None:
        self._memory.write(report.to_dict())

    def profile(self, profiles: Sequence[StepProfile]) -> None:
        self._profiles.mkdir(exist_ok=True)
        for profile in profiles:
            of_rank(self._profiles, profile.rank).write_text(json.dumps(profile.to_dict()) + "\n", encoding="utf-8")

    def finish(self, exit_code: int) -> None:
        self._metrics.close()
        self._memory.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that was cut short by a kill."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
