"""Offloading under every engine: bitwise the run without, and not a byte of a sharded or gathered parameter with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dist_ckpt.cost import plan_cost
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import Attention, ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.wrap.offload import Offloader
from tests.distributed.test_parity import assert_same
from tests.distributed.training import SMALL, Job, rows_of, train_all
from tests.ranks import RankGroups

POLICIES: list[Any] = [
    "offload",
    {"mode": "offload", "modules": "attention"},
    {"mode": "full", "inputs": "offload"},
    {"mode": "segments", "k": 2, "inputs": "offload"},
    {"mode": "nested", "k": 3, "inputs": "offload"},
    {"mode": "selective", "inputs": "offload"},
]
LARGE = {"rows": 8, "seq": 64}
"""So that a residual stream is just not too small to be offloaded."""


def offloaded_bytes(job: Job) -> int:
    """What one process with the whole model offloads in a micro-batch of the job."""
    model = Transformer(ModelConfig(**(SMALL | job.model)))
    plan = make_plan(model, job.policy)
    return plan_cost(model, plan, rows_of(job, 0, 0, 0, 1, SMALL["vocab_size"])).offloaded_bytes


def check(ranks: RankGroups, world: int, base: Job, policies: list[Any]) -> None:
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in policies)]
    expected_bytes = [offloaded_bytes(job) for job in jobs]
    assert expected_bytes[0] == 0 and all(count > 0 for count in expected_bytes[1:])
    for outcomes in ranks(world).run(train_all, jobs, timeout_s=400):
        for outcome, expected in zip(outcomes, expected_bytes, strict=True):
            assert_same(outcome, outcomes[0])
            # Gathered parameters would make it more.
            assert [memory.offloaded or 0 for memory in outcome.memory] == [expected] * base.steps


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_offloading_changes_no_bit(ranks: RankGroups, engine: str) -> None:
    base = Job(engine, model={"dropout": 0.1}, accumulation=2, steps=1, **LARGE)
    check(ranks, 2, base, ["offload", {"mode": "segments", "k": 2, "inputs": "offload"}])


VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"model": {"dropout": 0.1, "attention": Attention.eager}},
    "boundary": {"options": {"accum_sync": "boundary"}},
    "meta_tied": {"on_meta": True, "model": {"dropout": 0.1, "tied": True}},
    "plain": {"model": {"dropout": 0.1}},
    "four": {},
}


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_offloading_changes_no_bit_in_any_variant(ranks: RankGroups, engine: str, variant: str) -> None:
    check(ranks, 4 if variant == "four" else 2, Job(engine, **LARGE, **VARIANTS[variant]), POLICIES)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_offloading_changes_no_bit_in_bf16(ranks: RankGroups, engine: str) -> None:
    """Under autocast (ddp) weights have copies, which stay; half the bytes, so twice the rows."""
    base = Job(engine, model={"dropout": 0.1}, options={"precision": "bf16"}, rows=16, seq=64)
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in POLICIES)]
    for without, *others in ranks(2).run(train_all, jobs, timeout_s=400):
        for outcome in others:
            assert_same(outcome, without)
            assert all(memory.offloaded for memory in outcome.memory)


def tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    """Activations that are DTensors: their local parts wait."""
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    for kind in ("plain", "offload"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
        torch.manual_seed(1)
        x = torch.randn(4, 8)
        if kind == "plain":
            loss = model(x).sum()
        else:
            with Offloader(min_bytes=0).hooks(model):
                loss = model(x).sum()
        saved = saved_bytes([loss], model.parameters())
        found[f"{kind} bytes"] = (saved.total, saved.offloaded)
        loss.backward()
        found[kind] = [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]
    uneven = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    back = Offloader(min_bytes=0).put(uneven).get()
    assert isinstance(back, DTensor) and back.placements == uneven.placements and back.shape == uneven.shape
    found["whole"] = back.redistribute(placements=[Replicate()]).to_local()
    return found


def test_local_parts_of_dtensors_are_offloaded(ranks: RankGroups) -> None:
    for found in ranks(2).run(tensor_parallel):
        total, offloaded = found["offload bytes"]
        assert total == offloaded == found["plain bytes"][0] > 0 and found["plain bytes"][1] == 0
        for one, other in zip(found["offload"], found["plain"], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(found["whole"], Tensor(range(10)))
