"""Control of activation memory in distributed PyTorch training.

Names load on first use, so that the command line can reject a mistake before torch is imported. Public as well are
:mod:`dist_ckpt.stages`, with which a model says how a pipeline can cut it, and :mod:`dist_ckpt.deepspeed_config`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt.cost import PlanCost, StageCost, plan_cost, stage_costs
    from dist_ckpt.errors import DistCkptError, EngineError, MeasureError, PlanError
    from dist_ckpt.guards.accumulation import guard_accumulation
    from dist_ckpt.memory.ledger import owners_of
    from dist_ckpt.memory.meter import MemoryMeter, gather_report
    from dist_ckpt.memory.out_of_memory.failure import out_of_memory_in
    from dist_ckpt.memory.out_of_memory.post_mortem import PostMortem, post_mortem
    from dist_ckpt.memory.profile.recording import DeepStep
    from dist_ckpt.memory.profile.step_profile import Holding, Phase, StepProfile
    from dist_ckpt.memory.records import MemoryReport, RankMemory
    from dist_ckpt.names import named_parameters
    from dist_ckpt.plan import OpRule, Plan, Region, SaveRule
    from dist_ckpt.planning import apply, make_plan, recompute
    from dist_ckpt.policy import Policy
    from dist_ckpt.verification import Verification, verify
    from dist_ckpt.wrap.apply import apply_plan, remove_plan

_HOMES = {
    "PlanCost": "cost",
    "StageCost": "cost",
    "plan_cost": "cost",
    "stage_costs": "cost",
    "DistCkptError": "errors",
    "EngineError": "errors",
    "MeasureError": "errors",
    "PlanError": "errors",
    "MemoryMeter": "memory.meter",
    "MemoryReport": "memory.records",
    "gather_report": "memory.meter",
    "owners_of": "memory.ledger",
    "out_of_memory_in": "memory.out_of_memory.failure",
    "PostMortem": "memory.out_of_memory.post_mortem",
    "post_mortem": "memory.out_of_memory.post_mortem",
    "DeepStep": "memory.profile.recording",
    "Holding": "memory.profile.step_profile",
    "Phase": "memory.profile.step_profile",
    "StepProfile": "memory.profile.step_profile",
    "guard_accumulation": "guards.accumulation",
    "RankMemory": "memory.records",
    "named_parameters": "names",
    "OpRule": "plan",
    "Plan": "plan",
    "Region": "plan",
    "SaveRule": "plan",
    "make_plan": "planning",
    "recompute": "planning",
    "Policy": "policy",
    "Verification": "verification",
    "verify": "verification",
    "apply": "planning",
    "apply_plan": "wrap.apply",
    "remove_plan": "wrap.apply",
}

__all__ = [
    "DeepStep",
    "DistCkptError",
    "EngineError",
    "Holding",
    "MeasureError",
    "MemoryMeter",
    "MemoryReport",
    "OpRule",
    "Phase",
    "Plan",
    "PlanCost",
    "PlanError",
    "Policy",
    "PostMortem",
    "RankMemory",
    "Region",
    "SaveRule",
    "StageCost",
    "StepProfile",
    "Verification",
    "apply",
    "apply_plan",
    "gather_report",
    "guard_accumulation",
    "make_plan",
    "named_parameters",
    "out_of_memory_in",
    "owners_of",
    "plan_cost",
    "post_mortem",
    "recompute",
    "remove_plan",
    "stage_costs",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dist_ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dist_ckpt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
