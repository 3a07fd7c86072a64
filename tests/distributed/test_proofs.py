"""A plan is proven under every engine that would train with it, and what only some ranks do otherwise is found."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.data.files import find_files
from dist_ckpt.trainer.job import Job
from dist_ckpt.trainer.models.llama import FeedForward
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.proving import prove
from dist_ckpt.verification import Verification, merge
from tests.ranks import RankGroups

TINY = [
    "model.n_layers=3", "model.d_model=32", "model.d_ff=48", "model.n_heads=4", "model.n_kv_heads=2",
    "model.dropout=0.1", "train.seq_len=24", "train.micro_batch=2", "data=synthetic",
]  # fmt: skip


def proofs(rank: int, world: int, jobs: list[list[str]]) -> list[Verification]:
    """What this rank finds of each job, given as the arguments of a command line."""
    found = []
    for arguments in jobs:
        config = load_config([*TINY, *arguments])
        files = None if config.data.kind == "synthetic" else find_files(config.data)
        found.append(prove(Job.build(config, Place(rank, world, rank, world), files)))
    return found


ENGINES = ["ddp", "fsdp1", "fsdp2"]
CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
ZERO = [f"deepspeed engine.config={CONFIGS}/zero{stage}.json" for stage in range(4)]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def every(fast: Sequence[str] = ()) -> list[Any]:
    """Every engine, as it is asked for; DeepSpeed's in the full tier but for those given."""
    tier = {one: [] if one in fast else [pytest.mark.full] for one in ZERO}
    zero = [pytest.param(one, id=f"ZeRO {n}", marks=[needs_deepspeed, *tier[one]]) for n, one in enumerate(ZERO)]
    return [*ENGINES, *zero]


FAST = [["+ckpt=selective", "train.grad_accum=2"], ["+ckpt=segments", "ckpt.k=2"]]
OTHERS = [["+ckpt=full"], ["+ckpt=nested", "ckpt.k=2"], ["+ckpt=offload"], ["+ckpt=first_n"], ["+ckpt=every_k"]]


def asked(engine: str) -> list[str]:
    return f"engine={engine}".split(" ")


@pytest.mark.parametrize("modes", [FAST, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["fast", "others"])
@pytest.mark.parametrize("engine", every())
def test_plans_are_proven_under_every_engine(ranks: RankGroups, engine: str, modes: list[list[str]]) -> None:
    jobs = [[*mode, *asked(engine)] for mode in modes]
    for one, other in zip(*ranks(2).run(proofs, jobs), strict=True):
        proof = merge([one, other])
        assert proof.ok and not proof.notes, str(proof)
        assert len(proof.gradients) > 20 and all(check.status == "equal" for check in proof.gradients)
        assert one.losses != other.losses, "each rank has its own rows"
        assert proof.saved_bytes is not None and proof.baseline_saved_bytes is not None
        assert proof.saved_bytes <= proof.baseline_saved_bytes
        assert proof.flops is not None and proof.baseline_flops is not None and proof.flops >= proof.baseline_flops


@pytest.mark.full
@pytest.mark.parametrize("options", [["train.precision=bf16"], ["train.compile=true"], ["model.attention=chunked"]])
@pytest.mark.parametrize("engine", every())
def test_plans_are_proven_with_other_options(ranks: RankGroups, engine: str, options: list[str]) -> None:
    if "train.compile=true" in options and engine not in ENGINES:
        pytest.skip("compiled blocks are not proven under DeepSpeed, and refused")
    jobs = [["+ckpt=full", *asked(engine), *options], ["+ckpt=selective", *asked(engine), *options]]
    for both in zip(*ranks(2).run(proofs, jobs, timeout_s=400), strict=True):
        proof = merge(both)
        assert proof.ok, str(proof)


def faulty_proofs(rank: int, world: int, at: int, arguments: list[str]) -> Verification:
    """On one rank each feed-forward multiplies with the number of its calls."""
    forward = FeedForward.forward

    def counting(self: FeedForward, x: Tensor) -> Tensor:
        if rank != at:
            return forward(self, x)
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x * self.calls)

    FeedForward.forward = counting  # type: ignore[method-assign]
    try:
        return proofs(rank, world, [arguments])[0]
    finally:
        FeedForward.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("engine", every(fast=ZERO[3:]))
def test_what_one_rank_does_otherwise_is_found(ranks: RankGroups, engine: str) -> None:
    one, other = ranks(2).run(faulty_proofs, 1, ["+ckpt=full", *asked(engine)])
    proof = merge([one, other])
    cause = next(finding for finding in proof.findings if "calls was nothing for its forward and 1" in finding.what)
    assert cause.where == "layers.{0-2}.feed_forward" and "on rank 1" in cause.what, str(proof)
    assert sum("gradients differ" in finding.what for finding in proof.findings) == 1
    # What one rank computes wrongly, all of them have in their gradients and their norm.
    for rank in (one, other):
        assert any("gradients differ" in finding.what for finding in rank.findings), str(rank)
        assert "the gradient norm" in [finding.where for finding in rank.findings], str(rank)


@pytest.mark.full
@needs_deepspeed
def test_a_pipeline_is_proven_over_all_stages(ranks: RankGroups) -> None:
    options = ["engine=deepspeed_pipe", "engine.partition=[1,2]", "train.grad_accum=2"]
    jobs = [[f"ckpt.per_stage={policies}", *options] for policies in ("[none,full]", "[selective,none]")]
    recomputes = []
    for both in zip(*ranks(2).run(proofs, jobs, timeout_s=400), strict=True):
        proof = merge(both)
        assert proof.ok and not proof.notes, str(proof)
        assert len(proof.gradients) > 20 and all(check.status == "equal" for check in proof.gradients)
        assert proof.saved_bytes is not None and proof.baseline_saved_bytes is not None
        assert proof.saved_bytes < proof.baseline_saved_bytes
        recomputes.append(proof.recomputes)
    assert recomputes[0] == 2 * 2, "two blocks of the second stage, in two micro-batches"
