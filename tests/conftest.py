"""What every test may use: the session's groups of ranks. ``tests/verification.py`` has the tiers."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

# Before torch starts a pool of threads: one thread a process keeps the order of arithmetic, and so every
# bitwise comparison, and leaves the cores to the ranks.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

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
def visible_bytes() -> Callable[[], int]:
    """Counts the bytes of all tensors in the process, those that the tests before have left among them."""

    def count() -> int:
        gc.collect()
        storages: dict[int, int] = {}
        for one in gc.get_objects():
            if not issubclass(type(one), torch.Tensor) or issubclass(type(one), FakeTensor) or one.device.type != "cpu":
                continue
            for tensor in (one, one.grad if one.is_leaf else None):
                with contextlib.suppress(NotImplementedError, RuntimeError):  # kinds without a storage
                    storage = tensor.untyped_storage() if tensor is not None else None
                    if storage is not None and storage.resizable():
                        storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    return count
