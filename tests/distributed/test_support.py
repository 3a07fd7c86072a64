"""Every mode under every engine, precision and with compiled blocks: right to the bit, or refused.

One test a combination; docs/support.md shows their outcomes. Compared with the same engine without a policy: losses,
gradient norms and every gradient bitwise, names, and where nothing is compiled the exact saved bytes and FLOPs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dist_ckpt import Plan, make_plan, plan_cost
from dist_ckpt.cost import stage_costs
from dist_ckpt.engines import ENGINES, TrainingOptions, support
from dist_ckpt.engines.support import MODES, PRECISIONS, Combination, combinations, modes_of, standing
from dist_ckpt.errors import DistCkptError
from dist_ckpt.flops import count_flops
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import OpRule, Region, SaveRule
from dist_ckpt.policy import POLICIES
from dist_ckpt.stages import layers_of, partition
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests import support_page
from tests.distributed.training import SMALL, Job, Outcome, build_engine, rows_of, stages_of, train
from tests.ranks import RankGroups

OPTIONS: dict[str, dict[str, Any]] = {
    "segments": {"k": 2},
    "nested": {"k": 2, "inner": ["block", "attention"]},
    "first_n": {"n": 1},  # in a pipeline of each stage, and the second one has a single block
    "per_stage": {"per_stage": [{"mode": "segments", "k": 2}, "selective"]},
}
"""Where a mode's defaults would leave something of it untried on a model of three blocks."""

MIXED = Plan(
    blocks=("layers.0", "layers.1", "layers.2"),
    regions=(
        Region(("layers.0", "layers.1"), inner=(Region(("layers.0.feed_forward",)),)),
        Region(("layers.2",), SaveRule(ops=(OpRule("save", "attention"),))),
    ),
    policy={"mode": "plan"},
)
"""What no single mode would plan."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank saw of a combination."""

    outcome: Outcome
    names: list[str]
    flops: int | None
    """Of one update, where nothing is compiled: a dispatch mode would have compiled blocks run uncompiled."""


def run(rank: int, world: int, job: Job) -> Seen | str:
    """Trains, or says why it is refused."""
    try:
        outcome = train(rank, world, job)
    except DistCkptError as error:
        return str(error)
    engine = build_engine(job)
    here = engine.data_rank, engine.data_ranks
    batches = [rows_of(job, 0, m, *here, SMALL["vocab_size"]) for m in range(job.accumulation)]
    flops = None if job.options.get("compile") else count_flops(lambda: engine.train_step(batches))
    names = [name for name, _ in named_parameters(engine.model)]
    engine.close()
    return Seen(outcome, names, flops)


def job_of(combination: Combination, folder: Path) -> Job:
    path = folder / "plan.json"
    path.write_text(MIXED.to_json(), encoding="utf-8")
    options = {"path": str(path)} if combination.mode == "plan" else OPTIONS.get(combination.mode, {})
    return Job(
        combination.engine,
        policy={"mode": combination.mode, **options},
        model={"dropout": 0.1},
        accumulation=2,
        options={"precision": combination.precision, "compile": combination.compiled},
    )


def costs_of(job: Job, ranks: int) -> list[tuple[int, int]]:
    """(FLOPs of an update, peak of saved bytes) of each rank, measured on a model that is whole."""
    model = Transformer(ModelConfig(**(SMALL | job.model)))
    batch = rows_of(job, 0, 0, 0, 1, SMALL["vocab_size"])
    if stages := stages_of(job, model):
        plan = make_plan(model, job.policy, stages=stages)
        found = stage_costs(model, layers_of(model), plan, batch, job.accumulation)
        return [(job.accumulation * stage.micro_batch.flops, stage.saved_bytes) for stage in found]
    plan = make_plan(model, job.policy)
    linear = torch.nn.functional.linear
    if job.engine.endswith("ZeRO 3"):  # DeepSpeed's own saves what it needs once it has computed: no early stop before
        from deepspeed.runtime.zero.linear import zero3_linear_wrap as linear
    with mock.patch("torch.nn.functional.linear", linear):
        cost = plan_cost(model, plan, batch)
    return [(job.accumulation * cost.flops, cost.saved_bytes)] * ranks


