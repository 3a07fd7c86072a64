"""When memory ended whose end was not recorded: what was there before the step, and what another thread has freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.compat.profiler import Op
from dist_ckpt.memory.profile.allocations import Allocation, Gone, Sighting
from dist_ckpt.memory.profile.step_profile import Kind
from dist_ckpt.memory.storages import plain_parts

_REPLACED = frozenset[Kind]({"params", "optimizer", "buffers"})
"""Kinds whose tensors stay until another one takes their place. Gradients are given up before there are new ones."""


@dataclass
class _Watched:
    ref: StorageWeakRef
    since: int
    often: bool

    def is_gone(self, address: int) -> bool:
        """Expired, or of no size (FSDP releases storages so)."""
        if self.ref.expired():
            return True
        storage = torch_private.referenced_storage(self.ref)
        return storage is None or storage.data_ptr() != address


class Watch:
    """Storages that were there at a mark, and the marks at which they are gone."""

    def __init__(self) -> None:
        self.gone: list[Gone] = []
        self._watched: dict[int, _Watched] = {}
        self._looked = 0
        """The last mark at which all were looked at."""

    def add(self, mark: int, tensor: Tensor, often: bool) -> None:
        """Watches a tensor's storages from a mark on.

        Args:
            often: look at it before each call of a module, not at marks alone.
        """
        for part in plain_parts(tensor):
            address = part.untyped_storage().data_ptr()
            known = self._watched.get(address)
            if known is not None and known.is_gone(address):
                self.gone.append(Gone(address, known.since, max(self._looked, known.since), mark))
                known = None
            if known is None:
                self._watched[address] = _Watched(torch_private.weak_storage(part), mark, often)

    def has_lost(self) -> bool:
        """Whether something is gone that is looked at often."""
        return any(one.often and one.is_gone(address) for address, one in self._watched.items())

    def look(self, mark: int, before: bool = False) -> None:
        """Notes what is not there any more at a mark.

        Args:
            before: a call of a module: what is looked at often was there a short time ago.
        """
        for address, one in list(self._watched.items()):
            if one.is_gone(address):
                was_there = mark if before and one.often else max(self._looked, one.since)
                self.gone.append(Gone(address, one.since, was_there, mark))
                del self._watched[address]
        self._looked = mark


def end_unreported(
    allocations: Iterable[Allocation],
    ops: Sequence[Op],
    times: Mapping[int, int],
    may_be_unreported: Callable[[Allocation], bool],
    seen: Sequence[Sighting] = (),
) -> None:
    """Ends allocations whose free was not recorded at their last recorded use.

    What a parameter, a buffer or the optimizer's state is replaced by is made while they are still there. Collectives
    on the CPU have threads of their own, and whichever of them or the caller lets go of a buffer last frees it
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, ``runLoop``). Only the caller's thread is recorded then.

    Args:
        times: of the marks.
        may_be_unreported: whether something that has no end can have been freed in another thread.
        seen: all sightings, in order.
    """
    everything = list(allocations)
    missing = [one for one in everything if one.is_overdue or (one.end is None and may_be_unreported(one))]
    by_address: dict[int, list[Allocation]] = {}
    for one in missing:
        by_address.setdefault(one.address, []).append(one)
    replaced = _replaced(everything, ops, seen)
    last_use: dict[int, int] = {}
    for one in missing:
        made = ops[one.op].end if one.op >= 0 else one.start or 0
        at_marks = (times[sighting.mark] + 1 for sighting in one.seen)
        last_use[id(one)] = max([made, one.was_there, replaced.get(id(one), 0), *at_marks])
    for op in ops:
        for given in op.inputs:
            for one in by_address.get(given.address, ()):
                if one.is_alive(op.start):
                    last_use[id(one)] = max(op.end, last_use[id(one)])
    for one in missing:
        used = last_use[id(one)]
        one.end = used if one.end is None else min(used, one.end)


def _replaced(allocations: Iterable[Allocation], ops: Sequence[Op], seen: Sequence[Sighting]) -> dict[int, int]:
    """Allocation's id → when what was met in its place at the mark after was there."""
    by_sighting = {id(sighting): one for one in allocations for sighting in one.seen}
    count: dict[tuple[int, str, str], int] = {}
    last: dict[tuple[str, str, int], Allocation] = {}
    found: dict[int, int] = {}
    for sighting in seen:
        if sighting.kind not in _REPLACED:
            continue
        at_mark = (sighting.mark, sighting.kind, sighting.name)
        count[at_mark] = count.get(at_mark, -1) + 1  # both moments of a parameter have its name
        place = (sighting.kind, sighting.name, count[at_mark])
        before, now = last.get(place), by_sighting[id(sighting)]
        if before is not None and before is not now and now.start is not None:
            found[id(before)] = max(ops[now.op].end if now.op >= 0 else now.start, found.get(id(before), 0))
        last[place] = now
    return found
