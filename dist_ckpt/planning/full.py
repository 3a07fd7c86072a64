"""Mode ``full``: each block is one region."""

from __future__ import annotations

from torch import nn

from dist_ckpt.plan import Region
from dist_ckpt.policy import FullPolicy


def plan_full(model: nn.Module, blocks: tuple[str, ...], policy: FullPolicy) -> tuple[Region, ...]:
    """Every block recomputes whole."""
    return tuple(Region((block,)) for block in blocks)
