"""Mode ``full``: each block is one region."""

from __future__ import annotations

from torch import nn

from dist_ckpt.plan import Region
from dist_ckpt.planning.planned import Planned
from dist_ckpt.policy import FullPolicy


def plan_full(model: nn.Module, blocks: tuple[str, ...], policy: FullPolicy) -> Planned:
    """Every block recomputes whole."""
    return Planned(tuple(Region((block,)) for block in blocks))
