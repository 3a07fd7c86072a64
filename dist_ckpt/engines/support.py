"""Which modes are proven right under which engine, precision and with compiled blocks.

What stands here as proven has a test of its own name: ``tests/distributed/test_support.py`` runs every combination, and
``docs/support.md`` shows the outcomes. What does not stand here is untested, and refused unless asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.plan import Plan

MODES = (
    "none",
    "full",
    "every_k",
    "first_n",
    "selective",
    "selective_attention",
    "segments",
    "nested",
    "offload",
    "plan",
    "per_stage",
)
ENGINES = (
    "ddp",
    "fsdp1",
    "fsdp2",
    *(f"deepspeed, ZeRO {stage}" for stage in range(4)),
    *(f"deepspeed_pipe, ZeRO {stage}" for stage in range(2)),
)
"""DeepSpeed's once for each stage of ZeRO that they take."""
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Combination:
    """What a run is made of."""

    mode: str
    engine: str
    precision: str
    compiled: bool

    def __str__(self) -> str:
        name, _, zero = self.engine.partition(", ")
        engine = f"engine={name}" + (f" ({zero})" if zero else "")
        return f"ckpt={self.mode} with {engine}, train.precision={self.precision}" + ", train.compile" * self.compiled


@dataclass(frozen=True)
class Standing:
    """What is known of a combination."""

    verdict: Literal["proven", "refused", "untested"]
    reason: str = ""


def combinations() -> Iterator[Combination]:
    """Every combination that is tested."""
    for mode, engine, precision, compiled in itertools.product(MODES, ENGINES, PRECISIONS, (False, True)):
        combination = Combination(mode, engine, precision, compiled)
        if standing(combination).verdict != "untested":
            yield combination


def standing(combination: Combination) -> Standing:
    """What is known of a combination, and where it is refused why."""
    if combination.mode == "offload" and combination.compiled:
        return Standing(
            "refused", "compiled code saves nothing until the whole block has run, so nothing can be offloaded"
        )
    if combination.mode == "per_stage" and not combination.engine.startswith("deepspeed_pipe"):
        return Standing("refused", "only a pipeline has stages: engine=deepspeed_pipe")
    is_tested = combination.mode in MODES and combination.engine in ENGINES and combination.precision in PRECISIONS
    is_tested = is_tested and not (combination.compiled and combination.engine.startswith("deepspeed"))
    return Standing("proven") if is_tested else Standing("untested")


def modes_of(plan: Plan) -> tuple[str, ...]:
    """The modes that a plan is made of, whoever wrote it: what its regions do, and the mode that its policy names."""
    found: dict[str, None] = {}
    for region in plan.all_regions():
        if region.save.offloads_everything:
            found["offload"] = None
        elif region.save.ops:
            found["selective"] = None
        elif len(region.modules) > 1:
            found["segments"] = None
        else:
            found["full"] = None
        if region.inner:
            found["nested"] = None
    mode = plan.policy.get("mode", "none")
    if mode == "per_stage" and not plan.stages:  # planned for a pipeline, and cut for a model that is whole
        mode = "plan"
    return (*(one for one in found if one != mode), mode)


def engine_row(name: str, zero_stage: int | None = None) -> str:
    """One of :data:`ENGINES`, for engines that know it; a name that stands for itself otherwise."""
    return name if zero_stage is None else f"{name}, ZeRO {zero_stage}"


def unsupported(plan: Plan, engine: str, precision: str, compiled: bool, allow_untested: bool) -> Iterator[str]:
    """Why a plan is not to be run so: the combinations that it is made of, as far as they are not proven right."""
    if compiled:
        yield from _uncompiled(plan)
    for mode in modes_of(plan):
        combination = Combination(mode, engine, precision, compiled)
        found = standing(combination)
        if found.verdict == "refused":
            yield f"{combination}: {found.reason}"
        elif found.verdict == "untested" and not allow_untested:
            yield (
                f"{combination}: no test has proven it right; choose one that docs/support.md shows as proven, or take "
                "it as it is with engine.allow_untested=true"
            )


def _uncompiled(plan: Plan) -> Iterator[str]:
    """What of a plan compiled code would not do."""
    regions = tuple(plan.all_regions())
    if any(region.save.offloads and not region.save.offloads_everything for region in regions):
        yield "train.compile: compiled code has no moment to offload in; choose a plan that offloads nothing"
    if any(not region.early_stop for region in regions):
        yield "train.compile: ckpt.early_stop=false means nothing to compiled code, which recomputes what it needs"
    if any(region.determinism_check == "none" for region in regions):
        yield "train.compile: ckpt.determinism_check=none means nothing to compiled code, which checks nothing"
