"""A training state saved under one engine and number of ranks is the same under every other, bit for bit."""

from __future__ import annotations

import errno
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from dist_ckpt.compat.dcp import StateWriter
from dist_ckpt.errors import StateError
from dist_ckpt.states.agreement import OtherRankFailed, on_rank_zero, together
from dist_ckpt.states.training_state import load_training_state, save_training_state
from dist_ckpt.trainer.state import StateStore
from tests.ranks import RankGroups
from tests.state_toys import Toy, adamw, assert_same, sharded, train, whole

EXTRA = {"step": 3, "position": 24, "best": None}


def _save(rank: int, world: int, engine: str, path: str, options: dict[str, Any]) -> tuple[Any, Tensor, Any]:
    """Three steps, a save and two steps more: the state, random numbers and state after each."""
    model = sharded(Toy(tied=options.get("tied", True)), engine, options.get("recompute", False))
    optimizer = adamw(model)
    torch.manual_seed(100 + rank)
    train(model, optimizer, steps=3)
    if options.get("evaluated"):
        with torch.no_grad():
            model.eval()(torch.zeros(2, 5, dtype=torch.int64))
        model.train()
    save_training_state(path, model, optimizer, EXTRA)
    state, drawn = whole(model, optimizer), torch.rand(4)
    train(model, optimizer, steps=2, seed=2)
    return state, drawn, whole(model, optimizer)


def _load(
    rank: int, world: int, engine: str, path: str, options: dict[str, Any]
) -> tuple[Any, Tensor, Any, dict[str, Any]]:
    """What :func:`_save` returns, from a model and optimizer that were other ones before; and the extra."""
    model = sharded(Toy(tied=options.get("tied", True), seed=9), engine, options.get("recompute", False))
    optimizer = adamw(model)
    if options.get("used"):
        train(model, optimizer, steps=1)
        model(torch.zeros(2, 5, dtype=torch.int64)).backward()
    extra = load_training_state(path, model, optimizer)
    state, drawn = whole(model, optimizer), torch.rand(4)
    train(model, optimizer, steps=2, seed=2)
    return state, drawn, whole(model, optimizer), extra


def _check_load(ranks: RankGroups, saved: list[Any], engine: str, world: int, path: str, **options: Any) -> None:
    """Loads under an engine and compares with what each rank saved."""
    loaded = [_load(0, 1, engine, path, options)] if engine == "one" else ranks(world).run(_load, engine, path, options)
    for rank, (state, drawn, _, extra) in enumerate(loaded):
        assert_same(state, saved[0][0])
        assert extra == {**EXTRA, "rng": world == len(saved)}
        if world == len(saved):
            assert torch.equal(drawn, saved[rank][1]), "its own random numbers go on"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("ddp", 4), ("fsdp2", 2)),
        (("fsdp1", 4), ("fsdp2", 2)),
        (("fsdp2", 4), ("one", 1)),
        (("one", 1), ("fsdp1", 2)),
        (("hsdp", 4), ("ddp", 2)),
    ],
    ids=lambda end: f"{end[0]}-{end[1]}",
)
def test_state_moves_between_engines_and_world_sizes(
    ranks: RankGroups, tmp_path: Path, source: tuple[str, int], target: tuple[str, int]
) -> None:
    _move(ranks, tmp_path, source, [target])


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    [("one", 1), *itertools.product(("ddp", "fsdp1", "fsdp2", "hsdp"), (2, 4))],
    ids=lambda end: f"{end[0]}-{end[1]}",
)
def test_state_moves_from_each_to_each(ranks: RankGroups, tmp_path: Path, source: tuple[str, int]) -> None:
    targets = [(engine, world) for world in (1, 2, 4) for engine in ("ddp", "fsdp1", "fsdp2")]
    _move(ranks, tmp_path, source, [("one", 1), *targets, ("hsdp", 2), ("hsdp", 4)])


