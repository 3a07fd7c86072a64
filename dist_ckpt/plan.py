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

from dist_ckpt.errors import PlanError, choices, counted
from dist_ckpt.policy import described

SCHEMA = 2

Action = Literal["save", "recompute", "offload"]
Inputs = Literal["keep", "offload"]
DeterminismCheck = Literal["default", "none"]

Stages = tuple[tuple[str, ...], ...]
"""For each stage of a pipeline, in order, the names of the modules that it owns; a tied module has several owners."""

EVERYTHING = "*"
"""As the operation of an ``offload`` rule: whatever a forward saves for backward."""


@dataclass(frozen=True)
class OpRule:
    """What happens to the results of one kind of operation inside a region; the first rule that matches wins."""

    action: Action
    op: str
    """A logical name (``matmul``, ``attention``, …) or an operator (``aten.mm.default``); see :mod:`dist_ckpt.ops`."""
    within: str = "*"
    """Glob over the modules inside the region, relative to it: calls in a matching module, and in modules below it, are
    meant. ``*`` alone: anywhere, the region's own module included."""
    calls: tuple[int, ...] = ()
    """Which matches of a forward of the region are meant, counted from 0 among those that no rule before this one has
    taken; none named means all."""
    every: int = 1
    """Of the matches, counted alike, every n-th is meant, from the first; the rule says nothing about the others."""
    required: bool = True
    """A required rule that matched no call in the first forward of its region is an error."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise PlanError(
                f"op rule for {self.op!r}: no action {self.action!r}; {choices(self.action, get_args(Action))}"
            )
        if type(self.every) is not int or self.every < 1 or (self.every > 1 and self.calls):
            raise PlanError(f"op rule for {self.op!r}: every={self.every} must be at least 1, and excludes calls")
        is_part = self.within != "*" or self.calls or self.every > 1
        if self.op == EVERYTHING and (self.action != "offload" or is_part):
            raise PlanError(f"op rule {self}: only 'offload' takes every operation, and of the whole region")
        if not self.within:
            raise PlanError(f"op rule for {self.op!r}: within is empty; '*' means anywhere in the region")
        if any(type(call) is not int or call < 0 for call in self.calls):
            raise PlanError(f"op rule for {self.op!r}: calls are counted from 0, not {list(self.calls)}")

    @property
    def subject(self) -> str:
        """What the rule is about, without its action."""
        calls = f" calls {', '.join(map(str, self.calls))}" if self.calls else ""
        calls += f" every {self.every}" if self.every > 1 else ""
        within = f" within {self.within}" if self.within != "*" else ""
        return f"{self.op}{calls}{within}"

    def __str__(self) -> str:
        return f"{self.action} {self.subject}" + ("" if self.required else " if present")


@dataclass(frozen=True)
class SaveRule:
    """What a region keeps besides its inputs; what no rule matches is recomputed."""

    inputs: Inputs = "keep"
    """``offload``: what the region needs to run again waits in host memory."""
    ops: tuple[OpRule, ...] = ()

    def __post_init__(self) -> None:
        if self.inputs not in get_args(Inputs):
            raise PlanError(f"region inputs: no {self.inputs!r}; {choices(self.inputs, get_args(Inputs))}")
        if self.offloads_everything and (len(self.ops) > 1 or self.inputs == "offload"):
            raise PlanError(f"{self.ops[0]} leaves nothing to other rules")

    @property
    def offloads_everything(self) -> bool:
        """Whether nothing is recomputed: all that backward needs waits in host memory."""
        return any(rule.op == EVERYTHING for rule in self.ops)

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""
        return self.inputs == "offload" or any(rule.action == "offload" for rule in self.ops)

    def __str__(self) -> str:
        inputs = "offload inputs" if self.inputs == "offload" else "keep inputs only" if not self.ops else ""
        return ", ".join(filter(None, (inputs, *map(str, self.ops))))


@dataclass(frozen=True)
class Region:
    """One span that is recomputed in backward.

    Several modules are a segment: consecutive blocks of which only the first one's inputs are kept. A nested region
    covers modules inside this one's, or blocks of this segment.
    """

    modules: tuple[str, ...]
    save: SaveRule = SaveRule()
    inner: tuple[Region, ...] = ()
    preserve_rng_state: bool = True
    """Dropout draws the same in the recompute. Costs a copy of each generator's state a forward (5 KB on CPU)."""
    determinism_check: DeterminismCheck = "default"
    """``default`` compares shape, dtype and device of what is recomputed; ``none`` trusts it."""
    early_stop: bool = True
    """The recompute ends at the last tensor that backward needs."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise PlanError("a region without modules")
        where = " + ".join(self.modules)
        if self.determinism_check not in get_args(DeterminismCheck):
            raise PlanError(
                f"region {where}: no determinism_check {self.determinism_check!r}; "
                f"{choices(str(self.determinism_check), get_args(DeterminismCheck))}"
            )
        for option in ("preserve_rng_state", "early_stop"):
            if type(getattr(self, option)) is not bool:
                raise PlanError(f"region {where}: {option}={getattr(self, option)!r} must be true or false")
        if len(self.modules) > 1 and self.save.ops:
            raise PlanError(f"region {where}: op rules belong to regions of one module")
        if self.save.offloads_everything and self.inner:
            raise PlanError(f"region {where}: it is not recomputed, so no region can be nested in it")
        for region in self.inner:
            for name in region.modules:
                if not any(self._holds(outer, name, region) for outer in self.modules):
                    raise PlanError(f"the nested region {name!r} does not lie inside {where}")

    def _holds(self, outer: str, name: str, inner: Region) -> bool:
        if name == outer:
            return len(inner.modules) < len(self.modules)
        return name.startswith(f"{outer}." if outer else "")

    @property
    def depth(self) -> int:
        """Levels of regions, this one included."""
        return 1 + max((region.depth for region in self.inner), default=0)

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
    stages: Stages = ()
    """Of a pipeline; no region crosses from one stage to another."""
    matched: tuple[tuple[str, int], ...] = ()
    """For each pattern of the policy, how many modules it matched."""
    unmatched: tuple[str, ...] = ()
    """Blocks in which nothing is recomputed."""
    repairs: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=lambda: {"mode": "none"})
    notes: tuple[str, ...] = ()
    """What whoever reads the plan should know: regions that were left out, how a length was found."""
    planned_for: Stages = ()
    """The stages that the policy was planned for, where the plan was cut for others since."""
    stage: int | None = None
    """Of a part of a plan: which stage it is about."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if not self.stages:
            return
        for what, names in (
            *((f"the block {block!r}", (block,)) for block in self.blocks),
            *((f"the region of {' + '.join(region.modules)}", region.modules) for region in self.regions),
        ):
            if not _common_stages(names, self.stages):
                parts = {n for name in names for n in _parts_of(name, self.stages)}
                where = f"lies in stages {' and '.join(map(str, sorted(parts)))}" if parts else "lies in no stage"
                raise PlanError(f"{what} {where}: {_OWNED}")

    def cut(self, stages: Stages) -> Plan:
        """This plan for a pipeline of other stages, or for a model without any.

        Segments that go on in another stage are split where a stage ends, nested ones too; what is recomputed stays the
        same.

        Raises:
            PlanError: a block or a module that is recomputed lies in no stage, or in several; a part of a plan.
        """
        if self.stage is not None:
            raise PlanError(f"this is the part of stage {self.stage} alone: cut the whole plan")
        if stages == self.stages:
            return self
        original = self.planned_for or self.stages
        if not stages:
            return dataclasses.replace(self, stages=(), planned_for=original)
        for name in (*self.blocks, *(name for region in self.all_regions() for name in region.modules)):
            if name and not _parts_of(name, stages):
                owned = ", ".join(fold_names(tuple(dict.fromkeys(one for names in stages for one in names))))
                raise PlanError(
                    f"the plan names {name!r}, and the stages own {owned}: it is for another model, or recomputes what "
                    "no layer of the pipeline has"
                )
        regions = tuple(piece for region in self.regions for piece in _split(region, stages))
        split = [region for region in self.all_regions() if len(_spans(region.modules, stages)) > 1]
        notes = (f"split where a stage ends: {' + '.join(fold_names(region.modules))}" for region in split)
        return dataclasses.replace(
            self,
            regions=regions,
            stages=stages,
            planned_for=() if stages == original else original,
            notes=tuple(dict.fromkeys((*self.notes, *notes))),
        )

    def part(self, stage: int) -> Plan:
        """What concerns one stage, for :func:`~dist_ckpt.apply_plan` on a model that has this stage's modules alone.

        Raises:
            PlanError: there is no such stage.
        """
        if not (self.stage is None and 0 <= stage < len(self.stages)):
            stages = counted(len(self.stages), "stage")
            remedy = "" if self.stages else "; make_plan(…, stages=…) makes one that has"
            raise PlanError(f"no part for stage {stage}: this plan has {stages}{remedy}{self._whose}")

        def is_here(names: tuple[str, ...]) -> bool:
            return stage in _common_stages(names, self.stages)

        return dataclasses.replace(
            self,
            stage=stage,
            blocks=tuple(name for name in self.blocks if is_here((name,))),
            unmatched=tuple(name for name in self.unmatched if is_here((name,))),
            regions=tuple(region for region in self.regions if is_here(region.modules)),
        )

    @property
    def _whose(self) -> str:
        return f" and is the part of stage {self.stage}" if self.stage is not None else ""

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
        fields = [field.name for field in dataclasses.fields(Plan)]
        if unknown := [name for name in data if name not in fields]:
            raise PlanError(f"not a plan: it has a field {unknown[0]!r}; {choices(unknown[0], fields)}")
        try:
            return Plan(
                blocks=_names(data["blocks"]),
                regions=tuple(_region(r) for r in data["regions"]),
                stages=tuple(_names(s) for s in data["stages"]),
                planned_for=tuple(_names(s) for s in data.get("planned_for", ())),
                stage=_stage(data.get("stage")),
                matched=tuple((str(pattern), int(count)) for pattern, count in data["matched"]),
                unmatched=_names(data["unmatched"]),
                repairs=_names(data["repairs"]),
                policy=dict(data["policy"]),
                notes=_names(data["notes"]),
            )
        except PlanError:
            raise
        except KeyError as error:
            raise PlanError(f"not a plan: it has no field {error}") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"not a plan: {type(error).__name__}: {error}") from None

    def __str__(self) -> str:
        by_hand = self.regions and self.policy.get("mode", "none") == "none"
        named = "by hand" if by_hand else described(self.policy)
        regions, blocks = counted(len(self.regions), "region"), counted(len(self.blocks), "block")
        lines = [f"plan: {named}, {regions} in {blocks}{self._of_stages}"]
        lines += [f"  stage {n}    {line}" for n, line in enumerate(self._stage_lines()) if self.stage in (None, n)]
        lines += [f"  matched    {pattern}: {counted(count, 'module')}" for pattern, count in self.matched]
        lines += [f"  blocks     {name}" for name in fold_names(self.blocks)]
        lines += list(_describe(self.regions, indent="  "))
        lines += [f"  kept whole {name}" for name in fold_names(self.unmatched)]
        lines += [f"  repair     {repair}" for repair in self.repairs]
        lines += [f"  note       {note}" for note in self.notes]
        if count := len(self.planned_for):
            foreign = f"{counted(count, 'stage')} that this model does not have"
            lines.append(f"  note       planned for {counted(count, 'other stage') if self.stages else foreign}")
        return "\n".join(lines)

    @property
    def _of_stages(self) -> str:
        if not self.stages:
            return ""
        count = len(self.stages)
        return f", {counted(count, 'stage')}" if self.stage is None else f", stage {self.stage} of {count}"

    def _stage_lines(self) -> Iterator[str]:
        """What each stage owns, and its policy where stages have their own."""
        policies = self.policy.get("per_stage", ()) if not self.planned_for else ()
        for stage, names in enumerate(self.stages):
            policy = policies[stage] if stage < len(policies) else None
            owned = ", ".join(fold_names(names)) or "no module"
            yield owned if policy is None else f"{owned}: {described(policy)}"


