"""What every test may use: the session's groups of ranks. ``tests/verification.py`` has the tiers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Before torch starts a pool of threads: one thread a process keeps the order of arithmetic, and so every
# bitwise comparison, and leaves the cores to the ranks.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.ranks import RankGroups

pytest_plugins = ("pytester", "tests.verification")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroups]:
    """The session's rank groups: ``ranks(2).run(fn, *args)`` runs a module-level function on two ranks."""
    groups = RankGroups()
    try:
        yield groups
    finally:
        groups.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone have to free everything: a cycle would keep it until Python's collector runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
