"""A run's records as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that was cut short by a kill."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
