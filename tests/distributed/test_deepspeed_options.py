"""Every option of a DeepSpeed configuration that is taken trains the same model: it is about memory and traffic."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_ckpt.deepspeed_config import RunSettings, read_config, resolve
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "deepspeed").glob("zero*.json"))
CPU = {"device": "cpu"}
WIDTH = SMALL["d_model"]
NO_PERSISTENCE = {"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0}

OPTIONS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"contiguous_gradients": False},
        {"reduce_scatter": False},
        {"overlap_comm": True},
        {"overlap_comm": True, "contiguous_gradients": False},
        {"overlap_comm": True, "offload_optimizer": CPU},
        {"use_multi_rank_bucket_allreduce": False},
        {"parameter_alignment": True},
        {"allgather_bucket_size": 100},
        {"offload_optimizer": CPU | {"pin_memory": False}, "ignore_unused_parameters": False},
    ],
    3: [
        {"contiguous_gradients": False},
        {"reduce_scatter": False},
        {"overlap_comm": False},
        {"sub_group_size": 1000},
        {"sub_group_size": 1000, "offload_optimizer": CPU},
        {"offload_param": CPU},
        {"zero_hpz_partition_size": 2, "offload_optimizer": CPU},
        {"memory_efficient_linear": False},
        {"enable_sanity_checks": True, "log_trace_cache_warnings": True},
        {"stage3_use_all_reduce_for_fetch_params": True},
        {"stage3_allgather_sequential": True},
        {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
        {"stage3_param_persistence_threshold": 100, "stage3_model_persistence_threshold": 300},
    ],
}
OPTIONS[2] = OPTIONS[1]


def outcomes(
    rank: int, world: int, configurations: list[dict[str, Any]], precision: Any = "fp32"
) -> list[tuple[list[float], Tensor]]:
    """What comes of each: DeepSpeed leaves groups behind, so that a round trip for each would start new ranks."""
    return [_outcome(rank, world, data, precision) for data in configurations]


def _outcome(rank: int, world: int, data: dict[str, Any], precision: Any) -> tuple[list[float], Tensor]:
    """Losses and norms of two updates, and the fp32 weights after them as DeepSpeed itself reads them."""
    from deepspeed.utils import safe_get_full_fp32_param

    run = RunSettings(
        micro_batch=2,
        grad_accum=2,
        data_ranks=world,
        world_size=world,
        stages=1,
        clip=0.5,
        precision=precision,
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        device="cpu",
        hidden_size=WIDTH,
    )
    config = resolve(data, run)
    job = Job(
        engine="deepspeed",
        accumulation=2,
        options={"deepspeed": config, "clip": run.clip, "precision": precision},
    )
    torch.manual_seed(rank)
    engine = build_engine(job)
    seen: list[float] = []
    for step in range(2):
        batches = [rows_of(job, step, micro, rank, world, SMALL["vocab_size"]) for micro in range(2)]
        result = engine.train_step(batches)
        seen += [result.loss, result.grad_norm]
    parameters = list(engine.model.module.parameters())
    whole = [safe_get_full_fp32_param(p) if config.stage else p.detach() for p in parameters]
    weights = torch.cat([w.flatten().float().cpu() for w in whole])
    engine.close()
    return seen, weights


def assert_alike(ranks: RankGroups, configurations: dict[str, dict[str, Any]]) -> None:
    """All of them train as the first one does."""
    for of_a_rank in ranks(2).run(outcomes, list(configurations.values())):
        expected, expected_weights = of_a_rank[0]
        for name, (seen, weights) in zip(configurations, of_a_rank, strict=True):
            assert seen == pytest.approx(expected, rel=1e-5), name
            # AdamW makes a step of rounding in gradients that are nearly 0, of a hundredth of lr at most here.
            assert (weights - expected_weights).abs().max() < 1e-4, name


def test_shipped_configurations_train_alike(ranks: RankGroups) -> None:
    assert_alike(ranks, {path.stem: read_config(path) for path in SHIPPED})


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_option_trains_the_same(stage: int, ranks: RankGroups) -> None:
    base = {"stage": stage, "reduce_bucket_size": 500} | (NO_PERSISTENCE if stage == 3 else {})
    assert_alike(ranks, {str(option): {"zero_optimization": base | option} for option in [{}, *OPTIONS[stage]]})


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bf16_may_be_kept_and_sent_in_fp32(stage: int, ranks: RankGroups) -> None:
    data = {"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}
    sent, kept = {"communication_data_type": "fp32"}, {"data_types": {"grad_accum_dtype": "fp32"}}
    for plain, *others in ranks(2).run(outcomes, [data, data | sent, data | kept, data | sent | kept], "bf16"):
        for seen, _ in others:
            assert seen == pytest.approx(plain[0], rel=2e-2)
