"""Memory that grows from report to report: whose it is, and who holds it.

On the CPU, what a process holds says next to nothing about its tensors, and looking for these takes tens of
milliseconds: so they are looked for only where the process has grown since the last look.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_ckpt.errors import counted
from dist_ckpt.memory.activations import kept_by_graphs
from dist_ckpt.memory.holders import UNKNOWN, holders_of, visible_tensors
from dist_ckpt.memory.ledger import CATEGORIES, Owner, ledger
from dist_ckpt.memory.out_of_memory.limits import resident_bytes
from dist_ckpt.memory.records import byte_unit, format_bytes
from dist_ckpt.memory.storages import Storages

NOTICEABLE = 2**20
"""Bytes: what grows by less between two reports is not looked for. Lists of losses and caches of scalars do."""

_RISES = 2
"""In a row, after the one that began the search, before it is called a leak: state that is made late, and caches that
fill up once, rise once or twice."""

_ENDS = 4
"""Of graphs, the largest, whose holders are looked for."""


@dataclass(frozen=True)
class Leak:
    """Memory of a rank that grew at each of the last searches."""

    category: str
    """One of the ledger's, or ``unattributed``."""
    nbytes: int
    """Grown between the two steps."""
    first_step: int
    last_step: int
    holder: str | None
    """Who refers to the newest of it, where no part of the training owns it."""

    def __str__(self) -> str:
        unit = byte_unit([self.nbytes])
        nobodys = self.category == "unattributed"
        whose = "memory that nothing owns" if nobodys else f"memory in category '{self.category}'"
        held = f", held by {self.holder}" if self.holder is not None else ""
        return (
            f"{whose} grew by {format_bytes(self.nbytes, unit)} {unit} from step {self.first_step} to "
            f"{self.last_step}{held}"
        )


@dataclass(frozen=True)
class _Look:
    step: int
    by_category: dict[str, int]
    unowned: frozenset[tuple[int, int]]
    """Address and size of each storage that nothing owns."""


class LeakWatch:
    """Watches the memory of one rank that outlives the optimizer step.

    Args:
        owners: of all lasting memory.
    """

    def __init__(self, owners: Callable[[], Iterable[Owner]], device: torch.device) -> None:
        self._owners = owners
        self._device = device
        self._highest: int | None = None
        self._looks: list[_Look] = []
        self.leak: Leak | None = None
        """The first one that was found."""

    def look(self, step: int) -> Leak | None:
        """To be called after an update, at each report; returns the leak that has been found so far."""
        level = self._level()
        if level is None:
            return None
        if self._highest is None:
            self._highest = level
        if self.leak is None and level >= self._highest + NOTICEABLE:
            self._highest = level
            self._search(step, level)
        return self.leak

    def _level(self) -> int | None:
        """Bytes in tensors, or on the CPU in the process; ``None`` where nobody keeps count."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return resident_bytes()

    def _search(self, step: int, level: int) -> None:
        owners = list(self._owners())
        owned = Storages(tensor for _, _, tensor in owners)
        unowned = [tensor for tensor in visible_tensors(self._device) if tensor not in owned]
        nobodys = Storages(unowned)
        in_graphs = kept_by_graphs(unowned, (*(tensor for _, _, tensor in owners), *unowned)).total
        by_category = {str(category): nbytes for category, nbytes in ledger(owners).items()}
        on_device = self._device.type == "cuda"  # where the allocator knows also what only C++ holds
        by_category["unattributed"] = level - sum(by_category.values()) if on_device else nobodys.nbytes + in_graphs
        keys = {_key(tensor): tensor for tensor in unowned}
        self._looks = [*self._looks[-_RISES:], _Look(step, by_category, frozenset(keys))]
        for category in (*CATEGORIES, "unattributed"):
            counts = [look.by_category[category] for look in self._looks]
            rises = [after - before for before, after in itertools.pairwise(counts)]
            if len(rises) == _RISES and min(rises) >= NOTICEABLE:
                before = self._looks[-2].unowned
                new = [tensor for key, tensor in keys.items() if key not in before]
                holder = _described(new) if category == "unattributed" else None
                self.leak = Leak(category, sum(rises), self._looks[0].step, step, holder)


def _key(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _described(tensors: Iterable[Tensor]) -> str | None:
    """Who holds the heaviest of some tensors that are alike, and what they are.

    What an autograd graph keeps is held by no Python object: then it is said who holds an end of a graph.
    """
    first: dict[tuple[object, ...], Tensor] = {}  # no lists of alike ones: they would be found as holders
    count: Counter[tuple[object, ...]] = Counter()
    nbytes: Counter[tuple[object, ...]] = Counter()
    for tensor in tensors:
        key = (tuple(tensor.shape), tensor.dtype, tensor.grad_fn is None)
        first.setdefault(key, tensor)
        count[key] += 1
        nbytes[key] += tensor.untyped_storage().nbytes()
    if not first:
        return None
    heaviest, *others = (key for key, _ in nbytes.most_common())
    shape, dtype = " × ".join(map(str, first[heaviest].shape)), str(first[heaviest].dtype).removeprefix("torch.")
    what = f"{counted(count[heaviest], 'new tensor')}: {shape or 'scalar'} {dtype}"
    ends = [first[key] for key in others if first[key].grad_fn is not None]
    holder, *of_ends = holders_of([first[heaviest], *ends[:_ENDS]])
    if holder != UNKNOWN:
        return f"{holder} ({what})"
    graph = next((f"the graph of {held}" for held in of_ends if held != UNKNOWN), "a graph, or code outside of Python")
    return f"{graph} ({what})"
