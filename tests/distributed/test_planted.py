"""What is known to be there, because it was put there: the deep step and its advice have to name it."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.memory.meter import MemoryMeter, gather_report
from dist_ckpt.memory.profile.step_profile import Holding, Kind, StepProfile
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.planning import make_plan
from dist_ckpt.report.advice import Advice, RunFacts, advice
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

FP32 = 4
LISTED = 25_000_000
"""Elements: 100 MB."""
CLASSES, TOKENS = 32_768, 512
"""64 MiB of logits."""


class Net(nn.Module):
    """Embedding, a layer and a head; returns the mean loss."""

    def __init__(self, width: int = 16, classes: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.embedding(ids))), ids)


class Run:
    """Somebody's own loop."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters())
        self.meter = MemoryMeter(net, self.optimizer)
        self.ids = torch.arange(TOKENS) % 64
        self.step()

    def step(self) -> Any:
        loss = self.net(self.ids)
        self.meter.after_forward(loss)
        loss.backward()
        del loss
        memory = self.meter.boundary(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return memory

    def deep(self) -> tuple[StepProfile, tuple[Advice, ...]]:
        gc.collect()
        with self.meter.profile() as deep:
            self.step()
        report = MemoryReport(0, (deep.memory,))
        return deep.profile, advice(report, [deep.profile], RunFacts())


def heaviest(profile: StepProfile, kind: Kind) -> Holding:
    return next(holding for holding in profile.holdings if holding.kind == kind)


def saying(given: tuple[Advice, ...], *words: str) -> Advice:
    """The advice in which all these words are."""
    return next(one for one in given if all(word in one.text for word in words))


def test_100_mb_in_a_list() -> None:
    run = Run(Net())
    before, _ = run.deep()
    hoard = [torch.empty(LISTED)]
    profile, given = run.deep()
    held = heaviest(profile, "unattributed")
    assert profile.at_peak["unattributed"] - before.at_peak["unattributed"] == LISTED * FP32
    assert profile.peak_bytes - before.peak_bytes == LISTED * FP32
    assert (held.nbytes, held.shape, held.dtype) == (LISTED * FP32, (LISTED,), "float32")
    assert "list" in held.source and "hoard" in held.source and "test_planted.py" in held.source
    assert given[0] == saying(given, "hoard") and given[0].gain_bytes == LISTED * FP32
    del hoard


@pytest.mark.full
def test_what_a_hook_has_kept_in_the_step_itself() -> None:
    run = Run(Net(width=256))
    seen: list[Tensor] = []
    run.net.body.register_forward_hook(lambda _module, _args, output: seen.append(output.detach() + 1))
    profile, _ = run.deep()
    held = heaviest(profile, "unattributed")
    assert (held.nbytes, held.shape) == (TOKENS * 256 * FP32, (TOKENS, 256))
    assert held.module == "body" and "seen" in held.source


@pytest.mark.full
def test_a_doubled_optimizer() -> None:
    """Once as a copy somebody keeps, once within the optimizer itself."""
    run = Run(Net(width=1024))
    usual, given = run.deep()
    assert not any("optimizer" in one.text and "copy" in one.text for one in given)
    snapshot = copy.deepcopy(run.optimizer.state_dict())
    profile, given = run.deep()
    assert profile.at_peak["unattributed"] - usual.at_peak["unattributed"] == usual.at_peak["optimizer"]
    assert "snapshot" in heaviest(profile, "unattributed").source
    assert (saying(given, "snapshot").gain_bytes or 0) > 0.9 * usual.at_peak["optimizer"]
    del snapshot
    for state in run.optimizer.state.values():
        state["averages"] = {name: value.clone() for name, value in state.items()}
    profile, given = run.deep()
    assert profile.at_peak["optimizer"] == 2 * usual.at_peak["optimizer"]
    assert saying(given, "optimizer", "may hold a copy")


def test_64_mib_of_logits() -> None:
    profile, given = Run(Net(classes=CLASSES)).deep()
    logits = TOKENS * CLASSES * FP32
    held = [h for h in profile.holdings if h.shape == (TOKENS, CLASSES)]
    kept = [h for h in held if h.kind == "activations"]
    assert sum(h.nbytes for h in kept) == logits  # the softmax's logarithms, of which backward needs the whole
    assert sum(h.nbytes for h in held) >= 2 * logits  # and a gradient
    named = saying(given, "logits", f"{TOKENS} × {CLASSES}")
    assert given[0] == named and (named.gain_bytes or 0) > logits / 2


def uneven(rank: int, world: int) -> tuple[StepProfile, MemoryReport]:
    job = Job("ddp", model={"vocab_size": 256}, accumulation=1, rows=4, seq=64)
    engine = build_engine(job)
    mine = replace(job, rows=job.rows * (2 if rank == 1 else 1))
    batches = [rows_of(mine, 0, 0, rank, world, 256)]
    engine.train_step(batches)
    with engine.meter.profile(batches) as deep:
        engine.train_step(batches, measure=True)
    return deep.profile, gather_report(deep.memory)


def segmented(rank: int, world: int) -> list[tuple[StepProfile, RankMemory]]:
    found = []
    for policy in ("full", SEGMENTS):
        job = Job("fsdp2", policy=policy, model=MANY, accumulation=1)
        engine = build_engine(job)
        batches = [rows_of(job, 0, 0, rank, world, SMALL["vocab_size"])]
        engine.train_step(batches)
        with engine.meter.profile(batches) as deep:
            engine.train_step(batches, measure=True)
        found.append((deep.profile, deep.memory))
        del engine
        gc.collect()  # the next one's memory is to be its own
    return found


def both(rank: int, world: int) -> Any:
    return uneven(rank, world), segmented(rank, world)


SEGMENTS = {"mode": "segments", "k": 4}
MANY: dict[str, Any] = {"n_layers": 8, "d_model": 96, "d_ff": 256}


@pytest.mark.full
def test_a_rank_with_twice_the_batch_and_segments_of_whole_blocks(ranks: RankGroups) -> None:
    by_rank = ranks(2).run(both)
    _check_uneven([found for found, _ in by_rank])
    for _, ((full, _), (segments, memory)) in by_rank:
        _check_segments(full, segments, memory)


def _check_uneven(by_rank: list[tuple[StepProfile, MemoryReport]]) -> None:
    (light, report), (heavy, _) = by_rank
    assert report.heaviest.rank == 1
    assert abs(heavy.at_peak["activations"] / light.at_peak["activations"] - 2) < 0.01
    assert heavy.at_peak["params"] == light.at_peak["params"]
    given = advice(report, [light, heavy], RunFacts())
    named = saying(given, "rank 1", "above the other", "rows and tokens")
    assert named.gain_bytes == heavy.peak_bytes - light.peak_bytes


def _check_segments(full: StepProfile, segments: StepProfile, memory: RankMemory) -> None:
    model = Transformer(ModelConfig(**(SMALL | MANY)))
    block = FP32 * sum(p.numel() for p in model.layers[0].parameters())
    whole = [nbytes for nbytes in blocks_in(segments.holdings, "unsharded").values() if nbytes >= 0.9 * block]
    assert len(whole) >= 4  # the segment's, at the peak; their norms are too small to be listed
    assert segments.at_peak["unsharded"] >= full.at_peak["unsharded"] + 2 * block
    run = RunFacts({"engine": {"name": "fsdp2"}}, make_plan(model, SEGMENTS))
    named = saying(advice(MemoryReport(0, (memory,)), [segments], run), "segments of 4 blocks", "unsharded")
    assert named.gain_bytes is not None and named.gain_bytes > 1.9 * block


def blocks_in(holdings: tuple[Holding, ...], kind: Kind) -> dict[str, int]:
    """Bytes by block, a block as ``layers.3``."""
    found: dict[str, int] = {}
    for holding in holdings:
        if holding.kind == kind and holding.module is not None and holding.module.startswith("layers."):
            block = ".".join(holding.module.split(".")[:2])
            found[block] = found.get(block, 0) + holding.nbytes
    return found
