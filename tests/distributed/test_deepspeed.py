"""Under DeepSpeed's ZeRO, loss and every gradient with a policy equal those of the same stage without: bitwise."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_ckpt.trainer.models.config import Loss
from tests.distributed.test_gradients import distance, one_process
from tests.distributed.test_parity import assert_same
from tests.distributed.training import Job, train_all, train_all_wholly
from tests.ranks import RankGroups

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

POLICIES: list[Any] = [
    "full",
    "selective",
    "selective_attention",
    {"mode": "segments", "k": 2},
    {"mode": "nested", "k": 2, "inner": ["block", "attention"]},
    "offload",
]
STAGES = [f"deepspeed, ZeRO {stage}" for stage in range(4)]


def check(ranks: RankGroups, bases: list[Job], policies: list[Any]) -> None:
    """Trains without and with policies; all in one round, as DeepSpeed's groups have the ranks start anew after it."""
    jobs = [[base, *(dataclasses.replace(base, policy=policy) for policy in policies)] for base in bases]
    for outcomes in ranks(2).run(train_all, [job for one in jobs for job in one], timeout_s=400):
        rest = iter(outcomes)
        for one in jobs:
            without, *with_policies = [next(rest) for _ in one]
            assert len(set(without.losses)) == len(without.losses)
            assert without.grads[0] and all(g.abs().sum() > 0 for g in without.grads[0].values())
            for outcome in with_policies:
                assert_same(outcome, without)


def test_two_policies_change_no_bit(ranks: RankGroups) -> None:
    bases = [Job(stage, model={"dropout": 0.1}, accumulation=2) for stage in STAGES]
    check(ranks, bases, ["selective", POLICIES[4]])


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_policies_change_no_bit(ranks: RankGroups, stage: str, precision: str) -> None:
    """In bf16 too: two runs without a policy differ in no bit either."""
    base = Job(stage, model={"dropout": 0.1}, accumulation=2, options={"precision": precision})
    check(ranks, [base], ["none", *POLICIES])


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32 accumulation": {"options": {"precision": "bf16"}, "deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "ragged, meta, tied": {"ragged": True, "on_meta": True, "model": {"dropout": 0.1, "tied": True}},
    "chunked loss": {"model": {"dropout": 0.1, "loss": Loss.chunked, "loss_chunk": 7}},
    "overlap": {"zero": {"overlap_comm": True}},
    "all-reduce": {"zero": {"reduce_scatter": False}},
    "not contiguous": {"zero": {"contiguous_gradients": False}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "parameters offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    "persistent": {"zero": {"stage3_param_persistence_threshold": 100}},
    "no prefetch": {"zero": {"stage3_prefetch_bucket_size": 0}},
    "hpZ": {"zero": {"zero_hpz_partition_size": 2}},
    "usual linear": {"zero": {"memory_efficient_linear": False}},
}
ONLY: dict[str, range] = {
    "fp32 accumulation": range(1, 4),
    "overlap": range(1, 4),
    "all-reduce": range(1, 4),
    "not contiguous": range(1, 4),
    "offload": range(1, 4),
    **dict.fromkeys(("parameters offloaded", "persistent", "no prefetch", "hpZ", "usual linear"), range(3, 4)),
}
"""Stages at which a variant means something."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "variant"), [(STAGES[n], name) for name in VARIANTS for n in ONLY.get(name, range(4))]
)
def test_policies_change_no_bit_in_any_variant(ranks: RankGroups, stage: str, variant: str) -> None:
    options = {"model": {"dropout": 0.1}, "accumulation": 2} | VARIANTS[variant]
    check(ranks, [Job(stage, **options)], ["selective", POLICIES[3], POLICIES[4], "offload"])


TOLERANCE = 1e-6
"""Relative, per tensor: fp32 sums in another order."""


def test_gradients_are_those_of_one_process(ranks: RankGroups) -> None:
    """Weighted by tokens over micro-batches and ranks, whatever DeepSpeed divides by."""
    plain = Job(policy="full", ragged=True, accumulation=3, steps=1, options={"clip": None})
    loss, tokens, grads, _ = one_process(plain, 2, 0.0)
    for outcomes in ranks(2).run(train_all_wholly, [dataclasses.replace(plain, engine=stage) for stage in STAGES]):
        for found in outcomes:
            assert found.tokens == [tokens]
            assert found.losses[0] == pytest.approx(loss, rel=TOLERANCE)
            assert found.norms[0] == pytest.approx(float(total_norm(grads)), rel=TOLERANCE)
            assert found.grads[0].keys() == grads.keys()
            for name, expected in grads.items():
                assert distance(found.grads[0][name], expected) < TOLERANCE, name


def total_norm(grads: dict[str, Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(list(grads.values()))
