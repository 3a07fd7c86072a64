"""Mode ``offload``: what chosen modules save for backward waits in host memory."""

from __future__ import annotations

from dist_ckpt.plan import EVERYTHING, OpRule, Region, SaveRule
from dist_ckpt.planning.inside import select_inside
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import OffloadPolicy


def plan_offload(target: Target, policy: OffloadPolicy) -> Planned:
    """The chosen modules offload all that they save; raises PlanError for a pattern that matches nothing."""
    chosen, matched = select_inside(target, policy.modules, key="modules")
    save = SaveRule(ops=(OpRule("offload", EVERYTHING),))
    return Planned(tuple(Region((name,), save) for name in chosen), matched)
