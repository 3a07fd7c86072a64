"""The allocations alive in a step: when each was made and freed, and who was seen to own it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dist_ckpt.compat.profiler import Change, Op, dtype_name
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
    """Whether the end is not its own, which nobody has reported, but the next use of its address."""

    def is_alive(self, at: int) -> bool:
        """At a moment; what is freed in that moment is not."""
        return (self.start is None or self.start <= at) and (self.end is None or at < self.end)


def follow(
    changes: Sequence[Change],
    seen: Iterable[Sighting],
    times: Mapping[int, int],
    gone: Mapping[int, int],
    before: Iterable[tuple[int, int]] = (),
) -> list[Allocation]:
    """All allocations that are alive at some time of a step.

    What was there before has no event of its own on the CPU, not even when it is freed (c10/core/CPUAllocator.cpp,
    ``ProfiledCPUMemoryReporter``): it is known from having been seen at a mark, and its end from ``gone``, or from
    its address being used again.

    Args:
        changes: in order of time.
        seen: at marks.
        times: of the marks.
        gone: address of something seen at the first mark → the time from which it was not there any more.
        before: (address, bytes) of what an allocator says was there.
    """
    live = _Live()
    for address, nbytes in before:
        live.add(Allocation(address, nbytes, None))
    by_mark: dict[int, list[Sighting]] = {}
    for sighting in seen:
        by_mark.setdefault(sighting.mark, []).append(sighting)
    # A sighting comes after a change of the same moment. Ends of what was there before come first of all.
    moments: list[tuple[int, int, Change | Sighting | int]] = [(change.at, 1, change) for change in changes]
    moments += [(times[mark], 2, sighting) for mark, found in by_mark.items() for sighting in found]
    moments += [(at, 0, address) for address, at in gone.items()]
    for at, _, moment in sorted(moments, key=lambda one: one[:2]):
        if isinstance(moment, Change):
            live.change(moment)
        elif isinstance(moment, Sighting):
            live.see(moment, at)
        else:
            live.end(moment, at, if_before=True)
    return live.everything


def end_unreported(
    allocations: Iterable[Allocation],
    ops: Sequence[Op],
    times: Mapping[int, int],
    may_be_unreported: Callable[[Allocation], bool],
) -> None:
    """Ends allocations whose free was not recorded at their last recorded use.

    Collectives on the CPU have threads of their own, and whichever of them or the caller lets go of a buffer last frees
    it (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, ``runLoop``). Only the caller's thread is recorded then.

    Args:
        times: of the marks.
        may_be_unreported: whether something that has no end can have been freed in another thread.
    """
    missing = [
        one
        for one in allocations
        if one.start is not None and (one.is_overdue or (one.end is None and may_be_unreported(one)))
    ]
    by_address: dict[int, list[Allocation]] = {}
    for one in missing:
        by_address.setdefault(one.address, []).append(one)
    last_use: dict[int, int] = {}
    for one in missing:
        assert one.start is not None
        made = ops[one.op].end if one.op >= 0 else one.start
        last_use[id(one)] = max([made, *(times[sighting.mark] + 1 for sighting in one.seen)])
    for op in ops:
        for given in op.inputs:
            for one in by_address.get(given.address, ()):
                if one.is_alive(op.start):
                    last_use[id(one)] = max(op.end, last_use[id(one)])
    for one in missing:
        used = last_use[id(one)]
        one.end = used if one.end is None else min(used, one.end)


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

    def end(self, address: int, at: int, if_before: bool = False) -> bool:
        one = self._at.get(address)
        if one is None or (if_before and one.start is not None):
            return False
        one.end = at
        del self._at[address]
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
