"""Checks a configuration against its tables, key by key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dist_ckpt.deepspeed_config.keys import STAGES, Key
from dist_ckpt.errors import choices


class Walk:
    """One pass over a configuration, which collects what is wrong with it.

    Args:
        schema: the tables.
        stage: of ZeRO. None where the file has no valid one; then nothing else is said about stages.
    """

    def __init__(self, schema: Mapping[str, Key], stage: int | None) -> None:
        self.schema, self.stage = schema, stage
        self.problems: list[str] = []
        self.notes: list[str] = []

    def taken(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """What DeepSpeed, or what is built from it, acts on: values of the right type, or ``"auto"``."""
        return self._section(data, self.schema, "", asked=True)

    def _section(self, data: Mapping[str, Any], table: Mapping[str, Key], prefix: str, asked: bool) -> dict[str, Any]:
        """``asked`` is False inside of what is switched off, where only spelling and types count."""
        taken: dict[str, Any] = {}
        missing = [(name, key.required) for name, key in table.items() if asked and key.required and name not in data]
        self.problems += [f"{prefix}{name}: is missing, and {required}" for name, required in missing]
        for name, value in data.items():
            where, key = f"{prefix}{name}", table.get(name)
            if key is None:
                self.problems.append(f"{where}: no such key; {self._hint(str(name), table, prefix)}")
                continue
            asks = asked and not key.is_fine(value)
            problem = _type_problem(key, value) or (asks and self._refusal(key, value))
            if problem:
                self.problems.append(f"{shown(where, value)}: {problem}")
            elif isinstance(value, dict) and key.inner:
                before = len(self.problems)
                inner = self._section(value, key.inner, f"{where}.", asked=asks)
                if key.empty and not any(inner.values()) and len(self.problems) == before:
                    self.problems.append(f"{where}: asks for nothing; {key.empty}")
                if asks:
                    taken[name] = inner
            elif key.moot and asks:
                self.notes.append(f"{where}: is not needed: {key.moot}")
            elif asks or (asked and value is not None and (value is not False or not self._refusal(key, value))):
                taken[name] = value if value == "auto" else key.kind.read(value)
        return taken

    def _refusal(self, key: Key, value: Any) -> str:
        """Why a value of the right type is refused where it asks for something; empty for one that is not."""
        if self.stage is not None and self.stage not in key.stages:
            return f"belongs to ZeRO {_stages(key.stages)}, and at stage {self.stage} DeepSpeed ignores it; remove it"
        return "" if key.auto and value == "auto" else key.refused

    def _hint(self, name: str, table: Mapping[str, Key], prefix: str) -> str:
        homes = [
            home for home, keys in _tables(self.schema, "") if home != prefix and name in keys and keys[name].offered
        ]
        if homes and not difflib.get_close_matches(name, table, cutoff=0.9):
            return f"it belongs in {' or '.join(home.rstrip('.') or 'the object around all' for home in homes)}"
        return choices(name, [known for known, key in table.items() if key.offered])


def listed(problems: list[str], path: str | None) -> str:
    """Problems as one message: a line for one, and a line more than there are for several."""
    where = path or "DeepSpeed configuration"
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return "\n  ".join([f"{where}: {len(problems)} problems", *problems])


def is_stage(value: Any) -> bool:
    """Whether a JSON value is a ZeRO stage."""
    return type(value) is int and value in STAGES


def at(data: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted key; None where any part of it is missing."""
    value: Any = data
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def shown(where: str, value: Any) -> str:
    """A key and its value as the file has it, shortened."""
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError, RecursionError):  # an integer that is too long to print, a key that is no string
        text = "…"
    return f"{where}={text if len(text) <= 60 else text[:59] + '…'}"


def _tables(table: Mapping[str, Key], prefix: str) -> Iterator[tuple[str, Mapping[str, Key]]]:
    """Each section with its prefix, such as ``zero_optimization.``."""
    yield prefix, table
    for name, key in table.items():
        if key.inner and key.offered:
            yield from _tables(key.inner, f"{prefix}{name}.")


def _type_problem(key: Key, value: Any) -> str:
    if key.renamed:
        return f"is deprecated; write {key.renamed}"
    null = value is None and None in key.fine and not key.required
    if null or (value == "auto" and key.auto) or key.kind.accepts(value):
        return ""
    if value == "auto":
        return f'"auto" means nothing here; must be {key.kind.described}'
    return f"must be {key.kind.described}{_but(value)}"


def _stages(numbers: tuple[int, ...]) -> str:
    """
    >>> _stages((3,)), _stages((1, 2)), _stages((1, 2, 3))
    ('stage 3', 'stages 1 and 2', 'stages 1, 2 and 3')
    """
    *others, last = map(str, numbers)
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"


def _but(value: Any) -> str:
    """What is wrong with a value that looks right."""
    if isinstance(value, str) and any(character.isdigit() for character in value):
        return ", not a string"
    return ", without a point" if isinstance(value, float) and value.is_integer() else ""
