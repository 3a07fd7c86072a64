"""Under DeepSpeed's ZeRO, loss and every gradient with a policy equal those of the same stage without: bitwise."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.deepspeed_config import RunSettings, resolve
from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.base import NonFiniteError
from dist_ckpt.errors import EngineError
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.trainer.models.config import Loss
from tests.distributed.test_gradients import distance, one_process
from tests.distributed.test_parity import assert_same
from tests.distributed.training import (
    SMALL,
    Boundary,
    Job,
    Outcome,
    build_engine,
    engine_for,
    rows_of,
    train_all,
    train_all_wholly,
    whole_grads,
)
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
    jobs = [dataclasses.replace(base, policy=policy) for base in bases for policy in ("none", *policies)]
    for outcomes in ranks(2).run(train_all, jobs, timeout_s=400):
        check_same(outcomes, 1 + len(policies))


def check_same(outcomes: list[Outcome], each: int) -> None:
    """Of every ``each`` outcomes the first is the one without a policy."""
    for first in range(0, len(outcomes), each):
        without, *with_policies = outcomes[first : first + each]
        assert len(set(without.losses)) == len(without.losses)
        assert without.grads[0] and all(g.abs().sum() > 0 for g in without.grads[0].values())
        for outcome in with_policies:
            assert_same(outcome, without)


SMALL_JOBS = [
    Job(stage, policy=policy, model={"dropout": 0.1}, accumulation=2)
    for stage in STAGES
    for policy in ("none", "selective", POLICIES[4])
]
PLAIN = Job(policy="full", ragged=True, accumulation=3, steps=1, options={"clip": None})


def train_both(rank: int, world: int) -> tuple[list[Outcome], list[Outcome]]:
    wholly = [dataclasses.replace(PLAIN, engine=stage) for stage in STAGES]
    return train_all(rank, world, SMALL_JOBS), train_all_wholly(rank, world, wholly)


@pytest.fixture(scope="module")
def small_runs(ranks: RankGroups) -> list[tuple[list[Outcome], list[Outcome]]]:
    return ranks(2).run(train_both, timeout_s=400)


def test_two_policies_change_no_bit(small_runs: list[tuple[list[Outcome], list[Outcome]]]) -> None:
    for outcomes, _ in small_runs:
        check_same(outcomes, 3)


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


def test_gradients_are_those_of_one_process(small_runs: list[tuple[list[Outcome], list[Outcome]]]) -> None:
    """Weighted by tokens over micro-batches and ranks, whatever DeepSpeed divides by."""
    loss, tokens, grads, _ = one_process(PLAIN, 2, 0.0)
    for _, outcomes in small_runs:
        for found in outcomes:
            assert found.tokens == [tokens]
            assert found.losses[0] == pytest.approx(loss, rel=TOLERANCE)
            assert found.norms[0] == pytest.approx(float(total_norm(grads)), rel=TOLERANCE)
            assert found.grads[0].keys() == grads.keys()
            for name, expected in grads.items():
                assert distance(found.grads[0][name], expected) < TOLERANCE, name


def total_norm(grads: dict[str, Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(list(grads.values()))


class Block(nn.Module):
    """Has parameters of its own, and linear layers with biases: ZeRO-3 gathers and adds those in ways of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.mix = nn.Parameter(torch.randn(width, width) * 0.2)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu((x * self.scale + self.shift) @ self.mix)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(hidden))), 0.1)


class Net(nn.Module):
    """Runs its blocks in turn, the first one twice."""

    def __init__(self, tied: bool, width: int = 16, vocab: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocab)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=13, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def gpt2_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


MODELS: dict[str, Any] = {
    "own": (functools.partial(Net, False), lambda model, batch: model(**batch)),
    "tied": (functools.partial(Net, True), lambda model, batch: model(**batch)),
    "gpt2": (gpt2, gpt2_loss),
}


def train_model(rank: int, world: int, kind: str, jobs: list[Job]) -> list[tuple[list[float], list[dict[str, Tensor]]]]:
    """Losses and whole gradients of three updates of each job."""
    make, loss_sum = MODELS[kind]
    found = []
    for job in jobs:
        torch.manual_seed(0)
        engine = engine_for(job, make(), loss_sum)
        torch.manual_seed(rank)
        grads: list[dict[str, Tensor]] = []
        engine.observer = Boundary(functools.partial(_keep, engine, grads))
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            batch = {name: torch.randint(0, 13, (2, 9), generator=generator) for name in ("input_ids", "labels")}
            losses.append(engine.train_step([batch, batch]).loss)
        found.append((losses, grads))
        engine.close()
    return found


