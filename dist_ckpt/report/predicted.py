"""What a run's plan should cost, stage by stage: ``cost.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_ckpt.cost import StageCost


@dataclass(frozen=True)
class Predicted:
    """What one stage's plan should cost; the only one without a pipeline. FLOPs are of one micro-batch."""

    stage: int | None
    in_flight: int
    """Micro-batches that are held at once at the peak; both figures of saved bytes are of all of them."""
    saved_bytes: int
    baseline_saved_bytes: int
    flops: int
    baseline_flops: int
    parameters: int

    @staticmethod
    def of(cost: StageCost, in_pipeline: bool) -> Predicted:
        """A stage's cost as a run's folder has it."""
        one = cost.micro_batch
        return Predicted(
            stage=cost.stage if in_pipeline else None,
            in_flight=cost.in_flight,
            saved_bytes=cost.saved_bytes,
            baseline_saved_bytes=one.baseline_saved_bytes * cost.in_flight,
            flops=one.flops,
            baseline_flops=one.baseline_flops,
            parameters=cost.parameters,
        )

    @property
    def recomputed(self) -> float | None:
        """FLOPs that recompute adds, as a fraction of those without it; None where there are none."""
        return self.flops / self.baseline_flops - 1 if self.baseline_flops else None


def to_json(costs: Sequence[Predicted]) -> str:
    """The text of ``cost.json``."""
    return json.dumps([dataclasses.asdict(one) for one in costs], indent=2) + "\n"


def from_json(text: str) -> tuple[Predicted, ...]:
    """The inverse of :func:`to_json`.

    Raises:
        ValueError, TypeError: it is no such text.
    """
    return tuple(Predicted(**one) for one in json.loads(text))
