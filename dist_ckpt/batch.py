"""What a language-model batch is, to engines, models and data alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position without a target."""

Batch = Mapping[str, Tensor]
"""``input_ids`` and ``labels``, each (batch, seq) int64; labels[t] is the target of position t."""


def count_targets(batch: Batch) -> int:
    """How many positions of a batch have a target."""
    return int((batch["labels"] != IGNORE_INDEX).sum())
