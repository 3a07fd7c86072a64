"""Every number of stages, micro-batches and ZeRO stage, with every kind of policy: the weights of a serial run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.schedule import in_flight
from dist_ckpt.stages import token_loss
from dist_ckpt.trainer.models.hf_layers import hf_layers
from tests.distributed.pipelines import Pipe, distance, prepared, rows, serial, train_pipes, with_policies
from tests.ranks import RankGroups

pytestmark = pytest.mark.full

NESTED = {"mode": "nested", "k": 2, "inner": ["block", "attention"]}
SELECTIVE = {"mode": "selective"}


def policies(stages: int) -> list[Any]:
    """With one that differs from stage to stage, nested regions in the first."""
    mix = [NESTED, SELECTIVE] if stages == 2 else ["full", NESTED, SELECTIVE, "none"]
    return ["none", "full", {"per_stage": mix}, NESTED]


@pytest.mark.parametrize("gas", [1, 4, 6])
@pytest.mark.parametrize("stages", [2, 4])
def test_three_updates_are_bitwise_those_of_a_serial_run(ranks: RankGroups, stages: int, gas: int) -> None:
    jobs = [
        job
        for zero in (0, 1)
        for job in with_policies(Pipe(stages=stages, gas=gas, zero=zero, model={"n_layers": 8}), policies(stages))
    ]
    expected = serial(jobs[0])
    for job, outcomes in zip(jobs, zip(*ranks(stages).run(train_pipes, jobs, timeout_s=300), strict=True), strict=True):
        assert distance(outcomes, expected) == 0, job
        assert {tuple(outcome.losses) for outcome in outcomes} == {tuple(expected.losses)}


@pytest.mark.parametrize("policy", policies(4), ids=["none", "full", "per_stage", "nested"])
def test_peak_of_saved_bytes_is_that_of_the_micro_batches_in_flight(ranks: RankGroups, policy: Any) -> None:
    jobs = [Pipe(stages=4, gas=gas, steps=1, policy=policy, model={"n_layers": 8}) for gas in (1, 2, 4, 6)]
    one, *others = zip(*ranks(4).run(train_pipes, jobs, timeout_s=300), strict=True)
    for job, outcomes in zip(jobs[1:], others, strict=True):
        for stage, (found, alone) in enumerate(zip(outcomes, one, strict=True)):
            assert found.memory is not None and alone.memory is not None and alone.memory.activations
            assert found.memory.stage == found.stage == stage
            assert found.memory.activations == alone.memory.activations * in_flight(4, stage, job.gas)


TIED = Pipe(gas=4, model={"tied": True, "n_layers": 8}, policy="full", clip=0.3, lr=1e-3, eps=1e-3)


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_weights_stay_within_1e_6(ranks: RankGroups, stages: int) -> None:
    jobs = [dataclasses.replace(TIED, stages=stages, zero=zero) for zero in (0, 1)]
    expected = serial(TIED)
    for outcomes in zip(*ranks(stages).run(train_pipes, jobs, timeout_s=300), strict=True):
        assert distance(outcomes, expected) < 1e-6
        assert torch.equal(outcomes[0].weights["tok_embeddings.weight"], outcomes[-1].weights["tok_embeddings.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_two_pipelines_of_two_stages_are_within_1e_7(ranks: RankGroups, tied: bool) -> None:
    """``eps`` keeps AdamW from making a large difference of a small one."""
    pipe = Pipe(gas=2, model={"tied": tied}, lr=1e-3, eps=1e-1)
    jobs = [
        job for zero in (0, 1) for job in with_policies(dataclasses.replace(pipe, zero=zero), ["none", "full", NESTED])
    ]
    expected = serial(pipe, data_ranks=2)
    for outcomes in zip(*ranks(4).run(train_pipes, jobs, timeout_s=300), strict=True):
        assert [outcome.stage for outcome in outcomes] == [0, 0, 1, 1]
        assert distance(outcomes, expected) < 1e-7
        assert outcomes[0].losses == pytest.approx(expected.losses, rel=1e-6)
        assert outcomes[0].tokens == expected.tokens


@pytest.mark.parametrize("zero", [0, 1])
def test_policies_change_no_bit_in_bf16(ranks: RankGroups, zero: int) -> None:
    pipe = Pipe(gas=3, zero=zero, precision="bf16", model={"dropout": 0.1}, clip=0.5)
    jobs = with_policies(
        pipe, ["none", *policies(2)[1:], "selective_attention", "offload", {"mode": "segments", "k": 2}]
    )
    without, *others = zip(*ranks(2).run(train_pipes, jobs, timeout_s=300), strict=True)
    for outcomes in others:
        for found, expected in zip(outcomes, without, strict=True):
            assert (found.losses, found.norms) == (expected.losses, expected.norms)
            assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def take_turns(rank: int, world: int, pipes: list[Pipe]) -> list[list[float]]:
    """Losses of two pipelines in one process, whose updates alternate."""
    found: list[list[float]] = [[], []]
    with prepared(world, pipes[0]) as one, prepared(world, pipes[1]) as other:
        for step in range(pipes[0].steps):
            for engine, losses, pipe in zip((one, other), found, pipes, strict=True):
                given = [rows(step, m, engine.data_rank, engine.data_ranks, pipe.gas) for m in range(pipe.gas)]
                losses.append(engine.train_step(given).loss)
                engine.eval_loss(given)
    return found


def test_two_pipelines_in_one_process_do_not_mix(ranks: RankGroups) -> None:
    pipes = [Pipe(stages=4, gas=4, zero=1), Pipe(stages=2, gas=2)]
    for found in ranks(4).run(take_turns, pipes):
        assert found[0] == serial(pipes[0]).losses
        assert found[1] == pytest.approx(serial(pipes[1], data_ranks=2).losses, rel=1e-6)


def hf_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def gpt2() -> nn.Module:
    import transformers as hf

    torch.manual_seed(7)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, "vocab_size": 61}
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=1, use_cache=False))


def llama() -> nn.Module:
    import transformers as hf

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=61, use_cache=False))


def test_models_of_hugging_face_train_as_whole_ones(ranks: RankGroups) -> None:
    of_llama = Pipe(model=llama, layers=hf_layers, loss_sum=hf_loss, zero=1)
    of_gpt2 = Pipe(model=gpt2, layers=hf_layers, loss_sum=hf_loss, lr=1e-3, eps=1e-3)  # its head is tied
    jobs = [*with_policies(of_llama, policies(2)), *with_policies(of_gpt2, policies(2))]
    for job, outcomes in zip(jobs, zip(*ranks(2).run(train_pipes, jobs, timeout_s=300), strict=True), strict=True):
        assert distance(outcomes, serial(job)) <= (0 if job.model is llama else 1e-6)
