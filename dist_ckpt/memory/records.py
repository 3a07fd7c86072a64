"""What is reported of a rank's memory, and of all ranks together. All figures are bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ACCOUNTED = ("params", "grads", "optimizer", "activations", "other")
"""What a rank's memory is accounted for by; :attr:`RankMemory.accounted` is their sum."""

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class RankMemory:
    """One rank at one step. ``None`` where the device cannot say.

    ``params grads optimizer other live unattributed`` are read at the boundary: after the last backward of the step,
    with the loss freed and before the optimizer step.
    """

    rank: int
    device: str
    step: int
    params: int
    grads: int
    optimizer: int
    """Moments and fp32 master weights."""
    other: int
    """Buffers, communication buckets, unsharded copies."""
    activations: int | None
    """The step's peak of saved bytes: what forward left for backward, in the worst micro-batch. ``None`` if no forward
    of the step was measured."""
    offloaded: int | None = None
    """The same for saved bytes that wait in host memory: on the CPU a part of ``activations``, on an accelerator not
    among them. ``None`` if none do."""
    stage: int | None = None
    """Pipeline stage; ``None`` without a pipeline."""
    live: int | None = None
    """What the allocator holds for live tensors at the boundary."""
    peak: int | None = None
    """The allocator's highest ``live`` since the last report."""
    reserved: int | None = None
    """What the allocator holds from the device at most, in use or cached."""
    device_used: int | None = None
    """In use on the whole device, by everyone."""
    non_torch: int | None = None
    """Of that, what this rank's allocator does not hold: CUDA's context, NCCL, workspaces, other processes."""
    capacity: int | None = None
    """Memory of the whole device."""
    alloc_retries: int | None = None
    """How often the allocator had to give back its cache to serve a request."""
    at_peak: dict[str, Any] | None = None
    """What ``peak`` consists of, by kind, and its ``phase``; after a deep step alone."""
    leak: str | None = None
    """Memory that has been growing from report to report, in words; see :class:`~dist_ckpt.memory.leaks.LeakWatch`."""

    @property
    def unattributed(self) -> int | None:
        """Live at the boundary, but owned by none of the categories."""
        owned = self.params + self.grads + self.optimizer + self.other
        return None if self.live is None else self.live - owned

    @property
    def accounted(self) -> int | None:
        """The categories at the boundary and the peak of activations together, which never coincide: an upper bound."""
        if self.activations is None:
            return None
        return self.params + self.grads + self.optimizer + self.activations + self.other

    @property
    def peak_or_accounted(self) -> int | None:
        """The most that is known of this rank: the allocator's peak where there is one, else what is accounted."""
        return self.peak if self.peak is not None else self.accounted

    @property
    def headroom(self) -> int | None:
        """What was left of the device's memory when the allocator held the most; what others use is not taken off."""
        held = max((count for count in (self.reserved, self.peak) if count is not None), default=None)
        return None if self.capacity is None or held is None else self.capacity - held

    def to_dict(self) -> dict[str, Any]:
        """JSON data, the derived figures included."""
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RankMemory:
        """The inverse of :meth:`to_dict`. What has a default may be missing, as in data of an earlier version.

        Raises:
            TypeError: other fields are missing, or there are unknown ones, which would be lost unseen.
        """
        return RankMemory(**{name: value for name, value in data.items() if name not in _DERIVED})


_DERIVED = ("unattributed", "accounted")


@dataclass(frozen=True)
class MemoryReport:
    """Every rank at one step."""

    step: int
    ranks: tuple[RankMemory, ...]

    @property
    def heaviest(self) -> RankMemory:
        """The rank with the most memory: by the allocator's peak where there is one, else by what is accounted."""
        return max(self.ranks, key=lambda r: r.peak_or_accounted or 0)

    def __str__(self) -> str:
        told = (*ACCOUNTED[:-1], "offloaded", ACCOUNTED[-1], "accounted", "peak")
        columns = ("rank", *(c for c in told if any(getattr(r, c) is not None for r in self.ranks)))
        unit = byte_unit([getattr(r, c) for r in self.ranks for c in columns[1:]])
        rows = [[str(r.rank), *(format_bytes(getattr(r, c), unit) for c in columns[1:])] for r in self.ranks]
        lines = ["".join(f"{cell:>13}" for cell in row) for row in (columns, *rows)]
        return "\n".join([f"memory per rank at step {self.step}, {unit}", *lines])

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ranks": [r.to_dict() for r in self.ranks]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> MemoryReport:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError: it is no such data.
        """
        return MemoryReport(data["step"], tuple(map(RankMemory.from_dict, data["ranks"])))


def format_bytes(count: int | None, unit: str = "auto") -> str:
    """Bytes for people: GiB from one GiB on, else MiB, three digits after the point; ``-`` for ``None``.

    Args:
        unit: ``GiB`` or ``MiB`` to force one, for columns.
    """
    if count is None:
        return "-"
    if unit == "auto":
        unit = byte_unit([count])
    return f"{count / (GIB if unit == 'GiB' else MIB):,.3f}"


def in_bytes(count: float | None) -> str:
    """Bytes in a sentence, with their unit.

    >>> in_bytes(3 * 2**29), in_bytes(2**20), in_bytes(None)
    ('1.500 GiB', '1.000 MiB', '-')
    """
    return "-" if count is None else f"{format_bytes(int(count))} {byte_unit([int(count)])}"


def byte_unit(counts: Sequence[int | None]) -> str:
    """The unit in which a column of byte counts reads best."""
    return "GiB" if max((c for c in counts if c is not None), default=0) >= GIB else "MiB"
