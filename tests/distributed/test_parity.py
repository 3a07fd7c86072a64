"""Loss and every gradient with a policy equal those of the same engine without: bitwise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.distributed.training import Job, Outcome, train_all
from tests.ranks import RankGroups

POLICIES = ["full", {"mode": "every_k", "k": 2}, "selective", "selective_attention"]


def assert_same(with_policy: Outcome, without: Outcome) -> None:
    assert with_policy.losses == without.losses
    assert with_policy.norms == without.norms
    for found, expected in zip(with_policy.grads, without.grads, strict=True):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("world", [1, 2])
def test_policies_change_no_bit(ranks: RankGroups, engine: str, world: int) -> None:
    base = Job(engine, model={"dropout": 0.1}, accumulation=3)
    jobs = [base, *(dataclasses.replace(base, policy=policy) for policy in POLICIES)]
    for without, *with_policies in ranks(world).run(train_all, jobs):
        assert len(set(without.losses)) == len(without.losses)
        assert without.grads[0] and all(g.abs().sum() > 0 for g in without.grads[0].values())
        for outcome in with_policies:
            assert_same(outcome, without)
