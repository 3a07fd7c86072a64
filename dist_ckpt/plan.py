"""Region and Plan: which spans of a model are recomputed, as pure data.

Making a plan touches no module and applying one decides nothing, so a plan can be printed, compared, written to a
file and replayed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dist_ckpt.errors import PlanError, choices

SCHEMA = 1

Action = Literal["save", "recompute"]


@dataclass(frozen=True)
class OpRule:
    """What happens to the results of one kind of operation inside a region; the first rule that matches wins."""

    action: Action
    op: str
    """A logical name (``matmul``, ``attention``, …) or an operator (``aten.mm.default``); see :mod:`dist_ckpt.ops`."""
    required: bool = True
    """A required rule that matched no call in the first forward of its region is an error."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise PlanError(
                f"op rule for {self.op!r}: no action {self.action!r}; {choices(self.action, get_args(Action))}"
            )

    def __str__(self) -> str:
        return f"{self.action} {self.op}" + ("" if self.required else " if present")


@dataclass(frozen=True)
class SaveRule:
    """What a region keeps besides its inputs; what no rule matches is recomputed."""

    ops: tuple[OpRule, ...] = ()


@dataclass(frozen=True)
class Region:
    """One span that is recomputed in backward. Every module of a nested region lies inside one of this region."""

    modules: tuple[str, ...]
    save: SaveRule = SaveRule()
    inner: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        if not self.modules:
            raise PlanError("a region without modules")
        for region in self.inner:
            for name in region.modules:
                if not any(name.startswith(f"{outer}." if outer else "") and name != outer for outer in self.modules):
                    raise PlanError(f"the nested region {name!r} does not lie inside {' + '.join(self.modules)}")

    def walk(self) -> Iterator[Region]:
        """This region and all regions nested in it, outermost first."""
        yield self
        for region in self.inner:
            yield from region.walk()


@dataclass(frozen=True)
class Plan:
    """Every region of the whole model, by the modules' own (unwrapped, global) names."""

    blocks: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    matched: tuple[tuple[str, int], ...] = ()
    """For each pattern of the policy, how many modules it matched."""
    unmatched: tuple[str, ...] = ()
    """Blocks in which nothing is recomputed."""
    repairs: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=lambda: {"mode": "none"})
    schema: int = SCHEMA

    def all_regions(self) -> Iterator[Region]:
        """Every region, nested ones included."""
        for region in self.regions:
            yield from region.walk()

    def has_op_rules(self) -> bool:
        return any(region.save.ops for region in self.all_regions())

    def to_json(self) -> str:
        """The plan as JSON text; :meth:`from_json` gives an equal plan."""
        return json.dumps(dataclasses.asdict(self) | {"policy": dict(self.policy)}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads :meth:`to_json`.

        Raises:
            PlanError: no JSON, another schema, or fields that a plan does not have.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"not a plan: no JSON ({error})") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise PlanError(f"not a plan of schema {SCHEMA}: schema {found!r}")
        try:
            return Plan(
                blocks=_names(data["blocks"]),
                regions=tuple(_region(r) for r in data["regions"]),
                stages=tuple(_names(s) for s in data["stages"]),
                matched=tuple((str(pattern), int(count)) for pattern, count in data["matched"]),
                unmatched=_names(data["unmatched"]),
                repairs=_names(data["repairs"]),
                policy=dict(data["policy"]),
            )
        except PlanError:
            raise
        except KeyError as error:
            raise PlanError(f"not a plan: it has no field {error}") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"not a plan: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.policy.items() if k != "mode" and v not in (None, "auto"))
        head = f"plan: {self.policy.get('mode', 'none')}" + (f" ({options})" if options else "")
        lines = [f"{head}, {len(self.regions)} regions in {len(self.blocks)} blocks"]
        lines += [f"  matched    {pattern}: {count} modules" for pattern, count in self.matched]
        lines += [f"  blocks     {name}" for name in fold_names(self.blocks)]
        lines += list(_describe(self.regions, indent="  "))
        lines += [f"  kept whole {name}" for name in fold_names(self.unmatched)]
        lines += [f"  repair     {repair}" for repair in self.repairs]
        return "\n".join(lines)


def fold_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that differ in one number, folded: ``layers.0 … layers.3`` becomes ``layers.{0-3}``."""
    groups: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"(?<![^.])\d+(?![^.])", name)
        key = name if match is None else f"{name[: match.start()]}\0{name[match.end() :]}"
        groups.setdefault(key, []).extend([] if match is None else [int(match.group())])
    return tuple(key.replace("\0", _ranges(numbers)) for key, numbers in groups.items())


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) + "}"


def _describe(regions: tuple[Region, ...], indent: str) -> Iterator[str]:
    """One line a kind of region: those that keep the same and hold the same nested regions stand together."""
    kinds: dict[SaveRule, list[Region]] = {}
    for region in regions:
        kinds.setdefault(region.save, []).append(region)
    for save, members in kinds.items():
        kept = ", ".join(map(str, save.ops)) or "keep inputs only"
        names = tuple(" + ".join(fold_names(region.modules)) for region in members)
        for name in fold_names(names):
            yield f"{indent}recompute  {name}  [{kept}]"
        yield from _describe(tuple(inner for region in members for inner in region.inner), indent + "  ")


def _names(values: list[str]) -> tuple[str, ...]:
    return tuple(str(v) for v in values)


def _region(data: Mapping[str, Any]) -> Region:
    rules, inner = SaveRule(**data["save"]).ops, data["inner"]  # an unknown field raises TypeError
    save = SaveRule(ops=tuple(OpRule(**rule) for rule in rules))  # type: ignore[arg-type]
    return Region(**{**data, "modules": _names(data["modules"]), "save": save, "inner": tuple(map(_region, inner))})
