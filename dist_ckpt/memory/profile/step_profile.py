"""What a deep step has found on one rank: every allocation of one update, by owner, module and phase."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dist_ckpt.memory.records import byte_unit, format_bytes

Kind = Literal[
    "params", "grads", "optimizer", "activations", "recompute", "unsharded", "communication", "temporary", "buffers",
    "unattributed",
]  # fmt: skip
"""What memory is for at a moment of the step, finer than the ledger's categories.

``activations``: kept by forward for backward, as :class:`~dist_ckpt.memory.activations.SavedBytes` counts it.
``recompute``: made by a region that runs again. ``unsharded``: whole copies of sharded parameters.
``communication``: buckets and buffers of collectives and of pipelines. ``temporary``: allocated and freed within the
step and kept by nobody, and the micro-batches; the weights that autocast has cast and the RNG states that checkpoints
stash are among it. ``unattributed``: alive before or after the step, and owned by nothing that the engine knows.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

PRECEDENCE: tuple[Kind, ...] = (
    "params", "grads", "optimizer", "unsharded", "buffers", "temporary", "activations", "communication",
)  # fmt: skip
"""A storage that is met as several kinds is of the first of these.

A gradient in a bucket is a gradient, a micro-batch is no activation though graphs keep it, and an activation may lie in
what a pipeline exchanges.
"""

ByKind = Mapping[Kind, int]
"""Bytes alive at one moment; every kind is there, and they sum to what the allocator holds."""

_SHOWN = 5
"""Holdings that are printed."""

Work = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True)
class Phase:
    """One part of the step. Phases follow each other without gaps."""

    name: Literal["forward", "loss", "backward", "optimizer", "other"]
    """``optimizer``: from the boundary on, clipping included; ``other``: what an engine does between micro-batches."""
    micro_batch: int | None
    start_s: float
    """From the start of the step, as all times."""
    end_s: float
    peak_bytes: int
    at_peak: ByKind


@dataclass(frozen=True)
class Span:
    """One call of a module, or its share of a backward."""

    module: str
    """Name in the plain model; ``""`` is the model itself."""
    work: Work
    micro_batch: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Holding:
    """Allocations alive at the peak that are alike in all that is said here."""

    kind: Kind
    module: str | None
    """In whose call they were made, or whose parameters they belong to; None where no module was running."""
    source: str
    """The operation that allocated them (``aten::mm``), the parameter they are of, or, for what nobody owns, who
    refers to them (``list in train.py:12``)."""
    shape: tuple[int, ...] | None
    """None where no operation has told it."""
    dtype: str | None
    """``float32``."""
    nbytes: int
    """Of all of them together."""
    count: int


def merge_holdings(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    """Holdings put together where they are alike, heaviest first."""
    found: dict[Holding, tuple[int, int]] = {}
    for one in holdings:
        kind_of_it = replace(one, nbytes=0, count=0)
        nbytes, count = found.get(kind_of_it, (0, 0))
        found[kind_of_it] = nbytes + one.nbytes, count + one.count
    merged = (replace(one, nbytes=nbytes, count=count) for one, (nbytes, count) in found.items())
    return tuple(sorted(merged, key=lambda holding: (-holding.nbytes, holding.source)))


@dataclass(frozen=True)
class StepProfile:
    """One update on one rank, from before its first forward until after its optimizer step."""

    rank: int
    stage: int | None
    device: str
    step: int
    duration_s: float
    start_bytes: int
    """Alive before the step."""
    boundary_bytes: int
    """Alive at the boundary, after the last backward."""
    end_bytes: int
    """Alive after the optimizer step."""
    peak_bytes: int
    peak_s: float
    phase: str
    """The one in which the peak is."""
    at_peak: ByKind
    holdings: tuple[Holding, ...]
    """Alive at the peak, heaviest first; together with ``rest_bytes`` they are the peak."""
    rest_bytes: int
    """Of the peak: holdings too small to be listed."""
    phases: tuple[Phase, ...]
    spans: tuple[Span, ...]
    """Of blocks and of the other modules that stand beside them, in order."""
    times_s: tuple[float, ...]
    timeline: Mapping[Kind, tuple[int, ...]]
    """Bytes of each kind at ``times_s``. Long curves are thinned, and keep their highest moments."""

    def __post_init__(self) -> None:
        assert sum(self.at_peak.values()) == self.peak_bytes
        assert sum(holding.nbytes for holding in self.holdings) + self.rest_bytes == self.peak_bytes
        assert all(sum(phase.at_peak.values()) == phase.peak_bytes for phase in self.phases)
        assert all(before.end_s == after.start_s for before, after in itertools.pairwise(self.phases))

    def __str__(self) -> str:
        """What the peak consists of, kind by kind, and what is heaviest in it."""
        unit = byte_unit([self.peak_bytes])
        heaviest = [(h.kind, h.nbytes, _described(h)) for h in self.holdings[:_SHOWN]]
        kinds = [(kind, nbytes, "") for kind, nbytes in self.at_peak.items() if nbytes]
        lines = [
            f"{kind:<14}{format_bytes(nbytes, unit):>12}  {nbytes / self.peak_bytes:6.1%}  {what}".rstrip()
            for kind, nbytes, what in (*kinds, *heaviest)
        ]
        where = f"rank {self.rank}, step {self.step}"
        title = f"peak of {format_bytes(self.peak_bytes, unit)} {unit} in {self.phase} ({where})"
        return "\n".join((title, *lines[: len(kinds)], "heaviest", *lines[len(kinds) :]))

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepProfile:
        """The inverse of :meth:`to_dict`, also after a way through JSON.

        Raises:
            ValueError: the figures contradict each other.
        """
        holdings = (
            Holding(**h | {"shape": None if h["shape"] is None else tuple(h["shape"])}) for h in data["holdings"]
        )
        made = {
            "holdings": tuple(holdings),
            "phases": tuple(Phase(**phase) for phase in data["phases"]),
            "spans": tuple(Span(**span) for span in data["spans"]),
            "times_s": tuple(data["times_s"]),
            "timeline": {kind: tuple(curve) for kind, curve in data["timeline"].items()},
        }
        try:
            return StepProfile(**{**data, **made})
        except AssertionError as error:
            raise ValueError("the figures of a profile contradict each other") from error


def _described(holding: Holding) -> str:
    """Whose it is and what: ``layers.3.w1: aten::mm, 2 of 512 × 176 float32``."""
    module = f"{holding.module}: " if holding.module else ""
    shape = "" if holding.shape is None else " × ".join(map(str, holding.shape)) or "one number"
    what = " ".join(filter(None, (shape, holding.dtype)))
    return f"{module}{holding.source}" + (f", {holding.count} of {what}" if what else f", {holding.count} in all")
