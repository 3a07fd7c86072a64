"""Where a rank's bytes lie under DeepSpeed's ZeRO, to the byte, by arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt import MemoryMeter, PlanError, guard_accumulation, verify
from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.cost import plan_cost
from dist_ckpt.engines.optim import decays
from dist_ckpt.memory.ledger import ledger
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

FP32, BF16 = 4, 2
BUCKET = 2000
"""Elements, as :func:`tests.distributed.training.deepspeed_config` asks for."""
STEPS = 2 * FP32
"""Each of the optimizer's two flat parameters has a step of its own."""
Moments = dict[str, dict[str, int]]
"""``mid`` accumulation, ``boundary`` and ``after`` the step → bytes of each category."""


def moments(rank: int, world: int, jobs: list[Job]) -> list[Moments]:
    """What the ledger says in the second update, when the optimizer has its state."""
    found = []
    for job in jobs:
        engine = build_engine(job)
        batches = [rows_of(job, 0, m, rank, world, SMALL["vocab_size"]) for m in range(job.accumulation)]
        engine.train_step(batches)
        seen: Moments = {}
        engine.observer = _Observer(engine, seen)
        engine.train_step(batches)
        seen["after"] = dict(ledger(engine.owners()))
        found.append(seen)
        engine.close()
    return found


class _Observer:
    def __init__(self, engine: Any, seen: Moments) -> None:
        self._engine, self._seen = engine, seen

    def forward_ended(self, root: torch.Tensor) -> None:
        """Nothing to note."""

    def backward_ended(self) -> None:
        self._seen.setdefault("mid", dict(ledger(self._engine.owners())))

    def boundary(self) -> None:
        self._seen["boundary"] = dict(ledger(self._engine.owners()))


