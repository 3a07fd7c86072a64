"""A training state of a pipeline is that of every other engine, whatever the stages: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_ckpt.errors import StateError
from dist_ckpt.names import named_parameters
from tests.deepspeed_toys import stored
from tests.distributed.pipelines import SIZES, Pipe, prepared, rows
from tests.distributed.training import Job, build_engine
from tests.ranks import RankGroups

ROWS = 4
"""Micro-batches an update, on however many ranks they lie: losses of all engines are comparable."""


@contextmanager
def training(at: Pipe | Job, world: int) -> Iterator[Any]:
    """An engine, which ends with the block."""
    if isinstance(at, Pipe):
        with prepared(world, at) as engine:
            yield engine
        return
    engine = build_engine(at)
    try:
        yield engine
    finally:
        engine.close()


def step(engine: Any, number: int) -> list[float]:
    """Update ``number`` on the same rows for every engine: its loss and norm."""
    gas = ROWS // engine.data_ranks
    batches = [rows(number, m, engine.data_rank, engine.data_ranks, gas) for m in range(gas)]
    result = engine.train_step(batches)
    return [result.loss, result.grad_norm]


def copies(engine: Any) -> dict[str, Tensor]:
    """What this rank's model computes with, if that is whole."""
    return {n: p.detach().clone() for n, p in named_parameters(engine.model) if not hasattr(p, "device_mesh")}


def _saved(rank: int, world: int, at: Pipe | Job, path: str) -> tuple[dict[str, Tensor], list[float]]:
    """Three updates, a save and one update more: the weights saved, and what the last update gave."""
    with training(at, world) as engine:
        torch.manual_seed(100 + rank)
        for number in range(3):
            step(engine, number)
        engine.save(path, {"position": 12})
        return copies(engine), step(engine, 3)


def _moved(
    rank: int, world: int, at: Pipe | Job, path: str, to: str
) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    """Loads into a used engine, and saves; the weights, the extra, and what the next update gives."""
    with training(at, world) as engine:
        step(engine, 0)
        extra = engine.load(path)
        engine.save(to, {"position": extra["position"]})
        return copies(engine), extra, step(engine, 3)


