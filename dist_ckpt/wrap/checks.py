"""What keeps a plan from being applied wrongly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from dist_ckpt.blocks import class_name, find_blocks
from dist_ckpt.errors import PlanError, choices
from dist_ckpt.names import named_modules, unwrap
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.wrap.module import is_recomputed


def refuse_other_checkpointing(model: nn.Module) -> None:
    """Raises PlanError if the model already recomputes, whoever made it so, or is compiled."""
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


def refuse_what_outlives_an_outer_region(plan: Plan) -> None:
    """Raises PlanError if a nested region has everything or its inputs wait in host memory.

    That would happen in the first forward, for a recompute that makes them anew. Results of single operations know
    better: inside another region they are kept from its recompute on.
    """
    for outer in plan.regions:
        for region in outer.walk():
            if region is not outer and (region.save.offloads_everything or region.save.inputs == "offload"):
                here, around = (" + ".join(one.modules) for one in (region, outer))
                raise PlanError(
                    f"{here} offloads inside the region of {around}, which recomputes what would wait in host memory: "
                    "leave one of the two out of the plan"
                )


def refuse_other_model(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError if the plan names what the model does not have, or says nothing about some of its blocks."""
    modules = dict(named_modules(model))
    model_name = class_name(unwrap(model))
    for name in (*(name for region in plan.all_regions() for name in region.modules), *plan.blocks):
        if name not in modules:
            raise PlanError(
                f"the plan names {name!r}, which {model_name} does not have; {choices(name, _siblings(name, modules))}"
            )
    if plan.blocks:
        blocks = find_blocks(model, plan.policy.get("blocks", "auto"))
        if missing := tuple(block for block in blocks if block not in plan.blocks):
            raise PlanError(
                f"the plan says nothing about {', '.join(fold_names(missing))}: it was made for a model of "
                f"{len(plan.blocks)} blocks, and this {model_name} has {len(blocks)}"
            )


def refuse_unfit(name: str, module: nn.Module) -> None:
    """Raises PlanError if a module has no forward that could be run again."""
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
