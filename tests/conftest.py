"""What every test may use: the session's groups of ranks. ``tests/verification.py`` has the tiers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace

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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hides from measurements the tensors that other tests of this process have left, and keeps them meanwhile."""
    gc.collect()
    left = {id(one): one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}
    collector = SimpleNamespace(
        get_objects=lambda: [one for one in gc.get_objects() if id(one) not in left],
        get_referents=gc.get_referents,
        get_referrers=gc.get_referrers,
    )
    monkeypatch.setattr("dist_ckpt.memory.holders.gc", collector)
    yield
    left.clear()