@pytest.fixture(scope="module")
def without_policy(ranks: RankGroups, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine, precision, compiled) → what each rank sees without a policy, computed once."""

    @functools.cache
    def see(engine: str, precision: str, compiled: bool) -> list[Any]:
        job = job_of(Combination("none", engine, precision, compiled), tmp_path_factory.mktemp("none"))
        return ranks(2).run(run, job, timeout_s=300)

    return see


def check(ranks: RankGroups, combination: Combination, without_policy: Any, folder: Path) -> None:
    job = job_of(combination, folder)
    found = ranks(2).run(run, job, timeout_s=300)
    if standing(combination).verdict == "refused":
        reason = "stages" if combination.mode == "per_stage" else "compile"
        assert all(isinstance(one, str) and reason in one for one in found), found
        return
    for seen, expected in zip(
        found, without_policy(combination.engine, combination.precision, combination.compiled), strict=True
    ):
        assert isinstance(seen, Seen), seen
        assert seen.outcome.losses == expected.outcome.losses
        assert seen.outcome.norms == expected.outcome.norms
        assert seen.names == expected.names
        for grads, plain in zip(seen.outcome.grads, expected.outcome.grads, strict=True):
            assert grads.keys() == plain.keys() and len(plain) > 10
            for name in plain:
                assert torch.equal(grads[name], plain[name]), name
    if not combination.compiled and combination.precision == "fp32":
        for seen, (flops, saved_bytes) in zip(found, costs_of(job, len(found)), strict=True):
            assert seen.flops == flops
            assert {memory.activations for memory in seen.outcome.memory} == {saved_bytes}


QUICK = [
    c
    for c in combinations()
    if (c.engine == "fsdp2" and c.precision == "fp32" and not c.compiled)
    or (c.mode, c.engine, c.precision)
    in (("selective", "deepspeed, ZeRO 3", "fp32"), ("per_stage", "deepspeed_pipe, ZeRO 1", "fp32"))
]
REST = [c for c in combinations() if c not in QUICK]


@pytest.mark.parametrize("combination", QUICK, ids=support_page.identifier)
def test_support(ranks: RankGroups, combination: Combination, without_policy: Any, tmp_path: Path) -> None:
    check(ranks, combination, without_policy, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("combination", REST, ids=support_page.identifier)
def test_support_of_the_rest(ranks: RankGroups, combination: Combination, without_policy: Any, tmp_path: Path) -> None:
    check(ranks, combination, without_policy, tmp_path)


def test_every_mode_is_in_the_table() -> None:
    assert {combination.mode for combination in combinations()} | {"per_stage"} == set(POLICIES)
    assert standing(Combination("full", "deepspeed", "fp32", False)).verdict == "untested"
    assert set(modes_of(MIXED)) == {"segments", "nested", "full", "selective", "plan"}
    model = Transformer(ModelConfig(**SMALL))
    stages = partition(layers_of(model), model, 2, "uniform")
    of_stages = make_plan(model, {"per_stage": ["full", "none"]}, stages=stages)
    assert modes_of(of_stages) == ("full", "per_stage") and modes_of(of_stages.cut(())) == ("full", "plan")


def test_what_is_not_proven_is_refused() -> None:
    plan = dataclasses.replace(make_plan(Transformer(ModelConfig(**SMALL)), "full"), policy={"mode": "handmade"})
    for allowed in (False, True):
        options = TrainingOptions(allow_untested=allowed)
        problems = ENGINES["fsdp2"](options, torch.device("cpu"), lambda m, b: m(**b)).refuses(plan)
        assert bool(problems) is not allowed
        says = "ckpt=handmade with engine=fsdp2, train.precision=fp32: no test has proven it right"
        assert allowed or says in problems[0]


def test_the_page_says_what_the_tests_have_shown(request: pytest.FixtureRequest) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "support.md"
    is_recording = request.config.getoption("record") is not None  # then the outcomes are being rewritten
    expected = support_page.page(support_page.outcomes())
    if not is_recording:
        assert page.read_text(encoding="utf-8") == expected, support_page.__doc__
        assert all(support_page.verdict(c, support_page.outcomes()) == standing(c).verdict for c in combinations())
    shown = support_page.page({support_page.identifier(c): "passed" for c in combinations()})
    assert shown.count("| proven") == sum(standing(c).verdict == "proven" for c in combinations())
    every = itertools.product(MODES, support.ENGINES, PRECISIONS, (False, True))
    known = [standing(Combination(*one)).verdict for one in every]
    assert shown.count("| untested") == known.count("untested") and "proven |" not in support_page.page({})
