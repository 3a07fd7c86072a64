"""What keeps a plan from being applied wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from dist_ckpt.blocks import class_name, find_blocks
from dist_ckpt.compat.pipeline_module import (
    called_through_functions,
    is_pipeline_module,
    refuse_interval,
    stage_of_pipeline,
    stages_of_pipeline,
)
from dist_ckpt.errors import PlanError, choices, counted
from dist_ckpt.names import named_modules, unwrap
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.wrap.module import is_recomputed


def refuse_other_checkpointing(model: nn.Module) -> None:
    """Raises PlanError if the model already recomputes, whoever made it so, or is compiled."""
    for module in model.modules():
        if is_pipeline_module(module):
            refuse_interval(module)
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None):
            raise PlanError(f"{class_name(unwrap(module))} is already compiled: apply the plan first, then compile")
        if isinstance(module, ActivationWrapper):
            raise PlanError(
                f"a {class_name(unwrap(module))} is already in a torch {class_name(module)}: recomputing it twice "
                "gains nothing. Remove one of the two"
            )
    for name, module in named_modules(model):
        if is_recomputed(module):
            where = f"module {name!r}" if name else "its root"
            raise PlanError(f"a plan is already applied to this model ({where} recomputes)")
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
    """Raises PlanError if the plan names what the model does not have, or says nothing about some of its blocks.

    The model of a plan's part has one stage's modules alone. Which of them are blocks cannot be told without the
    others, so what it must not have is all the modules of the other stages.
    """
    modules = dict(named_modules(model))
    model_name = class_name(unwrap(model))
    for name in (*(name for region in plan.all_regions() for name in region.modules), *plan.blocks):
        if name not in modules:
            hint = choices(name, _siblings(name, modules))
            if plan.stage is not None:
                hint = (
                    f"it is the plan of stage {plan.stage}, which owns {', '.join(fold_names(plan.stages[plan.stage]))}"
                )
            elif plan.stages:
                hint = f"{hint}. A model of one stage takes plan.part(stage)"
            raise PlanError(f"the plan names {name!r}, which {model_name} does not have; {hint}")
    if plan.stage is not None:
        own = plan.stages[plan.stage]
        others = {name for names in plan.stages for name in names} - set(own)
        if others and others <= modules.keys():
            raise PlanError(
                f"this is the plan of stage {plan.stage} alone, and this {model_name} has the modules of all "
                f"{len(plan.stages)} stages: apply the whole plan"
            )
    elif plan.blocks and (spec := _blocks_spec(plan)) is not None:
        blocks = find_blocks(model, spec)
        if missing := tuple(block for block in blocks if block not in plan.blocks):
            raise PlanError(
                f"the plan says nothing about {', '.join(fold_names(missing))}: it was made for a model of "
                f"{counted(len(plan.blocks), 'block')}, and this {model_name} has {len(blocks)}"
            )


def _blocks_spec(plan: Plan) -> Any:
    """What the plan's policy calls blocks; None where stages differ in that."""
    policies = plan.policy.get("per_stage")
    if policies is None:
        return plan.policy.get("blocks", "auto")
    specs = [policy["blocks"] for policy in policies if "blocks" in policy]
    return specs[0] if all(spec == specs[0] for spec in specs) else None


def of_this_stage(net: nn.Module, plan: Plan) -> Plan:
    """The part of a plan for the stage that a DeepSpeed ``PipelineModule`` holds, however the plan was cut.

    Raises:
        PlanError: it is the part of another stage, names what lies in no stage, or a module that never runs itself.
    """
    stage = stage_of_pipeline(net)
    for name, layer in called_through_functions(net):
        if any(name in region.modules for region in plan.all_regions()):
            raise PlanError(
                f"the plan recomputes {name!r}, but layer {layer} (a TiedLayerSpec with forward_fn) calls a function "
                "with that module and never the module itself: leave it out, as with ckpt.exclude"
            )
    if plan.stage is None:
        plan = plan.cut(stages_of_pipeline(net)).part(stage)
    elif (plan.stage, plan.stages) != (stage, stages_of_pipeline(net)):
        raise PlanError(f"this is the plan of stage {plan.stage}, and this rank holds another one: stage {stage}")
    return plan


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
