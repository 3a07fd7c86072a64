"""Limits on a process's memory: that they are real, and that they can be lifted where nothing is left."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dist_ckpt.errors import ConfigError
from dist_ckpt.memory.out_of_memory.limits import MemoryLimit, _control_groups, capacity_bytes, held_bytes
from dist_ckpt.trainer.config import Config, TrainConfig
from dist_ckpt.trainer.memory_limit import limit_memory

CPU = torch.device("cpu")
MIB = 2**20


def held() -> int:
    count = held_bytes(CPU)
    if count is None:
        pytest.skip("needs /proc")
    return count


def test_the_allocator_runs_into_a_limit_until_it_is_lifted() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MemoryLimit(CPU, held() + 64 * MIB)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught, limit:
        kept = torch.empty(40 * MIB, dtype=torch.uint8)
        torch.empty(40 * MIB, dtype=torch.uint8)
    assert caught.value is not None and kept.numel() == 40 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert limit.held_bytes is not None and limit.start_bytes is not None
    assert limit.held_bytes - limit.start_bytes >= 40 * MIB, "what was held when it was lifted"
    torch.empty(80 * MIB, dtype=torch.uint8)
    limit.lift()


def test_a_limit_can_be_lifted_where_nothing_is_left() -> None:
    """Neither for tensors nor for Python's own objects."""
    kept: list[object] = []

    def fill() -> None:
        size = 16 * MIB
        while size > 64:
            try:
                while True:
                    kept.append(torch.empty(size, dtype=torch.uint8) if size > 2**16 else bytes(size))
            except (RuntimeError, MemoryError):
                size //= 2
        while True:
            kept.append([object()])

    with pytest.raises(MemoryError), MemoryLimit(CPU, held() + 24 * MIB):
        fill()
    kept.clear()
    torch.empty(80 * MIB, dtype=torch.uint8)


def test_a_limit_of_others_leaves_a_reserve() -> None:
    """One that is not ours to lift: ``ulimit -d``, or the machine's end."""
    before, kept = resource.getrlimit(resource.RLIMIT_DATA), []
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (held() + 24 * MIB, before[1]))
        with pytest.raises(RuntimeError), MemoryLimit(CPU):
            while True:
                kept.append(torch.empty(MIB, dtype=torch.uint8))
        assert kept
        torch.empty(4 * MIB, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_no_error_no_lifting() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MemoryLimit(CPU, held() + 512 * MIB)
    try:
        with limit:
            pass
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limit.nbytes
    finally:
        limit.lift()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_without_a_limit_nothing_is_set() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with MemoryLimit(CPU):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_lifting_gives_an_accelerator_the_fraction_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a double, for there is no device here."""
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: given.append(part))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    MemoryLimit(torch.device("cuda", 0), 250).lift()
    assert given == [0.25, 0.5]


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_around_the_own_one_count(tmp_path: Path, version: int) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    base, file = (root / "memory", "memory.limit_in_bytes") if version == 1 else (root, "memory.max")
    own.write_text("3:cpu,cpuacct:/other\n2:memory:/job/task\n" if version == 1 else "0::/job/task\n")
    (base / "job" / "task").mkdir(parents=True)
    (base / "job" / "task" / file).write_text("max\n")
    (base / "job" / file).write_text("3000\n")
    (base / file).write_text("5000\n")
    assert _control_groups(root, own) == [3000, 5000]
    assert _control_groups(root, tmp_path / "missing") == []


def test_a_fraction_is_one_of_the_machine() -> None:
    limit = limit_memory(Config(train=TrainConfig(memory_fraction=0.75)), CPU)
    limit.lift()
    assert limit.nbytes == int(0.75 * capacity_bytes(CPU))


@pytest.mark.parametrize(("gib", "says"), [(0.01, "before there is a model"), (1e6, "this machine has")])
def test_limits_that_make_no_sense(gib: float, says: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ConfigError, match=f"train.memory_limit_gib={gib}.*{says}"):
        limit_memory(Config(train=TrainConfig(memory_limit_gib=gib)), CPU)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
