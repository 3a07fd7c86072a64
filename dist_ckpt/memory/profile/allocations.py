"""The allocations alive in a step: when each was made and freed, and who was seen to own it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dist_ckpt.compat.profiler import Change, dtype_name
from dist_ckpt.memory.profile.step_profile import Kind
from dist_ckpt.memory.storages import plain_parts


@dataclass(frozen=True)
class Sighting:
    """A storage as it was met at a mark."""

    mark: int
    address: int
    nbytes: int
    kind: Kind | Literal["visible"]
    """``temporary``: a tensor that the step was handed. ``visible``: one that Python can see, whosever it is."""
    name: str
    shape: tuple[int, ...]
    dtype: str


def sightings(mark: int, kind: Kind | Literal["visible"], name: str, tensor: Tensor) -> Iterable[Sighting]:
    """What is to be noted of a tensor; nothing where it holds no memory."""
    for part in plain_parts(tensor):
        storage = part.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            yield Sighting(
                mark, storage.data_ptr(), storage.nbytes(), kind, name, tuple(part.shape), dtype_name(part.dtype)
            )


@dataclass(frozen=True)
class Gone:
    """A storage that was there at some marks, and is not any more."""

    address: int
    since: int
    """The mark at which it was met."""
    was_there: int
    """The last mark at which it is known to have been there."""
    mark: int
    """The mark by which it was gone."""


@dataclass(eq=False)
class Allocation:
    """One piece of memory."""

    address: int
    nbytes: int
    start: int | None
    """Nanoseconds; ``None`` if it was there before the step."""
    op: int = -1
    """Position of the operation that made it."""
    end: int | None = None
    """``None`` if it outlives the step."""
    seen: list[Sighting] = field(default_factory=list)
    is_overdue: bool = False
    """Whether the end is not its own, which nobody has reported, but that at which it was found to be gone."""
    was_there: int = 0
    """A moment at which it was there for certain."""

    def is_alive(self, at: int) -> bool:
        """At a moment; what is freed in that moment is not."""
        return (self.start is None or self.start <= at) and (self.end is None or at < self.end)


def follow(
    changes: Sequence[Change],
    seen: Iterable[Sighting],
    times: Mapping[int, int],
    gone: Iterable[Gone],
    before: Iterable[tuple[int, int]] = (),
) -> list[Allocation]:
    """All allocations that are alive at some time of a step.

    What was there before has no event of its own on the CPU, not even when it is freed (c10/core/CPUAllocator.cpp,
    ``ProfiledCPUMemoryReporter``): it is known from having been seen at a mark, and its end from ``gone``, or from
    its address being used again. What another thread frees has no event either.

    Args:
        changes: in order of time.
        seen: at marks.
        times: of the marks.
        gone: what was not there any more at a mark.
        before: (address, bytes) of what an allocator says was there.
    """
    live = _Live()
    for address, nbytes in before:
        live.add(Allocation(address, nbytes, None))
    by_mark: dict[int, list[Sighting]] = {}
    for sighting in seen:
        by_mark.setdefault(sighting.mark, []).append(sighting)
    # A sighting comes after a change of the same moment. Ends of what was there before come first of all.
    moments: list[tuple[int, int, Change | Sighting | Gone]] = [(change.at, 1, change) for change in changes]
    moments += [(times[mark], 2, sighting) for mark, found in by_mark.items() for sighting in found]
    moments += [(times[one.mark], 0, one) for one in gone]
    for at, _, moment in sorted(moments, key=lambda one: one[:2]):
        if isinstance(moment, Change):
            live.change(moment)
        elif isinstance(moment, Sighting):
            live.see(moment, at)
        else:
            live.lose(moment.address, at, times[moment.since], times[moment.was_there])
    return live.everything


class _Live:
    """What is alive at one moment, by address."""

    def __init__(self) -> None:
        self.everything: list[Allocation] = []
        self._at: dict[int, Allocation] = {}
        self._addresses: list[int] = []

    def add(self, one: Allocation) -> None:
        for other in self._overlapping(one.address, one.nbytes):
            assert one.start is not None
            self.end(other.address, one.start)
            other.is_overdue = True
        self.everything.append(one)
        self._at[one.address] = one
        insort(self._addresses, one.address)

    def change(self, change: Change) -> None:
        if change.nbytes > 0:
            self.add(Allocation(change.address, change.nbytes, change.at, change.op))
        elif change.nbytes < 0 and not self.end(change.address, change.at):
            # Known to the allocator from a recording before this one, and never seen here.
            self.everything.append(Allocation(change.address, -change.nbytes, None, end=change.at))

    def see(self, sighting: Sighting, at: int) -> None:
        found = self._holding(sighting.address)
        if found is None:
            others = self._overlapping(sighting.address, sighting.nbytes)
            for other in others:  # it has taken their place in an unrecorded thread, nobody knows when
                self.end(other.address, at)
                other.is_overdue = True
            found = Allocation(sighting.address, sighting.nbytes, at if others else None)
            self.add(found)
        found.seen.append(sighting)

    def lose(self, address: int, at: int, since: int, was_there: int) -> None:
        """Ends what was there from a moment to another, and is not any more."""
        one = self._at.get(address)
        if one is not None and (one.start is None or one.start <= since):
            self.end(address, at)
            one.is_overdue, one.was_there = True, was_there

    def end(self, address: int, at: int) -> bool:
        one = self._at.pop(address, None)
        if one is None:
            return False
        one.end = at
        self._addresses.pop(bisect_right(self._addresses, address) - 1)
        return True

    def _holding(self, address: int) -> Allocation | None:
        place = bisect_right(self._addresses, address) - 1
        one = self._at[self._addresses[place]] if place >= 0 else None
        return one if one is not None and address < one.address + one.nbytes else None

    def _overlapping(self, address: int, nbytes: int) -> list[Allocation]:
        place = max(bisect_right(self._addresses, address) - 1, 0)
        found = []
        while place < len(self._addresses) and self._addresses[place] < address + nbytes:
            one = self._at[self._addresses[place]]
            if one.address + one.nbytes > address:
                found.append(one)
            place += 1
        return found
