"""Applying a plan to a model, and the checks that keep it from being applied wrongly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import CustomPolicy

from dist_ckpt.blocks import class_name
from dist_ckpt.errors import PlanError, choices
from dist_ckpt.guards.caches import leave_caches_alone, switch_off_caches
from dist_ckpt.names import named_modules, unwrap
from dist_ckpt.plan import Plan, Region
from dist_ckpt.wrap.module import is_recomputed, join_segment, recompute_module, restore_module
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.segment import Segment


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Makes every region of the plan recompute, in place; checkpointing is non-reentrant throughout.

    Order: plan → apply → compile → shard. A model sharded by FSDP1 takes a plan too, one sharded by FSDP2 only a
    plan without op rules.

    Raises:
        PlanError: the model already recomputes (a plan was applied, torch's wrappers, or its own checkpointing), was
            compiled before, or has no module of a name in the plan.
    """
    _refuse_second_application(model)
    _refuse_what_outlives_an_outer_region(plan)
    modules = dict(named_modules(model))
    chosen: dict[nn.Module, Region] = {}
    for region in plan.all_regions():
        for name in region.modules:
            if name not in modules:
                raise PlanError(
                    f"the plan names {name!r}, which {class_name(unwrap(model))} does not have; "
                    f"{choices(name, _siblings(name, modules))}"
                )
            _refuse_unfit(name, modules[name])
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
    offloader = Offloader() if any(region.save.offloads for region in plan.all_regions()) else None
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


def _refuse_second_application(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None):
            raise PlanError(f"{class_name(unwrap(module))} is already compiled: apply the plan first, then compile")
        if isinstance(module, ActivationWrapper):
            raise PlanError(
                f"a {class_name(unwrap(module))} is already in a torch {class_name(module)}: recomputing it twice "
                "gains nothing. Remove one of the two"
            )
    for name, module in named_modules(model):
        if is_recomputed(module):
            raise PlanError(f"a plan is already applied to this model ({name or 'its root'} recomputes)")
        if getattr(module, "gradient_checkpointing", False) is True:
            raise PlanError(
                f"{name or class_name(module)!r} has its own gradient_checkpointing switched on: switch it off "
                "(model.gradient_checkpointing_disable(), in newer versions model.activation_checkpointing_disable()) "
                "or apply no plan"
            )


def _refuse_what_outlives_an_outer_region(plan: Plan) -> None:
    if plan.policy.get("insist"):
        return
    for outer in plan.regions:
        for region in outer.walk():
            if region is not outer and (region.save.ops or region.save.offloads):
                here, around = (" + ".join(one.modules) for one in (region, outer))
                raise PlanError(
                    f"{here} keeps results inside the region of {around}: they "
                    "stay alive from the first forward to the backward, so that region frees far less than it seems. "
                    'Leave them out, or insist: "insist": true in the plan\'s policy'
                )


def _refuse_unfit(name: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"{name!r} is a scripted module, which cannot be recomputed: script after training")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(f"{name!r} is a {type(module).__name__}, which has no forward: name its children instead")
    if "forward" in module.__dict__:
        raise PlanError(f"{name!r} had its forward replaced on the object: apply the plan before that replacement")


def _siblings(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Modules at the depth of a name that was not found, for a message that stays short."""
    depth = name.count(".")
    return [other for other in modules if other and other.count(".") == depth][:40]
