"""Mode ``selective_attention``: chosen modules inside each block are regions."""

from __future__ import annotations

from dist_ckpt.plan import Region
from dist_ckpt.planning.inside import select_inside
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import SelectiveAttentionPolicy


def plan_selective_attention(target: Target, policy: SelectiveAttentionPolicy) -> Planned:
    """The chosen modules of each block recompute whole; raises PlanError for a pattern that matches nothing."""
    chosen, matched = select_inside(target, policy.modules, key="modules")
    return Planned(tuple(Region((name,)) for name in chosen), matched)