def _pipe(stages: int, world: int, **options: Any) -> tuple[int, Pipe]:
    return world, Pipe(stages=stages, gas=ROWS * stages // world, **options)


def _job(engine: str, world: int, more: dict[str, Any] | None = None, **options: Any) -> tuple[int, Job]:
    return world, Job(engine=engine, model=SIZES | (more or {}), accumulation=ROWS // world, **options)


TIED = {"tied": True}
WIDE = {"tied": True, "vocab_size": 601}
"""ZeRO cuts the weight that two stages share, and not at the same place in both."""
BF16 = {"precision": "bf16"}
WAYS = {
    "pipe2_ddp2": [_pipe(2, 2, zero=1), _job("ddp", 2)],
    "pipe2_pipe4_ddp2": [_pipe(2, 2), _pipe(4, 4), _job("ddp", 2)],
    "pipe2x2_zero3": [_pipe(2, 4, zero=1), _job("deepspeed, ZeRO 3", 2), _pipe(3, 3, model={})],
    "ddp_pipe2x2_fsdp2": [_job("ddp", 2), _pipe(2, 4, zero=1, partition=(4, 2)), _job("fsdp2", 4)],
    "tied": [_pipe(2, 2, model=TIED, zero=1), _pipe(3, 3, model=TIED), _job("deepspeed, ZeRO 2", 2, more=TIED)],
    "tied ddp": [_job("ddp", 2, more=WIDE), _pipe(2, 4, model=WIDE, zero=1, partition=(5, 1))],
    "bf16": [_pipe(2, 4, zero=1, **BF16), _pipe(4, 4, **BF16), _job("fsdp2", 2, options=BF16)],
    "bf16 zero": [_job("deepspeed, ZeRO 3", 2, options=BF16), _pipe(2, 2, **BF16), _job("deepspeed, ZeRO 0", 2)],
    "zero1_pipe2_zero2": [_job("deepspeed, ZeRO 1", 4), _pipe(2, 2, zero=1), _job("deepspeed, ZeRO 2", 2)],
}


def _check_way(ranks: RankGroups, tmp_path: Path, way: list[tuple[int, Any]]) -> None:
    world, at = way[0]
    begun = ranks(world).run(_saved, at, str(tmp_path / "0"))
    first, next_loss = stored(tmp_path / "0"), begun[0][1][0]
    in_fp32 = not any("bf16" in repr(at) for _, at in way)
    for weights, _ in begun:
        _assert_held(weights, first)
    for number, (world, at) in enumerate(way[1:]):
        found = ranks(world).run(_moved, at, str(tmp_path / str(number)), str(tmp_path / str(number + 1)))
        for weights, extra, seen in found:
            _assert_held(weights, first)
            assert extra["step"] == 3 and extra["position"] == 12
            assert extra["rng"] is (world == way[number][0])
            assert seen[0] == pytest.approx(next_loss, abs=1e-5 if in_fp32 else 0.05)
        again = stored(tmp_path / str(number + 1))
        assert again.keys() == first.keys()
        assert [key for key, value in first.items() if not torch.equal(value, again[key])] == []


def _gone_on(rank: int, world: int, pipes: list[Pipe], path: str) -> list[str]:
    """Of each pipeline what differs between one that was saved, and went on, and one that was loaded from it."""
    unlike = []
    for number, at in enumerate(pipes):
        ends = []
        for resumed in (False, True):
            with training(at, world) as engine:
                torch.manual_seed(100 + rank)
                for earlier in range(1 if resumed else 3):
                    step(engine, earlier)
                if resumed:
                    engine.load(f"{path}-{number}")
                else:
                    engine.save(f"{path}-{number}", {})
                ends.append([torch.rand(4), step(engine, 3), step(engine, 4), copies(engine)])
        (drawn, *seen, end), (other_drawn, *other_seen, other_end) = ends
        same = torch.equal(drawn, other_drawn) and seen == other_seen
        if not same or any(not torch.equal(value, other_end[name]) for name, value in end.items()):
            unlike.append(f"{at.stages} stages, ZeRO {at.zero}, {at.precision}: {seen} {other_seen}")
    return unlike


@pytest.mark.full
@pytest.mark.parametrize(("stages", "world"), [(2, 2), (2, 4), (4, 4)])
def test_training_goes_on_as_if_never_stopped(ranks: RankGroups, tmp_path: Path, stages: int, world: int) -> None:
    """With dropout, and a weight that the first and the last stage share."""
    model = {"dropout": 0.1, "tied": True}
    pipes = [
        _pipe(stages, world, zero=zero, precision=precision, model=model, policy="full", clip=0.5)[1]
        for zero in (0, 1)
        for precision in ("fp32", "bf16")
    ]
    assert ranks(world).run(_gone_on, pipes, str(tmp_path / "state"), timeout_s=300) == [[]] * world


def _never_stepped(rank: int, world: int, at: Pipe, path: str) -> list[float]:
    with training(at, world) as engine:
        engine.save(f"{path}-begin", {})
        fresh = step(engine, 0)
        engine.load(f"{path}-begin")
        assert engine.step == 0
        return [*fresh, *step(engine, 0)]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_of_a_pipeline_that_has_never_stepped(ranks: RankGroups, tmp_path: Path, precision: str) -> None:
    for zero in (0, 1):
        _, at = _pipe(2, 2, zero=zero, precision=precision, clip=1.0)
        for loss, norm, again, norm_again in ranks(2).run(_never_stepped, at, str(tmp_path / f"{zero}")):
            assert (loss, norm) == (again, norm_again)
        assert "exp_avg.norm.weight" not in stored(tmp_path / f"{zero}-begin")


def _refused(rank: int, world: int, at: Pipe | Job, path: str) -> str:
    with training(at, world) as engine:
        before = copies(engine)
        try:
            engine.load(path)
        except StateError as error:
            assert all(torch.equal(value, before[name]) for name, value in copies(engine).items())
            return str(error)
    return "loaded"


@pytest.mark.full
def test_what_does_not_fit_one_stage_is_refused_on_all(ranks: RankGroups, tmp_path: Path) -> None:
    path = tmp_path / "state"
    ranks(2).run(_saved, _pipe(2, 2)[1], str(path))
    deeper = _pipe(2, 2, model={"n_layers": 8})[1]
    messages = ranks(2).run(_refused, deeper, str(path), timeout_s=60)
    assert messages[0] == messages[1] and "model has 8 layers, state has 6" in messages[0]
    shard = path / "__1_0.distcp"
    good = shard.read_bytes()
    shard.write_bytes(good[:500] + bytes([good[500] ^ 1]) + good[501:])
    assert (
        ranks(2).run(_refused, _pipe(2, 2)[1], str(path), timeout_s=60)
        == [f"{shard}: is damaged: its content is not what was written"] * 2
    )


def _assert_held(weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """In 16 bits they are the masters' rounded ones."""
    for name, value in weights.items():
        if value.numel():  # ZeRO-3 has none
            assert torch.equal(value, state[f"model.{name}"].to(value.dtype)), name


def test_state_of_a_pipeline_is_that_of_other_engines(ranks: RankGroups, tmp_path: Path) -> None:
    _check_way(ranks, tmp_path, WAYS["pipe2_ddp2"])


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_state_moves_between_stages_and_engines(ranks: RankGroups, tmp_path: Path, way: str) -> None:
    _check_way(ranks, tmp_path, WAYS[way])
