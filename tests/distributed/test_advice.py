"""Advice on measured runs: it names what stands out there, and what is done about it has the effect that it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dist_ckpt.memory.meter import gather_report
from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.planning import make_plan
from dist_ckpt.report.advice import RunFacts, advice
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.distributed.training import SMALL, Job, build_engine, rows_of, stages_of
from tests.ranks import RankGroups

WIDE = {"n_layers": 4, "d_model": 32, "d_ff": 96, "vocab_size": 61}


def deep_step(rank: int, world: int, job: Job) -> tuple[MemoryReport, StepProfile]:
    """The second update of a job, in depth."""
    engine = build_engine(job)
    here, vocab = (engine.data_rank, engine.data_ranks), (SMALL | job.model)["vocab_size"]
    batches = [[rows_of(job, step, m, *here, vocab) for m in range(job.accumulation)] for step in range(2)]
    engine.train_step(batches[0])
    with engine.meter.profile(batches[1]) as deep:
        engine.train_step(batches[1], measure=True)
    memory = replace(deep.memory, stage=getattr(engine, "stage", None))
    report = gather_report(memory)
    engine.close()
    return report, deep.profile


def measured(ranks: RankGroups, job: Job) -> tuple[MemoryReport, list[StepProfile]]:
    found = ranks(2).run(deep_step, job)
    return found[0][0], [profile for _, profile in found]


def facts(job: Job) -> RunFacts:
    """What the run folder of a job would tell."""
    model = Transformer(ModelConfig(**(SMALL | job.model)))
    stages = stages_of(job, model)
    config = {
        "engine": {"name": job.engine.partition(",")[0], "stages": len(stages) or 1},
        "train": {
            "micro_batch": job.rows, "seq_len": job.seq, "grad_accum": job.accumulation,
            "accum_sync": job.options.get("accum_sync"),
        },
        "model": {"kind": "decoder", "loss": "full", "attention": "sdpa", **SMALL, **job.model},
    }  # fmt: skip
    return RunFacts(config, make_plan(model, job.policy, stages=stages))


def gain_about(job: Job, found: tuple[MemoryReport, list[StepProfile]], word: str) -> int:
    """What the only advice with a word in it would gain."""
    told = [one for one in advice(*found, facts(job)) if word in one.text]
    assert len(told) == 1, advice(*found, facts(job))
    assert told[0].gain_bytes is not None
    return told[0].gain_bytes


def heaviest(found: tuple[MemoryReport, list[StepProfile]]) -> int:
    return max(profile.peak_bytes for profile in found[1])


@pytest.mark.full
def test_logits_are_what_a_loss_in_pieces_saves(ranks: RankGroups) -> None:
    job = Job("fsdp2", "full", {**WIDE, "vocab_size": 2048}, accumulation=1, rows=8)
    before = measured(ranks, job)
    gain = gain_about(job, before, "model.loss=chunked model.loss_chunk=24 ")
    after = measured(ranks, replace(job, model={**job.model, "loss": "chunked", "loss_chunk": 24}))
    assert 0.7 * gain <= heaviest(before) - heaviest(after) <= gain


@pytest.mark.full
def test_unsharded_gradients_are_what_a_reduction_each_micro_batch_saves(ranks: RankGroups) -> None:
    job = Job("fsdp1", "full", {**WIDE, "n_layers": 8}, {"accum_sync": "boundary"}, accumulation=2, rows=1)
    before = measured(ranks, job)
    gain = gain_about(job, before, "train.accum_sync=every")
    after = measured(ranks, replace(job, options={}))
    assert 0.8 * gain <= heaviest(before) - heaviest(after) <= 1.05 * gain


@pytest.mark.full
def test_a_stage_with_more_in_flight_is_told_to_recompute_more(ranks: RankGroups) -> None:
    job = Job("deepspeed_pipe, ZeRO 0", "selective", WIDE, accumulation=4, rows=8, seq=64)
    before = measured(ranks, job)
    gain = gain_about(job, before, "'ckpt.per_stage=[full,selective]'")
    after = measured(ranks, replace(job, policy={"mode": "per_stage", "per_stage": ["full", "selective"]}))
    assert 0.8 * gain <= heaviest(before) - heaviest(after) <= 1.05 * gain


def test_segments_are_told_how_many_blocks_they_make_whole(ranks: RankGroups) -> None:
    job = Job("fsdp2", {"mode": "segments", "k": 6}, {**WIDE, "n_layers": 6, "d_ff": 512}, accumulation=1, rows=1)
    gain = gain_about(job, measured(ranks, job), "segments of 6 blocks hold 6 unsharded blocks at once")
    blocks = 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 512 + 2 * 32)
    assert 0.95 * 4 * blocks <= gain <= 1.05 * 4 * blocks
