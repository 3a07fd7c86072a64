"""Loss and every gradient with a policy equal those of the same engine without: bitwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dist_ckpt.trainer.models.config import Attention, Loss
from tests.distributed.training import Job, Outcome, train_all
from tests.ranks import RankGroups

POLICIES: list[Any] = [
    "full",
    {"mode": "every_k", "k": 2},
    {"mode": "first_n", "n": 1},
    "selective",
    "selective_attention",
    {"mode": "segments", "k": 2},
    {"mode": "segments", "k": 2, "skip_last": True},
    {"mode": "nested", "k": 2},
    {"mode": "nested", "k": 3, "inner": ["block", "attention", "mlp"]},
    {"mode": "nested", "k": 2, "save": ["matmul"]},
    "offload",
    {"mode": "offload", "modules": ["attention", "feed_forward.w2"]},
    {"mode": "full", "inputs": "offload"},
    {"mode": "segments", "k": 2, "inputs": "offload"},
]


def assert_same(with_policy: Outcome, without: Outcome) -> None:
    assert with_policy.losses == without.losses
    assert with_policy.norms == without.norms
    for found, expected in zip(with_policy.grads, without.grads, strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_policies_change_no_bit(ranks: RankGroups, engine: str, world: int) -> None:
    base = Job(engine, model={"dropout": 0.1}, accumulation=3)
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in POLICIES)]
    for without, *with_policies in ranks(world).run(train_all, jobs):
        assert len(set(without.losses)) == len(without.losses)
        assert without.grads[0] and all(g.abs().sum() > 0 for g in without.grads[0].values())
        for outcome in with_policies:
            assert_same(outcome, without)


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"options": {"precision": "bf16"}},
    "eager": {"model": {"dropout": 0.1, "attention": Attention.eager}},
    "chunked": {
        "model": {
            "dropout": 0.1,
            "attention": Attention.chunked,
            "attention_chunk": 10,
            "loss": Loss.chunked,
            "loss_chunk": 7,
        }
    },
    "ragged": {"ragged": True},
    "other_sync": {},
    "meta_tied": {"on_meta": True, "model": {"dropout": 0.1, "tied": True}},
    "compile": {"options": {"compile": True}, "accumulation": 1},
}


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "hsdp"])
def test_policies_change_no_bit_in_any_variant(ranks: RankGroups, engine: str, variant: str) -> None:
    options = dict(VARIANTS[variant])
    if variant == "other_sync":
        options["options"] = {"accum_sync": "every" if engine == "ddp" else "boundary"}
    if engine == "hsdp":
        options["options"] = options.get("options", {}) | {"replicas": 2}
    name = "fsdp2" if engine == "hsdp" else engine
    base = Job(name, **({"model": {"dropout": 0.1}} | options))
    tried = POLICIES if variant != "compile" else [p for p in POLICIES if "offload" not in str(p)]  # which is refused
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in tried)]
    for without, *with_policies in ranks(4 if engine == "hsdp" else 2).run(train_all, jobs, timeout_s=400):
        for outcome in with_policies:
            assert_same(outcome, without)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_policies_change_no_bit_on_four_ranks(ranks: RankGroups, engine: str) -> None:
    base = Job(engine, model={"dropout": 0.1})
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in POLICIES)]
    for without, *with_policies in ranks(4).run(train_all, jobs):
        for outcome in with_policies:
            assert_same(outcome, without)
