"""Applying a plan to a model, in place, and removing it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import CustomPolicy

from dist_ckpt.compat.pipeline_module import allow_later_intervals, is_pipeline_module, refuse_later_intervals
from dist_ckpt.errors import PlanError
from dist_ckpt.guards.caches import leave_caches_alone, switch_off_caches
from dist_ckpt.names import named_modules
from dist_ckpt.plan import Plan, Region
from dist_ckpt.wrap.checks import (
    of_this_stage,
    refuse_other_checkpointing,
    refuse_other_model,
    refuse_unfit,
    refuse_what_outlives_an_outer_region,
)
from dist_ckpt.wrap.module import is_recomputed, join_segment, recompute_module, restore_module
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.segment import Segment


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Makes every region of the plan recompute, in place; checkpointing is non-reentrant throughout.

    Order: plan → apply → compile → shard. A model sharded by FSDP1 takes a plan too, one sharded by FSDP2 only a
    plan without op rules. A model that has the modules of one pipeline stage alone takes ``plan.part(stage)``; a
    DeepSpeed ``PipelineModule`` takes the whole plan, of which its stage is applied.

    Raises:
        PlanError: the model already recomputes (a plan was applied, torch's wrappers, or its own checkpointing), was
            compiled before, or the plan is about another model.
    """
    refuse_other_checkpointing(model)
    refuse_what_outlives_an_outer_region(plan)
    if is_pipeline_module(model):
        plan = of_this_stage(model, plan)
    refuse_other_model(model, plan)
    modules = dict(named_modules(model))
    chosen: dict[nn.Module, Region] = {}
    for region in plan.all_regions():
        for name in region.modules:
            refuse_unfit(name, modules[name])
        if len(region.modules) == 1:
            module = modules[region.modules[0]]
            if module in chosen:
                raise PlanError(
                    f"the plan names {region.modules[0]!r} in two regions, or it is shared under two names of the plan"
                )
            chosen[module] = region
    segments = _segments(plan, modules)
    if plan.has_op_rules() and any(isinstance(m, FSDPModule) for m in model.modules()):
        raise PlanError(
            "op rules after FSDP2 sharding: its hooks inside a region would shift the op-level cache. "
            "Apply the plan before fully_shard"
        )
    # torch's own traversal finds the modules; what would be its wrapper changes each module in place instead.
    offloader = _offloader(model, plan, modules)
    options = {module: {"region": region, "offloader": offloader} for module, region in chosen.items()}
    policy = CustomPolicy(lambda module: options.get(module, False))
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=recompute_module, auto_wrap_policy=policy)  # type: ignore[arg-type]
    if model in chosen:  # the traversal never yields the root
        recompute_module(model, chosen[model], offloader)
    for segment in segments:
        for position, name in enumerate(segment.region.modules):
            join_segment(modules[name], segment, position, offloader)
    if plan.regions:
        switch_off_caches(model)
    if is_pipeline_module(model):
        refuse_later_intervals(model)


def _offloader(model: nn.Module, plan: Plan, modules: Mapping[str, nn.Module]) -> Offloader | None:
    """What the regions of the plan offload with, if any does."""
    regions = list(plan.all_regions())
    if not any(region.save.offloads for region in regions):
        return None
    inside = {m for region in regions for name in region.modules for m in modules[name].modules()}
    return Offloader(around=(module for module in model.modules() if module not in inside))


def _segments(plan: Plan, modules: Mapping[str, nn.Module]) -> list[Segment]:
    """The plan's regions of several modules, each with where its modules are registered."""
    found: list[Segment] = []
    taken: dict[nn.Module, str] = {}
    for region in plan.all_regions():
        if len(region.modules) == 1:
            continue
        for name in region.modules:
            if (other := taken.get(modules[name])) is not None:
                raise PlanError(f"{name!r} is in two segments of the plan, or is shared with {other!r}")
            taken[modules[name]] = name
        parents = [name.rpartition(".") for name in region.modules]
        found.append(Segment(region, tuple((modules[parent], child) for parent, _, child in parents)))
    return found


def remove_plan(model: nn.Module) -> None:
    """Undoes :func:`apply_plan`: every activation is kept again.

    Raises:
        PlanError: the model was sharded by FSDP2 since.
    """
    for module in model.modules():
        if is_recomputed(module):
            restore_module(module)
    leave_caches_alone(model)
    allow_later_intervals(model)