@dataclass(frozen=True)
class Sizes:
    """Elements of the model, and of what a rank holds of it."""

    groups: tuple[tuple[int, ...], ...]
    """Elements of each parameter, by the optimizer's two groups."""
    rank: int
    world: int

    @staticmethod
    def of(job: Job, rank: int, world: int) -> Sizes:
        named = list(Transformer(ModelConfig(**(SMALL | job.model))).named_parameters())
        groups = tuple(tuple(p.numel() for n, p in named if decays(n) is decayed) for decayed in (True, False))
        return Sizes(groups, rank, world)

    @property
    def whole(self) -> int:
        return sum(sum(group) for group in self.groups)

    @property
    def largest(self) -> int:
        return max(max(group) for group in self.groups)

    @property
    def flat(self) -> int:
        """ZeRO-1 and 2 flatten each group, padded to equal parts that start at even elements."""
        return self.world * self.part

    @property
    def part(self) -> int:
        """A rank's part of the flat groups."""
        unit = 2 * self.world
        return sum(-(-sum(group) // unit) * unit // self.world for group in self.groups)

    @property
    def shard(self) -> int:
        """ZeRO-3 pads each parameter to equal parts."""
        return sum(-(-numel // self.world) for group in self.groups for numel in group)

    @property
    def touched(self) -> int:
        """Elements of the parameters of which a rank has a part: at its part's ends it holds a gradient whole."""
        return self._touched(0) + self.padding

    @property
    def padding(self) -> int:
        """What of the rank's part is no parameter's."""
        unit = 2 * self.world
        total = 0
        for group in self.groups:
            part = -(-sum(group) // unit) * unit // self.world
            total += part - max(0, min(part, sum(group) - self.rank * part))
        return total

    def _touched(self, total: int) -> int:
        unit = 2 * self.world
        for group in self.groups:
            part = -(-sum(group) // unit) * unit // self.world
            start, stop, position = self.rank * part, (self.rank + 1) * part, 0
            for numel in group:
                total += numel if position < stop and position + numel > start else 0
                position += numel
        return total


def expected(row: str, s: Sizes) -> tuple[int, int, tuple[int, int, int], tuple[int, int, int]]:
    """Bytes of params, of the optimizer, and at the three moments of grads and of the bucket."""
    once, always = (BUCKET, 0, 0), (BUCKET, BUCKET, BUCKET)
    states = (FP32 * 3 * s.part + STEPS, FP32 * 3 * s.shard + STEPS)  # a master weight and two moments
    each = 2 * sum(map(len, s.groups))  # stage 0 has no flat parameters: a step each
    match row:
        case "0 fp32":
            grads = FP32 * s.whole
            return FP32 * s.whole, FP32 * (2 * s.whole + each // 2), (grads, grads, 0), (0, 0, 0)
        case "0 bf16":
            grads = BF16 * s.whole
            return BF16 * s.whole, FP32 * (3 * s.whole + each // 2), (grads, grads, 0), (0, 0, 0)
        case "1 fp32":
            return FP32 * s.flat, states[0], (FP32 * s.whole, FP32 * s.touched, 0), _times(FP32, once)
        case "1 bf16":
            return BF16 * s.flat, states[0], (BF16 * s.whole, BF16 * s.touched, 0), _times(BF16, once)
        case "2 fp32":
            return FP32 * s.flat, states[0], (FP32 * (s.touched - s.padding), FP32 * s.touched, 0), (0, 0, 0)
        case "2 bf16":
            return BF16 * s.flat, states[0], (BF16 * (s.touched - s.padding), BF16 * s.touched, 0), (0, 0, 0)
        case "3 fp32":
            return FP32 * s.shard, states[1], (FP32 * s.shard,) * 3, _times(FP32, always)
        case "3 bf16":
            return BF16 * s.shard, states[1], (BF16 * s.shard,) * 3, _times(BF16, always)
        case "1 bf16, fp32 accumulation":  # both kinds of gradient, whole
            grads = BF16 * s.whole + FP32 * s.flat
            return BF16 * s.flat, states[0], (grads, grads, FP32 * s.flat), (0, 0, 0)
        case "1 fp32, offloaded":
            buffers = FP32 * (s.part + 2 * s.largest)
            return FP32 * (s.flat + s.part), states[0], (buffers + FP32 * s.whole, buffers, buffers), _times(FP32, once)
        case "2 fp32, offloaded":
            buffers = FP32 * (s.part + 2 * s.largest + s.touched - s.padding)
            return FP32 * (s.flat + s.part), states[0], (buffers,) * 3, (0, 0, 0)
        case "3 fp32, offloaded":
            return FP32 * s.shard, states[1], (2 * FP32 * s.shard,) * 3, _times(FP32, always)
    raise AssertionError(row)


def _times(nbytes: int, elements: tuple[int, int, int]) -> tuple[int, int, int]:
    mid, boundary, after = (nbytes * count for count in elements)
    return mid, boundary, after


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROWS: dict[str, Job] = {
    f"{stage} {precision}": Job(f"deepspeed, ZeRO {stage}", options={"precision": precision}, accumulation=2)
    for precision in ("fp32", "bf16")
    for stage in range(4)
}
ROWS["1 bf16, fp32 accumulation"] = replace(ROWS["1 bf16"], deepspeed={"data_types": {"grad_accum_dtype": "fp32"}})
OFFLOADED: dict[str, Job] = {
    f"{stage} fp32, offloaded": replace(ROWS[f"{stage} fp32"], zero=OFFLOAD) for stage in range(1, 4)
}


def check(rows: dict[str, Job], seen_by_rank: list[list[Moments]]) -> None:
    world = len(seen_by_rank)
    for rank, found in enumerate(seen_by_rank):
        for (row, job), seen in zip(rows.items(), found, strict=True):
            params, optimizer, grads, buckets = expected(row, Sizes.of(job, rank, world))
            for moment, grad, bucket in zip(("mid", "boundary", "after"), grads, buckets, strict=True):
                assert seen[moment] == {
                    "params": params,
                    "grads": grad,
                    "optimizer": optimizer,
                    "other": buffers(job) + bucket,
                }, (rank, row, moment)


def buffers(job: Job) -> int:
    """Two fp32 tables of rotary angles."""
    config = ModelConfig(**(SMALL | job.model))
    return 2 * config.max_seq_len * config.head_dim // 2 * FP32


def test_every_byte_has_its_category(small_runs: list[Any]) -> None:
    check(ROWS, [found for found, *_ in small_runs])


@pytest.mark.full
def test_every_byte_has_its_category_with_padding(ranks: RankGroups) -> None:
    odd = {"d_model": 30, "n_heads": 3, "n_kv_heads": 1, "d_ff": 47}
    rows = {row: replace(job, model=odd) for row, job in ROWS.items()}
    check(rows, ranks(4).run(moments, list(rows.values()), timeout_s=300))


@pytest.mark.full
def test_offloaded_bytes_are_the_ranks_too(ranks: RankGroups) -> None:
    check(OFFLOADED, ranks(2).run(moments, list(OFFLOADED.values()), timeout_s=300))


def measured(rank: int, world: int, jobs: list[Job]) -> list[tuple[int | None, int]]:
    """Activations that the engine measures, and that its plan costs."""
    found = []
    for job in jobs:
        engine = build_engine(job)
        batches = [rows_of(job, 0, m, rank, world, SMALL["vocab_size"]) for m in range(job.accumulation)]
        for _ in range(3):  # in the third, ZeRO-3 prefetches by the trace of the second
            engine.train_step(batches, measure=True)
        assert engine.memory is not None
        plain = Transformer(ModelConfig(**(SMALL | job.model)))
        found.append(
            (engine.memory.activations, plan_cost(plain, make_plan(plain, job.policy), batches[0]).saved_bytes)
        )
        engine.close()
    return found


GATHERED = Job("deepspeed, ZeRO 3", model={"dropout": 0.1}, accumulation=2)


def test_activations_are_what_the_plan_costs(small_runs: list[Any]) -> None:
    """No gathered parameter, kept or on its way, is taken for an activation."""
    for _, [(activations, cost)], *_ in small_runs:
        assert activations == cost


@pytest.mark.full
def test_activations_are_what_every_plan_costs(ranks: RankGroups) -> None:
    kept = replace(GATHERED, zero={"stage3_param_persistence_threshold": 2000, "stage3_prefetch_bucket_size": 10_000})
    policies = ["none", "full", {"mode": "segments", "k": 2}, "selective_attention"]
    jobs = [replace(one, policy=policy) for one in (GATHERED, kept) for policy in policies]
    jobs += [replace(job, engine="deepspeed, ZeRO 1") for job in jobs[:4]]
    for found in ranks(2).run(measured, jobs, timeout_s=300):
        for activations, cost in found:
            assert activations == cost


def own_loop(rank: int, world: int) -> dict[str, int]:
    """Somebody's own loop with DeepSpeed's engine, measured."""
    compat.start(torch.device("cpu"))
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 100},
    }
    optimizer = torch.optim.AdamW(net.parameters())
    engine = compat.build(net, optimizer, config, torch.device("cpu"))
    guard_accumulation(engine)
    meter = MemoryMeter(engine)
    for step in range(2):
        loss = engine(torch.randn(4, 8)).sum()
        meter.after_forward(loss)
        engine.backward(loss)
        del loss
        memory = meter.boundary(step)
        engine.step()
    compat.close(engine)
    assert memory.activations is not None
    return {"params": memory.params, "optimizer": memory.optimizer, "activations": memory.activations}


def test_a_meter_measures_an_engine_in_anybodys_loop(small_runs: list[Any]) -> None:
    elements = 8 * 16 + 16 + 16 * 8 + 8
    for *_, found, _ in small_runs:
        assert found["params"] == FP32 * elements
        assert found["optimizer"] == FP32 * 3 * elements // 2 + FP32
        assert found["activations"] == FP32 * (4 * 8 + 4 * 16)  # the first one's input, and what Tanh returned


def refusals(rank: int, world: int) -> list[str]:
    """What measures a step says to a model that ZeRO-3 has already."""
    compat.start(torch.device("cpu"))
    net = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)))
    plan = make_plan(net, "full")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 100},
    }
    engine = compat.build(net, torch.optim.AdamW(net.parameters()), config, torch.device("cpu"))
    batch = torch.randn(4, 8)
    ways: list[Callable[[nn.Module], Any]] = [
        lambda model: plan_cost(model, plan, batch),
        lambda model: make_plan(model, {"mode": "full", "min_bytes": 5}, batch),
        lambda model: verify(model, batch, None, "full"),
    ]
    found = []
    for way in ways:
        for model in (engine, net):
            try:
                way(model)
            except PlanError as error:
                found.append(str(error))
    compat.close(engine)
    return found


def test_what_measures_a_step_refuses_a_model_that_is_sharded_already(small_runs: list[Any]) -> None:
    for *_, found in small_runs:
        assert len(found) == 6 and all("before sharding and compiling" in message for message in found)


def all_small(rank: int, world: int) -> Any:
    rows = moments(rank, world, list(ROWS.values()))
    return (
        rows,
        measured(rank, world, [replace(GATHERED, policy="selective")]),
        own_loop(rank, world),
        refusals(rank, world),
    )


@pytest.fixture(scope="module")
def small_runs(ranks: RankGroups) -> list[Any]:
    """One round for all: DeepSpeed's groups have the ranks start anew after each."""
    return ranks(2).run(all_small, timeout_s=300)
