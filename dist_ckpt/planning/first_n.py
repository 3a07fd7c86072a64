"""Mode ``first_n``: the first blocks are regions, the others are kept."""

from __future__ import annotations

from dist_ckpt.errors import PlanError, counted
from dist_ckpt.plan import Region
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import FirstNPolicy


def plan_first_n(target: Target, policy: FirstNPolicy) -> Planned:
    """The first n blocks of each stage recompute whole; raises PlanError where there are fewer."""
    chosen: list[str] = []
    for where, blocks in target.by_stage():
        if policy.n > len(blocks):
            other = "; mode 'per_stage' has an n for each" if where else ""
            found = f"{'is' if len(blocks) == 1 else 'are'} {counted(len(blocks), 'block')}"
            raise PlanError(f"ckpt.n={policy.n}: there {found}{where}; mode 'full' recomputes them all{other}")
        chosen += blocks[: policy.n]
    return Planned(tuple(Region((block,)) for block in chosen))
