"""A model cut into stages trains as it does in one process; what a pipeline cannot take is refused on all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.stages import token_loss
from tests.distributed.pipelines import (
    Outcome,
    Pipe,
    distance,
    serial,
    train_pipes,
    with_policies,
)
from tests.ranks import RankGroups

MIX = {"per_stage": ["full", {"mode": "selective"}]}
NESTED = {"mode": "nested", "k": 2, "inner": ["block", "attention"]}


def sequential() -> nn.Module:
    torch.manual_seed(7)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(61, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 61))


def sequential_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model(batch["input_ids"]), batch["labels"])


PLAIN = Pipe(gas=4)
DROPOUT = Pipe(gas=2, zero=1, model={"dropout": 0.1}, steps=2)
TIED = Pipe(gas=2, zero=1, model={"tied": True}, clip=0.3, lr=1e-3, eps=1e-3, policy="full")
BF16 = [
    Pipe(gas=2, zero=zero, precision="bf16", steps=1, lr=1e-3, model={"tied": tied}, policy=MIX)
    for zero, tied in ((0, False), (0, True), (1, True))
]
TRAININGS: dict[str, list[Pipe]] = {
    "plain": [
        *with_policies(PLAIN, ["none", MIX]),
        *with_policies(dataclasses.replace(PLAIN, zero=1), ["full", NESTED]),
    ],
    "dropout": with_policies(DROPOUT, ["none", "full", MIX, NESTED]),
    "tied": [TIED, dataclasses.replace(TIED, zero=0)],
    "clip": [
        # A stage of an embedding alone has parameters of one kind only, with weight decay.
        Pipe(zero=zero, clip=0.3, eps=1e-3, steps=2, partition=partition)
        for zero, partition in ((0, "uniform"), (1, (0, 6)))
    ],
    "bf16": BF16,
    "in_flight": [Pipe(gas=gas, steps=1, policy=MIX) for gas in (1, 4)],
    "sequential": [Pipe(model=sequential, loss_sum=sequential_loss, policy="full")],
}


@pytest.fixture(scope="module")
def trained(ranks: RankGroups) -> dict[str, list[list[Outcome]]]:
    """Of each kind of training, for each of its jobs what every rank saw."""
    jobs = [job for kind in TRAININGS.values() for job in kind]
    by_rank = ranks(2).run(train_pipes, jobs, timeout_s=240)
    by_job = iter(zip(*by_rank, strict=True))
    return {kind: [list(next(by_job)) for _ in of_kind] for kind, of_kind in TRAININGS.items()}


@pytest.mark.parametrize("kind", ["plain", "sequential"])
def test_weights_are_those_of_a_serial_run(trained: dict[str, list[list[Outcome]]], kind: str) -> None:
    for job, outcomes in zip(TRAININGS[kind], trained[kind], strict=True):
        expected = serial(job)
        assert distance(outcomes, expected) == 0, job
        for outcome in outcomes:  # the loss is known on every stage
            assert outcome.losses == expected.losses
            assert outcome.norms == pytest.approx(expected.norms, rel=1e-6)
            assert outcome.tokens == expected.tokens


def test_tied_weights_stay_those_of_a_serial_run(trained: dict[str, list[list[Outcome]]]) -> None:
    for job, outcomes in zip(TRAININGS["tied"], trained["tied"], strict=True):
        first = next(iter(outcomes[0].weights))
        assert torch.equal(outcomes[0].weights[first], outcomes[1].weights[first])
        expected = serial(job)
        assert distance(outcomes, expected) < 1e-6
        assert outcomes[1].norms == pytest.approx(expected.norms, rel=1e-5)
        assert min(expected.norms) > 0.3


def test_policies_change_no_bit_with_dropout(trained: dict[str, list[list[Outcome]]]) -> None:
    without, *others = trained["dropout"]
    assert without[0].losses != serial(DROPOUT).losses
    for outcomes in others:
        for found, expected in zip(outcomes, without, strict=True):
            assert found.losses == expected.losses
            assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def test_gradients_are_clipped_to_the_norm_of_all_stages(trained: dict[str, list[list[Outcome]]]) -> None:
    for job, outcomes in zip(TRAININGS["clip"], trained["clip"], strict=True):
        expected = serial(job)
        assert min(expected.norms) > 0.3
        assert distance(outcomes, expected) < 1e-6
        assert outcomes[0].norms == outcomes[1].norms == pytest.approx(expected.norms, rel=1e-6)


def test_bf16_is_close_to_fp32(trained: dict[str, list[list[Outcome]]]) -> None:
    for job, outcomes in zip(BF16, trained["bf16"], strict=True):
        expected = serial(job)
        assert outcomes[0].losses == pytest.approx(expected.losses, rel=5e-3)
        assert outcomes[1].norms == pytest.approx(expected.norms, rel=5e-3)  # the head's gradient among them


def test_memory_says_the_stage_and_what_is_in_flight(trained: dict[str, list[list[Outcome]]]) -> None:
    one, four = ([outcome.memory for outcome in outcomes] for outcomes in trained["in_flight"])
    assert [memory.stage for memory in four if memory] == [0, 1]
    assert one[0] and four[0] and one[0].activations and one[1] and four[1]
    assert four[0].activations == 2 * one[0].activations
    assert four[1].activations == one[1].activations
    exchanged = 2 * 24 * 32 * 4
    tables = 2 * 2048 * 4 * 4
    assert [memory.other for memory in four if memory] == [tables + exchanged] * 2
