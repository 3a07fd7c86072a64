"""What a planner is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from dist_ckpt.plan import Region, Stages, stages_of


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
    stages: Stages = ()
    """Of a pipeline: what counts blocks counts anew in each, and no region crosses a boundary."""
    measured: Callable[[tuple[str, ...]], Mapping[str, BlockBytes]] | None = None
    """Measures blocks on the user's batch, where there is one."""

    def by_stage(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The blocks of each stage that has any, with the stage's name as the end of a phrase; without a pipeline all
        of them."""
        if not self.stages:
            yield "", self.blocks
        for stage in range(len(self.stages)):
            # A tied module's first owner plans it; what holds for one of its stages holds for all.
            if blocks := tuple(block for block in self.blocks if stages_of(block, self.stages)[0] == stage):
                yield f" in stage {stage}", blocks


@dataclass(frozen=True)
class Planned:
    """The regions of a plan, and what its reader should know."""

    regions: tuple[Region, ...]
    matched: Mapping[str, int] = field(default_factory=dict)
    """For each pattern of the policy, how many modules it matched."""
    notes: tuple[str, ...] = ()
