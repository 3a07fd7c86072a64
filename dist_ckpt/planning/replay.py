"""Mode ``plan``: a plan as it was written."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Plan, Stages
from dist_ckpt.policy import ReplayPolicy
from dist_ckpt.wrap.checks import refuse_other_model


def read_plan(model: nn.Module, policy: ReplayPolicy, stages: Stages) -> Plan:
    """The plan in the policy's file, checked to be about a model with these blocks, and cut for these stages.

    Raises:
        PlanError: no such file, no plan, a plan for a model with other blocks, or a region that cannot be cut.
    """
    if not policy.path:
        raise PlanError("ckpt.path is missing: mode 'plan' needs the file of a plan, as ckpt.path=run/plan.json")
    try:
        plan = Plan.from_json(Path(policy.path).read_text(encoding="utf-8")).cut(stages)
        refuse_other_model(model, plan)
    except (OSError, UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"ckpt.path={policy.path}: {error}") from None
    return plan
