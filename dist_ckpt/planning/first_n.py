"""Mode ``first_n``: the first blocks are regions, the others are kept."""

from __future__ import annotations

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Region
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import FirstNPolicy


def plan_first_n(target: Target, policy: FirstNPolicy) -> Planned:
    """The first n blocks recompute whole; raises PlanError where there are fewer."""
    if policy.n > len(target.blocks):
        raise PlanError(f"ckpt.n={policy.n}: there are {len(target.blocks)} blocks; mode 'full' recomputes them all")
    return Planned(tuple(Region((block,)) for block in target.blocks[: policy.n]))
