"""The ledger: bytes by category, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable

from dist_ckpt.memory.owners import CATEGORIES, Category, Owner
from dist_ckpt.memory.storages import Storages


def ledger(owners: Iterable[Owner]) -> dict[Category, int]:
    """Bytes of each category on this rank.

    Tied weights, views and aliases count once; a storage with owners in two categories belongs to the one that comes
    first in :data:`CATEGORIES` (a gradient that is a view of a communication bucket is a gradient). Tensors that are
    not on a device of their own (meta) count nothing.
    """
    found = list(owners)
    storages = Storages()
    return {
        category: sum(storages.add(t) for kind, _, t in found if kind == category and t.device.type != "meta")
        for category in CATEGORIES
    }
