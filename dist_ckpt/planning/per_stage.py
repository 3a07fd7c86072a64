"""Mode ``per_stage``: each stage of a pipeline has a policy of its own."""

from __future__ import annotations

from collections.abc import Callable

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Plan, Stages
from dist_ckpt.policy import BlockPolicy, FullPolicy, NoPolicy, PerStagePolicy, Policy


def plan_per_stage(policy: PerStagePolicy, stages: Stages, plan: Callable[[Policy, int], Plan]) -> Plan:
    """The plans of all stages as one.

    Args:
        plan: (policy, stage) → its plan.

    Raises:
        PlanError: no pipeline, another number of policies than stages, or a policy that does not fit its stage.
    """
    count = len(policy.per_stage)
    if not stages:
        raise PlanError(
            "ckpt.per_stage: there are no stages. It belongs to a pipeline: engine=deepspeed_pipe with engine.stages, "
            "or make_plan(…, stages=…); without one choose a single mode"
        )
    if count != len(stages):
        raise PlanError(
            f"ckpt.per_stage has {count} polic{'y' if count == 1 else 'ies'}, and there are {len(stages)} stages "
            "(engine.stages): write one for each stage, 'none' where nothing is to be recomputed"
        )
    parts: list[Plan] = []
    for stage, asked in enumerate(policy.per_stage):
        try:
            parts.append(_kept_whole(policy, stage, plan) if isinstance(asked, NoPolicy) else plan(asked, stage))
        except PlanError as error:
            raise PlanError(f"ckpt.per_stage[{stage}]: {error}; mode 'none' leaves a stage alone") from None
    return Plan(
        blocks=tuple(dict.fromkeys(block for part in parts for block in part.blocks)),
        regions=tuple(dict.fromkeys(region for part in parts for region in part.regions)),
        stages=stages,
        matched=tuple(
            (f"{pattern} in stage {n}", found) for n, part in enumerate(parts) for pattern, found in part.matched
        ),
        unmatched=tuple(dict.fromkeys(block for part in parts for block in part.unmatched)),
        repairs=tuple(dict.fromkeys(repair for part in parts for repair in part.repairs)),
        policy=policy.to_dict(),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _kept_whole(policy: PerStagePolicy, stage: int, plan: Callable[[Policy, int], Plan]) -> Plan:
    """A stage in which nothing is recomputed: its blocks are what other stages' policies call so."""
    spec = next((one.blocks for one in policy.per_stage if isinstance(one, BlockPolicy)), None)
    try:
        blocks = plan(FullPolicy(blocks=spec), stage).blocks if spec is not None else ()
    except PlanError:  # it has none
        blocks = ()
    return Plan(blocks=blocks, unmatched=blocks)