def stages_of(name: str, stages: Stages) -> tuple[int, ...]:
    """The stages that own a module, or one around it: none for what is part of no layer, several for a tied module."""
    return tuple(n for n, owned in enumerate(stages) if any(name == one or name.startswith(f"{one}.") for one in owned))


_OWNED = "one stage has to own it as a whole, so choose another engine.partition or other ckpt.blocks"


def _common_stages(names: tuple[str, ...], stages: Stages) -> set[int]:
    """The stages that own all of some modules."""
    return set.intersection(*(set(stages_of(name, stages)) for name in names))


def _spans(names: tuple[str, ...], stages: Stages) -> list[tuple[str, ...]]:
    """Consecutive modules, by stage."""
    spans: list[list[str]] = []
    common: set[int] = set()
    for name in names:
        owners = set(stages_of(name, stages))
        if not owners:
            raise PlanError(f"{name!r} lies in no stage: {_OWNED}")
        if common & owners:
            spans[-1].append(name)
            common &= owners
        else:
            spans.append([name])
            common = owners
    return [tuple(span) for span in spans]


def _split(region: Region, stages: Stages) -> Iterator[Region]:
    """The region's pieces in each stage, with the pieces of the regions nested in it."""
    spans = _spans(region.modules, stages)
    if len(spans) == 1:
        yield region
        return
    pieces = [piece for inner in region.inner for piece in _split(inner, stages)]
    for span in spans:
        inside = tuple(piece for piece in pieces if all(_is_inside(name, span) for name in piece.modules))
        same = next((piece for piece in inside if piece.modules == span), None)
        if same is None:
            yield dataclasses.replace(region, modules=span, inner=inside)
        else:  # what is left of the outer region is the inner one, which now waits for backward as the outer one did
            save = dataclasses.replace(same.save, inputs=region.save.inputs)
            yield dataclasses.replace(same, save=save, inner=(*same.inner, *(p for p in inside if p is not same)))


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _parts_of(name: str, stages: Stages) -> tuple[int, ...]:
    """The stages that own a module, one around it, or modules in it."""
    inside = (n for n, owned in enumerate(stages) if any(one.startswith(f"{name}.") for one in owned))
    return stages_of(name, stages) or tuple(inside)


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
    kinds: dict[tuple[SaveRule, str], list[Region]] = {}
    for region in regions:
        kinds.setdefault((region.save, _options(region)), []).append(region)
    for (save, options), members in kinds.items():
        verb = "offload  " if save.offloads_everything else "recompute"
        segments = [region.modules for region in members if len(region.modules) > 1]
        names = fold_names(tuple(region.modules[0] for region in members if len(region.modules) == 1))
        for name in (*(" + ".join(fold_names(modules)) for modules in segments), *names):
            yield f"{indent}{verb}  {name}  [{save}{options}]"
        yield from _describe(tuple(inner for region in members for inner in region.inner), indent + "  ")


def _options(region: Region) -> str:
    """What differs from a region's defaults, as the end of its line."""
    words = {
        "RNG not replayed": not region.preserve_rng_state,
        "unchecked": region.determinism_check == "none",
        "to its end": not region.early_stop,
    }
    return "".join(f", {word}" for word, is_so in words.items() if is_so)


def _names(values: list[str]) -> tuple[str, ...]:
    return tuple(str(v) for v in values)


def _stage(stage: Any) -> int | None:
    if stage is not None and type(stage) is not int:
        raise PlanError(f"not a plan: stage {stage!r} is no number of a stage")
    return stage


def _region(data: Mapping[str, Any]) -> Region:  # an unknown field raises TypeError
    rules = tuple(OpRule(**{**rule, "calls": tuple(rule["calls"])}) for rule in data["save"]["ops"])
    save = SaveRule(**{**data["save"], "ops": rules})
    inner = tuple(_region(region) for region in data["inner"])
    return Region(**{**data, "modules": _names(data["modules"]), "save": save, "inner": inner})
