"""Mode ``full``: each block is one region."""

from __future__ import annotations

from dist_ckpt.plan import Region
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import FullPolicy


def plan_full(target: Target, policy: FullPolicy) -> Planned:
    """Every block recomputes whole."""
    return Planned(tuple(Region((block,)) for block in target.blocks))
