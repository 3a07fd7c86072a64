"""What a planner returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dist_ckpt.plan import Region


@dataclass(frozen=True)
class Planned:
    """The regions of a plan, and for each pattern of its policy how many modules it matched."""

    regions: tuple[Region, ...]
    matched: Mapping[str, int] = field(default_factory=dict)
