"""Mode ``every_k``: one block in k is a region."""

from __future__ import annotations

from dist_ckpt.plan import Region
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import EveryKPolicy


def plan_every_k(target: Target, policy: EveryKPolicy) -> Planned:
    """Blocks 0, k, 2k, … of each stage recompute whole."""
    return Planned(tuple(Region((block,)) for _, blocks in target.by_stage() for block in blocks[:: policy.k]))