def _keep(engine: Any, grads: list[dict[str, Tensor]]) -> None:
    grads.append(whole_grads(engine))


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stage", STAGES)
def test_policies_change_no_bit_of_other_models(ranks: RankGroups, stage: str, kind: str) -> None:
    policies: list[Any] = [*POLICIES[:2], {"mode": "segments", "k": 2}, {"mode": "nested", "k": 2}, "offload"]
    if kind != "gpt2":
        policies.append({"mode": "nested", "k": 2, "save": ["matmul"]})
    jobs = [Job(stage, policy=policy, accumulation=2) for policy in ("none", *policies)]
    if stage == STAGES[3]:  # some of the blocks' own parameters stay gathered
        jobs += [dataclasses.replace(job, zero={"stage3_param_persistence_threshold": 20}) for job in jobs]
    for (losses, grads), *with_policies in ranks(2).run(train_model, kind, jobs, timeout_s=300):
        assert len(grads) == 3 and all(g.abs().sum() > 0 for g in grads[0].values())
        for found_losses, found in with_policies:
            assert found_losses == losses
            for one, other in zip(found, grads, strict=True):
                assert one.keys() == other.keys()
                for name in other:
                    assert torch.equal(one[name], other[name]), name


def refusals(rank: int, world: int, stage: str) -> list[str]:
    """What an engine says to another number of micro-batches, and to a gradient that is not finite."""
    said = []
    job = Job(stage, accumulation=2)
    engine = build_engine(job)
    batches = [rows_of(job, 0, m, rank, world, SMALL["vocab_size"]) for m in range(3)]
    before = whole_weights(engine)
    for given in (batches[: 1 + rank], batches):
        with pytest.raises(EngineError) as refused:
            engine.train_step(given)
        said.append(str(refused.value))
    engine.train_step(batches[:2])
    assert any(not torch.equal(a, b) for a, b in zip(before, whole_weights(engine), strict=True))
    before = whole_weights(engine)
    spoil = dict(named_parameters(engine.model))["norm.weight"].register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(NonFiniteError) as refused:
        engine.train_step(batches[:2])
    said.append(str(refused.value))
    assert all(torch.equal(a, b) for a, b in zip(before, whole_weights(engine), strict=True))
    spoil.remove()
    engine.close()
    return said


def whole_weights(engine: Any) -> list[Tensor]:
    import deepspeed

    parameters = list(engine.model.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s == STAGES[1] else pytest.mark.full) for s in STAGES])
def test_what_would_lose_gradients_or_weights_stops_every_rank(ranks: RankGroups, stage: str) -> None:
    for some, many, spoilt in ranks(2).run(refusals, stage):
        assert "was told 2 micro-batches an update, and given 1, 2" in some and "train.grad_accum" in some
        assert "given 3" in many
        assert "gradient norm inf" in spoilt or "gradient norm nan" in spoilt


def survivors(rank: int, world: int) -> list[str]:
    """Engines that are there after their end, in a process that builds several, and what they leave replaced."""
    linear, found = nn.functional.linear, []
    for stage in STAGES:
        engine = build_engine(Job(stage, accumulation=1))
        engine.train_step([rows_of(Job(stage, accumulation=1), 0, 0, rank, world, SMALL["vocab_size"])])
        held = {"engine": weakref.ref(engine.model), "optimizer": weakref.ref(engine.model.optimizer)}
        engine.close()
        del engine
        gc.collect()
        found += [f"{name} of {stage}" for name, ref in held.items() if ref() is not None]
    return found if nn.functional.linear is linear else [*found, "linear"]


@pytest.mark.full
def test_an_engine_that_is_closed_is_gone(ranks: RankGroups) -> None:
    assert ranks(2).run(survivors) == [[], []]


def test_what_means_nothing_under_zero_is_refused() -> None:
    run = RunSettings(
        micro_batch=1,
        grad_accum=1,
        data_ranks=1,
        world_size=1,
        stages=1,
        clip=None,
        precision="fp32",
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        device="cpu",
    )
    config = resolve({"zero_optimization": {"stage": 3}}, run)

    def refused(**options: Any) -> str:
        engine = ENGINES["deepspeed"](
            TrainingOptions(**options), torch.device("cpu"), lambda model, batch: model(batch)
        )
        return "; ".join(engine.refuses(Plan()))

    assert refused(deepspeed=config) == ""
    assert "deepspeed needs TrainingOptions.deepspeed, which" in refused()
    assert "train.accum_sync=every is an option of ddp" in refused(deepspeed=config, accum_sync="every")
    assert "ZeRO-3 gathers" in refused(deepspeed=config, compile=True, allow_untested=True)
    assert "engine.replicas=2" in refused(deepspeed=config, replicas=2)