def _move(ranks: RankGroups, tmp_path: Path, source: tuple[str, int], targets: list[tuple[str, int]]) -> None:
    engine, world = source
    path = str(tmp_path / "state")
    saved = [_save(0, 1, engine, path, {})] if engine == "one" else ranks(world).run(_save, engine, path, {})
    for target in targets:
        _check_load(ranks, saved, *target, path)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_training_goes_on_as_if_never_stopped(ranks: RankGroups, tmp_path: Path, engine: str) -> None:
    """With dropout, after an evaluation, under a recompute wrapper, into an optimizer that has stepped."""
    path = str(tmp_path / "state")
    saved = ranks(2).run(_save, engine, path, {"recompute": True, "evaluated": True})
    loaded = ranks(2).run(_load, engine, path, {"used": True})
    for before, after in zip(saved, loaded, strict=True):
        assert_same(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert_same(before[2], after[2])


def test_saving_does_not_change_the_training(ranks: RankGroups, tmp_path: Path) -> None:
    for engine in ("ddp", "fsdp1", "fsdp2"):
        for with_save, without in ranks(2).run(_train_with_and_without_saving, engine, str(tmp_path / engine)):
            assert_same(with_save, without)
        assert ranks(2).outputs() == ["", ""], "and warns of nothing"


def _train_with_and_without_saving(rank: int, world: int, engine: str, path: str) -> tuple[Any, Any]:
    ends = []
    for saving in (True, False):
        model = sharded(Toy(), engine)
        optimizer = adamw(model)
        torch.manual_seed(5)
        if saving:
            save_training_state(f"{path}-0", model, optimizer, {})
        train(model, optimizer, steps=1)
        if saving:
            save_training_state(f"{path}-1", model, optimizer, {})
        train(model, optimizer, steps=2)
        ends.append(whole(model, optimizer))
    return ends[0], ends[1]


def test_more_ranks_than_elements(ranks: RankGroups, tmp_path: Path) -> None:
    """FSDP1: ranks without any part of a parameter still save, load and go on."""
    for world, path in ((4, "four"), (2, "two")):
        outcomes = ranks(world).run(_tiny, str(tmp_path / path))
        assert all(outcomes), outcomes


def _tiny(rank: int, world: int, path: str) -> bool:
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(nn.Linear(1, 1), use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if seed == 0:
            for _ in range(3):
                model(torch.ones(2, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            had_state = bool(optimizer.state)
            save_training_state(path, model, optimizer, {})
            assert bool(optimizer.state) == had_state
        else:
            load_training_state(path, model, optimizer)
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        ends.append(whole(model, optimizer)["tensors"])
    return all(torch.equal(ends[0][key], value) for key, value in ends[1].items())


def _load_error(rank: int, world: int, engine: str, path: str, layers: int = 2) -> str:
    model = sharded(Toy(layers=layers, seed=9), engine)
    optimizer = adamw(model)
    before = whole_local(model)
    try:
        load_training_state(path, model, optimizer)
    except StateError as error:
        assert not optimizer.state, "a refused state leaves no moments behind"
        assert all(torch.equal(a, b) for a, b in zip(before, whole_local(model), strict=True))
        return str(error)
    return "loaded"


def whole_local(model: nn.Module) -> list[Tensor]:
    """This rank's part of each weight."""
    return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_mistakes_reach_every_rank_alike(ranks: RankGroups, tmp_path: Path, engine: str) -> None:
    path = tmp_path / "state"
    ranks(2).run(_save, engine, str(path), {})

    def message(layers: int = 2) -> str:
        messages = ranks(2).run(_load_error, engine, str(path), layers, timeout_s=30)
        assert messages[0] == messages[1]
        return messages[0]

    assert "model has 4 layers, state has 2" in message(layers=4)
    shard = path / "__1_0.distcp"  # the last to be checked: on rank 1 or 0, by their number
    good = shard.read_bytes()
    shard.write_bytes(good[:-1])
    assert message() == f"{shard}: is damaged: it has {len(good) - 1} bytes of {len(good)}"
    shard.write_bytes(good[:500] + bytes([good[500] ^ 1]) + good[501:])
    assert message() == f"{shard}: is damaged: its content is not what was written"
    shard.write_bytes(good)
    assert message() == "loaded"


def _save_error(rank: int, world: int, path: str) -> str:
    model = sharded(Toy(), "fsdp2")
    optimizer = adamw(model)
    bad = {"when": object()} if rank == 1 else {}
    try:
        save_training_state(path, model, optimizer, bad)
    except StateError as error:
        return str(error)
    return "saved"


def test_extra_that_one_rank_cannot_write_stops_all(ranks: RankGroups, tmp_path: Path) -> None:
    messages = ranks(2).run(_save_error, str(tmp_path / "state"), timeout_s=30)
    assert messages[0] == messages[1] and "JSON" in messages[0]
    assert not (tmp_path / "state").exists()


def _save_with_full_disk(rank: int, world: int, engine: str, path: str) -> str:
    def write_data(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", f"{path}/__1_0.distcp")

    model = sharded(Toy(), engine)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(StateWriter, "write_data", write_data)
        try:
            optimizer = adamw(model)
            StateStore(path, 1).save(1, lambda folder, extra: save_training_state(folder, model, optimizer, extra))
        except StateError as error:
            return str(error)
    return "saved"


def test_disk_that_is_full_for_one_rank_stops_all(ranks: RankGroups, tmp_path: Path) -> None:
    for engine in ("ddp", "fsdp1"):
        path = tmp_path / engine
        messages = ranks(2).run(_save_with_full_disk, engine, str(path), timeout_s=30)
        assert messages[0] == messages[1]
        assert "No space left on device" in messages[0] and "__1_0.distcp" in messages[0]
        assert not list(path.iterdir())


def _agree(rank: int, world: int, bad: int, kind: str) -> str:
    def action() -> int:
        if rank == bad:
            raise {"user": StateError, "system": OSError, "bug": KeyError}[kind]("why")
        return rank

    outcomes = []
    for shared in (together, on_rank_zero):
        try:
            outcomes.append(repr(shared(action)))
        except (StateError, KeyError, OtherRankFailed) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return "; ".join(outcomes)


def test_ranks_agree_on_success_and_failure(ranks: RankGroups) -> None:
    assert ranks(2).run(_agree, -1, "user") == ["[0, 1]; 0"] * 2
    assert ranks(2).run(_agree, 1, "user") == ["StateError: why; 0"] * 2
    assert ranks(2).run(_agree, 0, "system") == ["StateError: why; StateError: why"] * 2
    other = "OtherRankFailed: rank 1 failed: KeyError: 'why'; 0"
    assert ranks(2).run(_agree, 1, "bug") == [other, "KeyError: 'why'; 0"]


def _save_step(model: nn.Module, optimizer: Optimizer, step: int, path: Path, extra: dict[str, Any]) -> None:
    save_training_state(path, model, optimizer, {**extra, "step": step})


def _run_store(rank: int, world: int, directory: str) -> list[str]:
    model = sharded(Toy(), "fsdp2")
    optimizer = adamw(model)
    store = StateStore(directory, keep=2)
    for step in (1, 2, 3):
        train(model, optimizer, steps=1)
        store.save(step, partial(_save_step, model, optimizer, step))
    latest = store.resolve("auto")
    assert latest is not None and load_training_state(latest, model, optimizer)["step"] == 3
    if rank == 1:
        os.chdir("/")  # what is found is decided by rank 0 alone
    return [str(latest), str(store.latest())]


def test_ranks_share_one_store(ranks: RankGroups, tmp_path: Path) -> None:
    assert ranks(2).run(_run_store, str(tmp_path)) == [[str(tmp_path / "step_3")] * 2] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]
