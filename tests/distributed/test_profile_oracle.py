"""A deep step against an account of the same step from other sources (``oracle.py``): the peak, and what fills it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_ckpt.memory.profile.step_profile import KINDS, StepProfile
from dist_ckpt.memory.records import RankMemory
from tests.distributed.oracle import COMPILER, Account, Composition, Oracle, counter
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the counter with")

PEAK, KIND = 0.005, 0.01
"""Parts of the peak by which a deep step may be wrong about the peak, and about each kind at it."""
MODEL = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128, "vocab_size": 256, "n_layers": 4}
"""Large enough for what operations need for themselves to be nothing beside it."""
ENGINES = ("ddp", "fsdp1", "fsdp2", *(f"deepspeed, ZeRO {stage}" for stage in range(4)))
PIPELINES = ("deepspeed_pipe, ZeRO 0", "deepspeed_pipe, ZeRO 1")
POLICIES: tuple[Any, ...] = ("none", "full", "selective", {"mode": "segments", "k": 2})


class AtBoundary:
    """Counts beneath torch at a step's boundary."""

    def __init__(self) -> None:
        self.live = 0

    def forward_ended(self, root: torch.Tensor) -> None: ...

    def backward_ended(self) -> None: ...

    def boundary(self) -> None:
        time.sleep(0.05)  # for gloo's threads to let go of what they have reduced
        self.live = counter().live()


@dataclass(frozen=True)
class Found:
    """What one rank has found of one job."""

    account: Account
    """Of the step before the deep one, which does the same."""
    start: int
    peak: int
    """Counted beneath torch in the deep step itself, as is the next."""
    live: int
    """At its boundary."""
    profile: StepProfile
    memory: RankMemory


def job_of(engine: str, policy: Any, **options: Any) -> Job:
    return Job(engine, policy=policy, model=MODEL, accumulation=2, rows=4, seq=64, **options)


def measured(rank: int, world: int, jobs: list[Job]) -> list[Found]:
    return [_measured(job) for job in jobs]


