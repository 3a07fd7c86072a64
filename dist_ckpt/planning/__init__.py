"""Policy → Plan: a file a mode, each a pure function of the model's module names and the policy."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, overload

from torch import nn

from dist_ckpt.blocks import class_name, find_blocks
from dist_ckpt.compat.pipeline_module import is_pipeline_module, refuse_a_step, stages_of_pipeline, whole_pipeline
from dist_ckpt.cost import LossFn, ModelInput
from dist_ckpt.errors import PlanError
from dist_ckpt.names import unwrap
from dist_ckpt.plan import Plan, Stages, fold_names, stages_of
from dist_ckpt.planning.every_k import plan_every_k
from dist_ckpt.planning.first_n import plan_first_n
from dist_ckpt.planning.full import plan_full
from dist_ckpt.planning.function import Function
from dist_ckpt.planning.function import recompute as recompute
from dist_ckpt.planning.measure import freed_bytes, measure_blocks
from dist_ckpt.planning.nested import plan_nested
from dist_ckpt.planning.offload import plan_offload
from dist_ckpt.planning.options import with_options
from dist_ckpt.planning.per_stage import plan_per_stage
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.planning.repairs import fire_again, repairs
from dist_ckpt.planning.replay import read_plan
from dist_ckpt.planning.segments import plan_segments
from dist_ckpt.planning.selective import plan_selective
from dist_ckpt.planning.selective_attention import plan_selective_attention
from dist_ckpt.policy import (
    BlockPolicy,
    EveryKPolicy,
    FirstNPolicy,
    FullPolicy,
    NestedPolicy,
    OffloadPolicy,
    PerStagePolicy,
    Policy,
    PolicySpec,
    RecomputePolicy,
    ReplayPolicy,
    SegmentsPolicy,
    SelectiveAttentionPolicy,
    SelectivePolicy,
    listed,
    policy_from,
)
from dist_ckpt.wrap.apply import apply_plan

_PLANNERS: Mapping[type[Policy], Callable[[Target, Any], Planned]] = types.MappingProxyType(
    {
        FullPolicy: plan_full,
        EveryKPolicy: plan_every_k,
        FirstNPolicy: plan_first_n,
        SelectivePolicy: plan_selective,
        SelectiveAttentionPolicy: plan_selective_attention,
        SegmentsPolicy: plan_segments,
        NestedPolicy: plan_nested,
        OffloadPolicy: plan_offload,
    }
)


def make_plan(
    model: nn.Module,
    policy: PolicySpec,
    batch: ModelInput | None = None,
    loss_fn: LossFn | None = None,
    stages: Stages = (),
) -> Plan:
    """The plan that a policy means for a model. The model is only looked at, and may live on the meta device.

    Args:
        model: whole, whatever pipeline it is for; or a DeepSpeed ``PipelineModule``, whose plan is the same on every
            rank.
        policy: a mode name, a mapping with ``mode`` (a dict or an OmegaConf node), a policy object, or ``None``.
        batch: a micro-batch, as :func:`~dist_ckpt.plan_cost` takes it, for policies that measure: ``min_bytes`` and
            ``k: sqrt``. Only shapes and dtypes matter.
        loss_fn: (model, batch) → scalar loss, where the model does not return one itself.
        stages: of a pipeline, as :func:`~dist_ckpt.stages.partition` makes them. The policy is planned within each:
            segments and counts of blocks start anew, and none crosses a boundary.

    Raises:
        PlanError: an unknown mode or option; blocks or patterns that match nothing; no batch where one is needed;
            stages that are not the model's, or that cut a block.
    """
    asked = policy_from(policy)
    if any(is_pipeline_module(inside) for inside in model.modules()):
        model, stages = _whole_pipeline(model, batch, stages)
    _refuse_other_stages(model, stages)
    if isinstance(asked, ReplayPolicy):
        return read_plan(model, asked, stages)
    if isinstance(asked, PerStagePolicy):
        return plan_per_stage(asked, stages, functools.partial(_plan, model, batch, loss_fn, stages))
    return _plan(model, batch, loss_fn, stages, asked)


def _plan(
    model: nn.Module,
    batch: ModelInput | None,
    loss_fn: LossFn | None,
    stages: Stages,
    asked: Policy,
    stage: int | None = None,
) -> Plan:
    """The plan of one policy for all stages, or for one of them."""
    if not isinstance(asked, BlockPolicy):
        return Plan(policy=asked.to_dict(), stages=stages)
    if asked.min_bytes and batch is None:
        raise PlanError(f"ckpt.min_bytes={asked.min_bytes} needs a batch to measure regions on: make_plan(…, batch)")
    blocks = Plan(blocks=find_blocks(model, asked.blocks), stages=stages).blocks  # which refuses one that is cut
    if stage is not None:
        blocks = tuple(block for block in blocks if stage in stages_of(block, stages))
        if not blocks:
            raise PlanError(f"stage {stage} has no blocks, only {', '.join(fold_names(stages[stage])) or 'functions'}")
    excluded = _excluded(model, asked.exclude, blocks)
    chosen = tuple(block for block in blocks if block not in excluded)
    if not chosen:
        raise PlanError(f"ckpt.exclude={asked.exclude!r} leaves no block; ask for mode 'none'")
    measured = functools.partial(measure_blocks, model, batch, loss_fn) if batch is not None else None
    planned = _PLANNERS[type(asked)](Target(model, chosen, stages if stage is None else (), measured), asked)
    regions = planned.regions
    if isinstance(asked, RecomputePolicy):
        regions = tuple(with_options(region, asked) for region in regions)
    notes = planned.notes
    if asked.min_bytes and batch is not None:
        freed = freed_bytes(model, regions, batch, loss_fn)
        small = [region for region in regions if freed[region.modules] < asked.min_bytes]
        regions = tuple(region for region in regions if region not in small)
        notes += _left_out({region.modules: freed[region.modules] for region in small})
    covered = tuple(name for region in regions for name in region.modules)
    return Plan(
        blocks=blocks,
        regions=regions,
        stages=stages,
        matched=tuple((_matches(model, asked, stages, stage) | dict(planned.matched)).items()),
        repairs=repairs(model, regions),
        unmatched=tuple(b for b in blocks if not any(c == b or c.startswith(f"{b}.") for c in covered)),
        policy=asked.to_dict(),
        notes=notes + fire_again(model, regions),
    )


def _whole_pipeline(model: nn.Module, batch: ModelInput | None, stages: Stages) -> tuple[nn.Module, Stages]:
    """The modules of all stages of a DeepSpeed ``PipelineModule``, and how it is cut."""
    if not is_pipeline_module(model):
        raise PlanError(
            f"this {class_name(model)} holds a DeepSpeed PipelineModule: give the PipelineModule itself, before "
            "deepspeed.initialize"
        )
    if stages:
        raise PlanError(f"this {class_name(model)} is cut into stages already: leave stages out")
    if batch is not None:
        refuse_a_step(model, ". To plan, leave the batch out, and with it min_bytes; k: sqrt then takes √n")
    return whole_pipeline(model), stages_of_pipeline(model)


def _refuse_other_stages(model: nn.Module, stages: Stages) -> None:
    modules = dict(unwrap(model).named_modules(remove_duplicate=False)) if stages else {}
    for stage, names in enumerate(stages):
        if unknown := [name for name in names if name not in modules]:
            raise PlanError(
                f"stage {stage} owns {unknown[0]!r}, which {class_name(unwrap(model))} does not have; stages are made "
                "by dist_ckpt.stages.partition for this very model"
            )


@overload
def apply(  # type: ignore[overload-overlap]  # a model is a callable too
    model: nn.Module, policy: PolicySpec, batch: ModelInput | None = None, loss_fn: LossFn | None = None
) -> Plan: ...


@overload
def apply(model: Function, policy: PolicySpec) -> Function: ...


def apply(model: Any, policy: PolicySpec, batch: ModelInput | None = None, loss_fn: LossFn | None = None) -> Any:
    """Makes a plan for the model and applies it: the one line for an existing training loop, before sharding.

    Args, but for ``stages``, and errors are those of :func:`make_plan` and :func:`~dist_ckpt.apply_plan`.

    Returns:
        The plan, for printing or saving; that of a DeepSpeed ``PipelineModule`` is about all stages, of which this
        rank's is applied. A function in place of a model comes back as :func:`recompute` makes it.
    """
    if callable(model) and not isinstance(model, nn.Module):
        return recompute(model, policy)
    plan = make_plan(model, policy, batch, loss_fn)
    apply_plan(model, plan)
    return plan


def _excluded(model: nn.Module, exclude: str | tuple[str, ...], blocks: tuple[str, ...]) -> tuple[str, ...]:
    """The blocks that are left alone; raises PlanError for a pattern that matches none."""
    found: tuple[str, ...] = ()
    for pattern in listed(exclude):
        named = find_blocks(model, pattern, key="exclude")
        here = tuple(block for block in blocks if block in named)
        if not here:
            raise PlanError(
                f"ckpt.exclude={pattern!r} matches no block; the blocks are {', '.join(fold_names(blocks))}"
            )
        found += here
    return found


def _left_out(freed: Mapping[tuple[str, ...], int]) -> tuple[str, ...]:
    """A note for regions that free as much as each other; freed: modules of a region → bytes."""
    alike: dict[int, list[str]] = {}
    for modules, count in freed.items():
        alike.setdefault(count, []).append(" + ".join(fold_names(modules)))
    return tuple(f"left out {', '.join(fold_names(tuple(n)))}: frees {count:,} bytes" for count, n in alike.items())


def _matches(model: nn.Module, policy: BlockPolicy, stages: Stages, stage: int | None) -> dict[str, int]:
    """How many modules each pattern for blocks matched, in one stage if the policy is its own."""
    found = {}
    for key, specs in (("blocks", policy.blocks), ("exclude", policy.exclude)):
        for spec in listed(specs):
            names = find_blocks(model, spec, key=key)
            found[f"{key}={spec}"] = sum(stage is None or stage in stages_of(name, stages) for name in names)
    return found
