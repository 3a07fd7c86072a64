"""The loop on several ranks: resuming, and what validation must not touch. ``tests/faults`` stops real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console as RichConsole

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.errors import ConfigError, DataError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory import meter
from dist_ckpt.report.console import Console
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.data import build_data, micro_batch
from dist_ckpt.trainer.job import Job
from dist_ckpt.trainer.loop import Loop
from dist_ckpt.trainer.memory_limit import limit_memory
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.run_folder import RunFolder
from tests.distributed.runs import TINY, StopsAfter, run_here, trajectory
from tests.ranks import RankError, RankGroups

STEPS = "train.steps=12"
DROPOUT = "model.dropout=0.1"
RESUME = "train.resume=auto"
POLICIES = ("none", "full", "every_k", "selective", "selective_attention")
ENGINES = ("ddp", "fsdp1", "fsdp2")


def check_stopping_changes_nothing(ranks: RankGroups, tmp_path: Path, options: list[str]) -> None:
    """A run that is stopped after step 7 of 12 and resumed is, bit for bit, the run that is not."""
    group, whole, parts = ranks(2), str(tmp_path / "whole"), str(tmp_path / "parts")
    done, expected = group.run(run_here, whole, options)[0]
    assert done
    done, before = group.run(run_here, parts, options, 7)[0]
    assert not done
    assert trajectory(before) == trajectory(expected[:7])
    assert [path.name for path in (tmp_path / "parts" / "states").iterdir()] == ["step_7"]
    done, lines = group.run(run_here, parts, [*options, RESUME])[0]
    assert done
    assert trajectory(lines) == trajectory(expected)


def check_resuming_elsewhere(
    ranks: RankGroups, tmp_path: Path, before: tuple[int, list[str]], after: tuple[int, list[str]]
) -> None:
    """A run goes on with other options or ranks, at the same global batch, as if it had always had the first ones."""
    options = [STEPS, "train.global_batch=8"]
    run = str(tmp_path / "run")
    _, expected = ranks(before[0]).run(run_here, str(tmp_path / "whole"), [*options, *before[1]])[0]
    ranks(before[0]).run(run_here, run, [*options, *before[1]], 7)
    done, lines = ranks(after[0]).run(run_here, run, [*options, *after[1], RESUME])[0]
    assert done
    assert [m["step"] for m in lines] == list(range(1, 13))
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in expected], rel=1e-6)
    assert [m["tokens"] for m in lines] == [m["tokens"] for m in expected]


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_and_policy_resumes_bitwise(ranks: RankGroups, tmp_path: Path, engine: str, policy: str) -> None:
    options = [STEPS, DROPOUT, f"engine={engine}", f"ckpt={policy}", "train.grad_accum=3"]
    check_stopping_changes_nothing(ranks, tmp_path, options)


def test_resumes_on_fewer_ranks_under_another_engine_and_policy(ranks: RankGroups, tmp_path: Path) -> None:
    before, after = ["engine=fsdp1", "ckpt=selective"], ["engine=fsdp2", "ckpt=full"]
    check_resuming_elsewhere(ranks, tmp_path, (4, before), (2, after))


@pytest.mark.full
@pytest.mark.parametrize("after", ["2 fsdp2 none", "4 fsdp1 full", "1 ddp every_k", "2 ddp selective"])
@pytest.mark.parametrize("before", ["4 fsdp2 none", "2 fsdp1 selective", "2 ddp full", "1 fsdp2 selective_attention"])
def test_resumes_across_ranks_engines_and_policies(ranks: RankGroups, tmp_path: Path, before: str, after: str) -> None:
    jobs = []
    for job in (before, after):
        world, engine, policy = job.split()
        jobs.append((int(world), [f"engine={engine}", f"ckpt={policy}"]))
    check_resuming_elsewhere(ranks, tmp_path, jobs[0], jobs[1])


@pytest.mark.full
@pytest.mark.parametrize("changes", [("ckpt=selective", "ckpt=full"), ("engine=fsdp1", "engine=fsdp2")], ids=" ".join)
def test_resumes_with_one_change(ranks: RankGroups, tmp_path: Path, changes: tuple[str, str]) -> None:
    check_resuming_elsewhere(ranks, tmp_path, (2, [changes[0]]), (2, [changes[1]]))


PIPELINE = ["engine=deepspeed_pipe", "engine.stages=2", "engine.config=configs/deepspeed/pipeline.json"]
ZERO = {stage: ["engine=deepspeed", f"engine.config=configs/deepspeed/zero{stage}.json"] for stage in range(4)}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", [*ZERO.values(), PIPELINE], ids=lambda e: e[-1].rpartition("/")[2])
def test_deepspeed_resumes_bitwise(ranks: RankGroups, tmp_path: Path, engine: list[str], precision: str) -> None:
    options = [STEPS, DROPOUT, *engine, "ckpt=full", "train.grad_accum=2", f"train.precision={precision}"]
    check_stopping_changes_nothing(ranks, tmp_path, options)


@pytest.mark.full
@pytest.mark.parametrize(
    "jobs",
    [
        [(2, ZERO[3]), (4, ZERO[1])],
        [(4, PIPELINE), (2, ZERO[2])],
        [(2, ["engine=ddp"]), (2, PIPELINE)],
        [(2, PIPELINE), (2, ["engine=fsdp2"])],
        [(2, ZERO[0]), (1, ["engine=ddp"])],
    ],
    ids=["zero3_zero1", "pipeline_zero2", "ddp_pipeline", "pipeline_fsdp2", "zero0_ddp"],
)
def test_resumes_across_deepspeed_and_other_engines(
    ranks: RankGroups, tmp_path: Path, jobs: list[tuple[int, list[str]]]
) -> None:
    check_resuming_elsewhere(ranks, tmp_path, jobs[0], jobs[1])


def test_a_resumed_run_takes_its_options_from_the_configuration(ranks: RankGroups, tmp_path: Path) -> None:
    options = ["train.steps=4", "engine=fsdp1"]
    ranks(2).run(run_here, str(tmp_path / "run"), options, 2)
    assert ranks(2).run(resumed_options, str(tmp_path / "run"), [*options, RESUME])[0] == ([0.1, 0.0], "")
    changed = [*options, RESUME, "train.weight_decay=0.5", "train.beta1=0.8", "train.lr=1e-4", "ckpt=full"]
    changed = [option for option in changed if option != "engine=fsdp1"] + ["engine=ddp", "train.grad_accum=2"]
    decays, said = ranks(2).run(resumed_options, str(tmp_path / "run"), changed)[0]
    assert decays == [0.5, 0.0]
    assert said == (
        "changed since the state was saved: "
        "train.lr 0.003 → 0.0001, train.weight_decay 0.1 → 0.5, train.beta1 0.9 → 0.8, "
        "engine fsdp1 → ddp, ckpt none → full, rows per update 4 → 8\n"
    )


def resumed_options(rank: int, world: int, run_dir: str, arguments: list[str]) -> tuple[list[float], str]:
    """The weight decay of each group after resuming, and what is said of changed options."""
    config = load_config([*TINY, *arguments, f"run_dir={run_dir}"])
    job = Job.build(config, Place(rank, world, rank, world))
    job.engine.prepare(job.model, job.plan)
    text = io.StringIO()
    console = Console(4, rich=RichConsole(file=text, soft_wrap=True, highlight=False))
    folder, stops = RunFolder(Path(run_dir)), StopsAfter(rank, None)
    limit = limit_memory(config, job.device)
    loop = Loop(config, job.engine, job.train_rows, job.validation_rows, folder, console, stops, limit)  # type: ignore[arg-type]
    loop.resume(restarted=False)
    assert (loop.step, loop.position) == (2, 8)
    said = [line for line in text.getvalue().splitlines(keepends=True) if line.startswith("changed")]
    return [group["weight_decay"] for group in job.engine.optimizer.param_groups], "".join(said)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("train.seed=1", "train.seed 0 → 1"),
        ("train.seq_len=16", "train.seq_len 32 → 16, rows "),
        ("data.pack=false", "data.pack True → False, rows "),
        ("data.max_document_bytes=20000", "data.max_document_bytes None → 20000, files "),
        ("data=synthetic", "data.kind stdlib → synthetic, "),
    ],
)
def test_a_run_does_not_resume_with_other_data(ranks: RankGroups, tmp_path: Path, change: str, says: str) -> None:
    options = ["train.steps=2", "train.save_every=2"]
    ranks(1).run(run_here, str(tmp_path / "run"), options)
    with pytest.raises(RankError, match="StateError") as caught:
        ranks(1).run(run_here, str(tmp_path / "run"), [*options, change, RESUME])
    assert f"position 4 means other rows (state → this run: {says}" in str(caught.value)


def other_data_on_one_rank(rank: int, world: int, run_dir: str, text: str) -> str:
    try:
        run_here(rank, world, run_dir, ["data=text", f"data.glob={text}/{rank}/*", "data.validation_fraction=0"])
    except DataError as error:
        return str(error)
    return "trained"


def test_ranks_with_different_data_are_refused_together(ranks: RankGroups, tmp_path: Path) -> None:
    for rank, size in enumerate((400, 401, 400)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_bytes(b"abcd" * size)
    run = tmp_path / "run"
    messages = ranks(2).run(other_data_on_one_rank, str(run), str(tmp_path), timeout_s=30)
    assert messages[0] == messages[1]
    assert messages[0].startswith("data: ranks 0 and 1 have different training data (files ")
    assert "tokens 1600 → 1604" in messages[0]
    assert not (run / "config.yaml").exists(), "the folder is still free"


@pytest.mark.parametrize("change", ["train.micro_batch=1000000000", "train.grad_accum=1000000000"])
def test_an_update_of_more_rows_than_there_are_is_a_mistake(change: str) -> None:
    with pytest.raises(ConfigError, match=r"more than the .* training rows of an epoch"):
        Job.build(load_config([*TINY, change]), Place())


def run_with_opaque_nodes(rank: int, world: int, run_dir: str) -> str:
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        real = meter.saved_bytes
        patch.setattr(meter, "saved_bytes", lambda *a, **k: dataclasses.replace(real(*a, **k), opaque=("CopySlices",)))
        run_here(rank, world, run_dir, ["train.steps=1"])
    return text.getvalue()


def test_what_cannot_be_counted_is_named(ranks: RankGroups, tmp_path: Path) -> None:
    first, second = ranks(2).run(run_with_opaque_nodes, str(tmp_path / "run"))
    assert "\nactivations may be higher than shown: what CopySlices may hold cannot be counted\n" in first
    assert not second


def test_validation_leaves_training_as_it_is(ranks: RankGroups, tmp_path: Path) -> None:
    options = ["train.steps=4", DROPOUT, "ckpt=full"]
    _, without = ranks(2).run(run_here, str(tmp_path / "without"), options)[0]
    _, with_it = ranks(2).run(run_here, str(tmp_path / "with"), [*options, "train.eval_every=2"])[0]
    assert trajectory(with_it) == trajectory(without)
    assert [m["step"] for m in with_it if "eval_loss" in m] == [2, 4]


def validation_cost(rank: int, world: int, engine_name: str, policy: str) -> tuple[int, float]:
    """FLOPs and loss of one validation, which must leave the generator where it is."""
    config = load_config([*TINY, DROPOUT, "train.eval_every=1", f"engine={engine_name}", f"ckpt={policy}"])
    job = Job.build(config, Place(rank, world, rank, world))
    engine: DataParallelEngine = job.engine
    engine.prepare(job.model, job.plan)
    batch = micro_batch(job.validation_rows, 0, rank, 2)
    losses: list[float] = []
    before = torch.get_rng_state()
    flops = count_flops(lambda: losses.append(engine.eval_loss([batch])))
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.model.training
    return flops, losses[0]


@pytest.mark.parametrize("engine", ["fsdp2", *(pytest.param(e, marks=pytest.mark.full) for e in ("ddp", "fsdp1"))])
def test_validation_recomputes_nothing(ranks: RankGroups, engine: str) -> None:
    plain = ranks(2).run(validation_cost, engine, "none")
    assert all(flops > 0 for flops, _ in plain)
    for policy in POLICIES[1:]:
        assert ranks(2).run(validation_cost, engine, policy) == plain


def test_validation_counts_no_row_twice(ranks: RankGroups, tmp_path: Path) -> None:
    """Five rows on two ranks: the last of two batches of two rows each is half empty, and empty, for them."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "train.txt").write_bytes(b"abcd" * 100)
    (text / "validation.txt").write_bytes(bytes(range(160)))
    data = ["data=text", f"data.glob={text}/train.txt", f"data.validation_glob={text}/validation.txt"]
    few = [*data, "train.steps=1", "train.eval_every=1", "train.eval_batches=2"]
    lines = ranks(2).run(run_here, str(tmp_path / "two"), few)[0][1]
    many = [*data, "train.steps=1", "train.eval_every=1", "train.eval_batches=9", "train.micro_batch=1"]
    alone = ranks(1).run(run_here, str(tmp_path / "one"), [*many, "train.global_batch=4"])[0][1]
    config = load_config([*TINY, *data])
    _, rows = build_data(config.data, vocab_size=256, seq_len=32, seed=0)
    assert rows.num_rows == 5
    assert int((rows.sample(4)[1] != IGNORE_INDEX).sum()) == 31
    assert lines[0]["eval_loss"] == pytest.approx(alone[0]["eval_loss"], rel=1e-5)
