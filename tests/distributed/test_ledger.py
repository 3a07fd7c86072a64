"""A rank's memory by category, to the byte, by arithmetic on shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_ckpt.compat.fsdp import fsdp1_flat_parameter
from dist_ckpt.cost import plan_cost
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

FP32 = 4


def two_steps(rank: int, world: int, job: Job) -> dict[str, Any]:
    """Memory at the second boundary, when the optimizer has its moments, and the shapes that explain it."""
    engine = build_engine(job)
    batches = [rows_of(job, 0, m, rank, world, SMALL["vocab_size"]) for m in range(job.accumulation)]
    for _ in range(2):
        engine.train_step(batches, measure=True)
    flat = [f.numel() for f in map(fsdp1_flat_parameter, engine.model.modules()) if f is not None]
    held = [p for _, p in named_parameters(engine.model) if p.numel()]
    own = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in held]
    return {"memory": engine.memory, "flat": flat, "own": own}


def shapes(job: Job) -> list[torch.Size]:
    return [p.shape for p in Transformer(ModelConfig(**(SMALL | job.model))).parameters()]


def buffers(job: Job) -> int:
    """Two fp32 tables of rotary angles."""
    config = ModelConfig(**(SMALL | job.model))
    return 2 * config.max_seq_len * config.head_dim // 2 * FP32


def moments(own: list[int]) -> int:
    """Two fp32 moments an element and an fp32 step a parameter."""
    return 2 * FP32 * sum(own) + FP32 * len(own)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp2_holds_rows_padded_to_equal_shards(ranks: RankGroups, precision: str) -> None:
    world = 4
    job = Job("fsdp2", options={"precision": precision}, policy="selective")
    sizes = shapes(job)
    padded = sum(-(-s[0] // world) * s[1:].numel() for s in sizes) * FP32
    for rank, found in enumerate(ranks(world).run(two_steps, job)):
        own = [len(range(s[0])[rank * -(-s[0] // world) :][: -(-s[0] // world)]) * s[1:].numel() for s in sizes]
        memory: RankMemory = found["memory"]
        assert (memory.params, memory.grads) == (padded, padded)
        assert memory.optimizer == moments(own)
        assert memory.other == buffers(job)
    assert sum(own) != padded // FP32  # the last rank has fewer rows than its padded shard


def test_hsdp_shards_inside_a_replica_only(ranks: RankGroups) -> None:
    job = Job("fsdp2", options={"replicas": 2})
    padded = sum(-(-s[0] // 2) * s[1:].numel() for s in shapes(job)) * FP32
    for found in ranks(4).run(two_steps, job):
        assert (found["memory"].params, found["memory"].grads) == (padded, padded)


def flat_numel(numels: list[int], world: int, align: int) -> int:
    """Elements of a flat parameter: each part starts at a multiple of ``align``, the whole divides by the ranks."""
    total = 0
    for numel in numels:
        total = -(-total // align) * align + numel
    return -(-total // world) * world


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp1_holds_flat_padded_shards(ranks: RankGroups, precision: str) -> None:
    world = 4
    odd = {"d_model": 30, "n_heads": 3, "n_kv_heads": 1, "d_ff": 47}
    job = Job("fsdp1", options={"precision": precision}, model=odd)
    config = ModelConfig(**(SMALL | job.model))
    model = Transformer(config)
    align = 4 if precision == "fp32" else 8  # 16 bytes of the numbers that are computed with
    block = flat_numel([p.numel() for p in model.layers[0].parameters()], world, align)
    rest = flat_numel([p.numel() for n, p in model.named_parameters() if not n.startswith("layers.")], world, align)
    padded = config.n_layers * block + rest
    assert padded > sum(s.numel() for s in shapes(job))
    sharded = padded // world * FP32
    for found in ranks(world).run(two_steps, job):
        memory: RankMemory = found["memory"]
        assert sum(found["flat"]) * FP32 == memory.params == memory.grads == sharded
        assert memory.optimizer == moments(found["own"])
        assert memory.other == buffers(job)


@pytest.mark.parametrize("tied", [False, True])
def test_ddp_holds_everything(ranks: RankGroups, tied: bool) -> None:
    job = Job("ddp", model={"tied": tied})
    whole = sum(s.numel() for s in shapes(job)) * FP32
    for found in ranks(2).run(two_steps, job):
        memory: RankMemory = found["memory"]
        assert (memory.params, memory.grads) == (whole, whole)
        assert memory.optimizer == moments([s.numel() for s in shapes(job)])
        assert memory.other == buffers(job)
        assert memory.accounted == memory.params + memory.grads + memory.optimizer + memory.activations + memory.other
        assert memory.live is memory.unattributed is memory.peak is memory.capacity is None  # the CPU cannot say


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_activations_are_what_the_plan_costs(ranks: RankGroups, engine: str) -> None:
    """No parameter, no unsharded copy, no bucket is taken for an activation."""
    for policy in ("none", "selective"):
        job = Job(engine, policy=policy, model={"dropout": 0.1, "n_layers": 2})
        model = Transformer(ModelConfig(**(SMALL | job.model)))
        batch = rows_of(job, 0, 0, 0, 2, SMALL["vocab_size"])
        expected = plan_cost(model, make_plan(model, policy), batch).saved_bytes
        assert [f["memory"].activations for f in ranks(2).run(two_steps, job)] == [expected, expected], policy
