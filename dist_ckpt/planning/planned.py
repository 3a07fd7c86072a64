"""What a planner is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from dist_ckpt.plan import Region


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block in one micro-batch, without a policy."""

    inputs: int
    """Of the tensors that it is given and no other block is."""
    kept: int
    """Of all that it keeps for backward, besides those."""


@dataclass(frozen=True)
class Target:
    """What is to be planned: a model and those of its blocks that the policy does not exclude."""

    model: nn.Module
    blocks: tuple[str, ...]
    measured: Callable[[tuple[str, ...]], Mapping[str, BlockBytes]] | None = None
    """Measures blocks on the user's batch, where there is one."""


@dataclass(frozen=True)
class Planned:
    """The regions of a plan, and what its reader should know."""

    regions: tuple[Region, ...]
    matched: Mapping[str, int] = field(default_factory=dict)
    """For each pattern of the policy, how many modules it matched."""
    notes: tuple[str, ...] = ()