def _measured(job: Job) -> Found:
    torch._dynamo.reset()
    with Oracle() as oracle:
        engine = build_engine(job)
        share = engine.data_rank, engine.data_ranks
        batches = [rows_of(job, 0, m, *share, (SMALL | job.model)["vocab_size"]) for m in range(job.accumulation)]
        for _ in range(3):  # optimizers make their state in the first, ZeRO-3 prefetches by the trace of the second
            engine.train_step(batches)
        with _uncollected():
            oracle.begin(engine, batches)
            engine.observer = oracle
            engine.train_step(batches)
            account = oracle.end()
    engine.observer = at_boundary = AtBoundary()
    for _ in range(4):
        with _uncollected():
            start = counter().live()
            counter().restart()
            with engine.meter.profile(batches) as deep:
                engine.train_step(batches, measure=True)
            peak = counter().peak()
        # gloo's threads free what they let go of last, now and then later than in the step before, and unrecorded.
        is_alike = torch.tensor(abs(peak - oracle.base - account.peak) <= PEAK / 5 * account.peak, dtype=torch.int)
        dist.all_reduce(is_alike, dist.ReduceOp.MIN)
        if is_alike:
            break
    engine.close()
    live = at_boundary.live - oracle.base
    return Found(account, start - oracle.base, peak - oracle.base, live, deep.profile, deep.memory)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Cycles are freed before and not within: when Python's collector runs is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check(jobs: Iterable[Job], by_rank: list[list[Found]]) -> None:
    """Every rank's deep steps say what the oracle says."""
    wrong = []
    for rank, found in enumerate(by_rank):
        for job, one in zip(jobs, found, strict=True):
            problems = [
                f"{what} is {told:,}, not {true:,}: {abs(told - true) / one.peak:.2%} of the peak"
                for what, told, true, allowed in compared(one)
                if abs(told - true) > allowed * one.peak
            ]
            redone = sorted({span.module for span in one.profile.spans if span.work == "recompute"})
            if bool(redone) == (job.policy == "none"):
                problems.append(f"{redone} run again")
            wrong += [f"rank {rank}, {job.engine}, {job.policy}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


def compared(found: Found) -> list[tuple[str, int, int, float]]:
    """(what, as the deep step says, as it is, the part of the peak by which they may differ)."""
    profile, memory, nearest = found.profile, found.memory, nearest_of(found)
    assert memory.peak is not None and memory.live is not None
    rows = [
        ("the peak", memory.peak, found.peak, PEAK),
        ("the start", profile.start_bytes, found.start, PEAK),
        ("the boundary", memory.live, found.live, PEAK),
    ]
    rows += [(kind, profile.at_peak[kind], nearest.by_kind[kind], KIND) for kind in KINDS]
    return rows


def nearest_of(found: Found) -> Composition:
    """Of the moments that are as high as the peak, the one that is most like what the deep step has found.

    An update has equal peaks in several places: at the last block of one micro-batch as of the next.
    """
    top = [moment for moment in found.account.near if moment.total >= (1 - PEAK) * found.account.peak]
    return min(top, key=lambda moment: max(abs(moment.by_kind[k] - found.profile.at_peak[k]) for k in KINDS))


def phases_of(profile: StepProfile) -> dict[str, int]:
    """Peaks between the engine's marks; the oracle does not tell a loss from its forward."""
    peaks: dict[str, int] = {}
    for phase in profile.phases:
        name = "forward" if phase.name == "loss" else phase.name
        key = name if phase.micro_batch is None else f"{name} {phase.micro_batch}"
        peaks[key] = max(peaks.get(key, 0), phase.peak_bytes)
    return peaks


@pytest.mark.full  # gloo frees in threads of its own: phases are off where the cores are shared
def test_a_deep_step_is_right_about_a_sharded_step(ranks: RankGroups) -> None:
    jobs = [job_of("fsdp2", "selective")]
    by_rank = ranks(2).run(measured, jobs)
    check(jobs, by_rank)
    for found in (found for rank in by_rank for found in rank):
        assert found.memory.at_peak is not None
        assert nearest_of(found).phase.startswith(found.memory.at_peak["phase"])
        for phase, peak in found.account.phases.items():
            assert phases_of(found.profile)[phase] == pytest.approx(peak, rel=PEAK), phase


@pytest.mark.full
@pytest.mark.parametrize("engine", [*ENGINES, *PIPELINES])
def test_deep_steps_are_right_under_every_engine(ranks: RankGroups, engine: str) -> None:
    if engine.startswith("deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    for policy in POLICIES:
        job = job_of(engine, policy)
        check([job], ranks(2).run(measured, [job], timeout_s=300))  # alone: some of DeepSpeed's engines live on


@pytest.mark.full
def test_deep_steps_are_right_in_bf16_and_on_more_ranks(ranks: RankGroups) -> None:
    bf16 = {"precision": "bf16"}
    jobs = [job_of(engine, "selective", options=bf16) for engine in ("ddp", "fsdp1", "fsdp2")]
    jobs += [job_of("fsdp2", "full", options={"accum_sync": "boundary"})]
    check(jobs, ranks(4).run(measured, jobs, timeout_s=300))


def test_the_counter_counts_what_the_allocator_gives() -> None:
    counter().restart()
    before = counter().live()
    kept = torch.empty(1000)
    assert counter().live() - before == 4000
    torch.empty(20_000, dtype=torch.bfloat16)
    assert (counter().live() - before, counter().peak() - before) == (4000, 44_000)
    kept.untyped_storage().resize_(12)
    assert counter().live() - before == 12


def test_the_oracle_agrees_with_arithmetic() -> None:
    """So that it and what it checks do not agree on something wrong."""
    with Oracle() as oracle:
        model = nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 10)

        def step() -> None:
            h = model(x)
            loss = checkpoint(_three_tanh, h, use_reentrant=False, preserve_rng_state=False).sum()
            oracle.forward_ended(loss)
            del h
            loss.backward()
            oracle.backward_ended()
            del loss
            oracle.boundary()
            optimizer.step()
            optimizer.zero_grad()

        oracle.begin(SimpleNamespace(model=model, optimizer=optimizer), x)
        step()
        oracle.end()
        oracle.begin(SimpleNamespace(model=model, optimizer=optimizer), x)
        step()
        account = oracle.end()
    weight, activation = 4 * 10 * 10, 4 * 8 * 10
    highest = account.near[0]
    assert {kind: nbytes for kind, nbytes in highest.by_kind.items() if nbytes} == {
        "params": weight,
        "optimizer": 2 * weight + 4,
        "activations": activation + 4,  # the region's input, and the loss
        "recompute": 3 * activation,  # one for each tanh that is to go backward
        "temporary": 2 * activation + 4,  # x, the first gradient, and that of the loss
    }
    assert account.peak == highest.total == sum(highest.by_kind.values())
    assert highest.phase == "backward 0"
    assert account.unknown <= 8  # a number that an operation was given


def _three_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().tanh().tanh()
