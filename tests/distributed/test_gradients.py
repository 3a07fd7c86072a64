"""Accumulated gradients over micro-batches and ranks are those of one process that sees the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.torch_engine import TorchEngine
from dist_ckpt.errors import EngineError, PlanError
from dist_ckpt.names import named_parameters, unwrapped_name
from dist_ckpt.plan import Plan
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.wrap.apply import remove_plan
from tests.distributed.training import SMALL, Job, build_engine, rows_of
from tests.ranks import RankGroups

LR = 0.5
TOLERANCE = 1e-6
"""Relative, per tensor: fp32 sums in another order."""


def whole(engine: TorchEngine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Unsharded weights and gradients, on every rank."""
    model = engine.model
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _copies(model)
    return _copies(model)


def _copies(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def full(tensor: Any) -> Tensor:
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    named = list(named_parameters(model))
    return {n: full(p) for n, p in named}, {n: full(p.grad) for n, p in named}


def sgd_step(rank: int, world: int, job: Job) -> tuple[float, int, dict[str, Tensor], dict[str, Tensor]]:
    """One update with plain SGD: loss, tokens, whole gradients before and whole weights after."""
    engine = build_engine(job)
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=job.lr)
    grads: dict[str, Tensor] = {}
    clip = engine.clip_gradients

    def snapshot(max_norm: float) -> float:
        grads.update(whole(engine)[1])
        return clip(max_norm)

    engine.clip_gradients = snapshot  # type: ignore[method-assign]
    engine.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    batches = [rows_of(job, 0, m, rank, world, SMALL["vocab_size"]) for m in range(job.accumulation)]
    result = engine.train_step(batches)
    return result.loss, result.tokens, grads, whole(engine)[0]


def one_process(job: Job, world: int, lr: float) -> tuple[float, int, dict[str, Tensor], dict[str, Tensor]]:
    """The same update on the whole batch at once, without any engine."""
    config = ModelConfig(**(SMALL | job.model))
    model = Transformer(config)
    init_parameters(model, seed=3, n_layers=config.n_layers)
    parts = [rows_of(job, 0, m, r, world, SMALL["vocab_size"]) for m in range(job.accumulation) for r in range(world)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tokens = int((batch["labels"] != -100).sum())
    loss = model(**batch) / tokens
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    weights = {n: p.detach() - lr * grads[n] for n, p in model.named_parameters()}
    return float(loss.detach()), tokens, grads, weights


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


JOBS = {
    "ddp": Job("ddp"),
    "ddp-every": Job("ddp", options={"accum_sync": "every"}),
    "fsdp1": Job("fsdp1"),
    "fsdp1-boundary": Job("fsdp1", options={"accum_sync": "boundary"}),
    "fsdp2": Job("fsdp2"),
    "fsdp2-boundary": Job("fsdp2", options={"accum_sync": "boundary"}, policy="selective"),
    "fsdp2-meta-tied": Job("fsdp2", on_meta=True, model={"tied": True}, policy="full"),
    "hsdp": Job("fsdp2", options={"replicas": 2}, policy="selective"),
}


@pytest.mark.parametrize(("name", "world"), [*((n, 2) for n in JOBS if n != "hsdp"), ("fsdp1", 1), ("hsdp", 4)])
def test_ragged_micro_batches_count_by_tokens(ranks: RankGroups, name: str, world: int) -> None:
    job = JOBS[name]
    job = Job(**{**vars(job), "ragged": True, "lr": LR, "options": job.options | {"clip": None}})
    loss, tokens, grads, weights = one_process(job, world, LR)
    for found_loss, found_tokens, found_grads, found_weights in ranks(world).run(sgd_step, job):
        assert found_tokens == tokens < world * job.accumulation * job.rows * job.seq
        assert found_loss == pytest.approx(loss, rel=TOLERANCE)
        assert found_grads.keys() == grads.keys()
        for parameter, expected in grads.items():
            assert distance(found_grads[parameter], expected) < TOLERANCE, parameter
            assert distance(found_weights[parameter], weights[parameter]) < TOLERANCE, parameter


def test_the_usual_mean_of_means_would_be_caught() -> None:
    """The check above has teeth: averaging each micro-batch's own mean is far off."""
    job = Job("ddp", ragged=True)
    _, _, grads, _ = one_process(job, 2, LR)
    model = Transformer(ModelConfig(**SMALL))
    init_parameters(model, seed=3, n_layers=SMALL["n_layers"])
    for m in range(job.accumulation):
        for r in range(2):
            batch = rows_of(job, 0, m, r, 2, SMALL["vocab_size"])
            (model(**batch) / (batch["labels"] != -100).sum() / (2 * job.accumulation)).backward()
    worst = max(distance(p.grad, grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert worst > 1000 * TOLERANCE


def prepare_tensor_parallel(rank: int, world: int) -> str:
    model = Transformer(ModelConfig(**SMALL))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model.layers[0].feed_forward, mesh, {"w1": ColwiseParallel()})
    engine = ENGINES["fsdp2"](TrainingOptions(), torch.device("cpu"), lambda m, b: m(**b))
    try:
        engine.prepare(model, make_plan(model, "none"))
    except EngineError as error:
        return str(error)
    return "prepared"


def test_tensor_parallel_models_are_refused_by_name(ranks: RankGroups) -> None:
    for message in ranks(2).run(prepare_tensor_parallel):
        assert "'layers.0.feed_forward.w1.weight'" in message and "mesh dimensions tp" in message


def refusal(name: str, **options: Any) -> list[str]:
    engine = ENGINES[name](TrainingOptions(**options), torch.device("cpu"), lambda m, b: m(**b))
    return engine.refuses(Plan())


def test_options_that_an_engine_cannot_keep_are_refused() -> None:
    assert "option of fsdp2" in refusal("ddp", replicas=2)[0] and "option of fsdp2" in refusal("fsdp1", replicas=2)[0]
    assert "in bf16" in refusal("fsdp1", precision="bf16", accum_sync="boundary")[0]
    assert refusal("fsdp2", precision="bf16", accum_sync="boundary", replicas=2) == []


def units_and_cost(rank: int, world: int, job: Job) -> tuple[list[str], int]:
    engine = build_engine(job)
    kinds = (FullyShardedDataParallel, FSDPModule)
    return [unwrapped_name(n) for n, m in engine.model.named_modules() if isinstance(m, kinds)], (
        engine.accumulation_cost_bytes()
    )


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_a_policy_does_not_choose_what_is_sharded(ranks: RankGroups, engine: str) -> None:
    narrow = {"mode": "full", "blocks": "layers.0"}
    waits = {"accum_sync": "boundary"}
    (without, nothing), (with_policy, _) = (ranks(2).run(units_and_cost, Job(engine, p))[0] for p in ("none", narrow))
    assert without == with_policy == ["", "layers.0", "layers.1", "layers.2"] and nothing == 0
    whole = sum(p.numel() for p in Transformer(ModelConfig(**SMALL)).parameters())
    assert ranks(2).run(units_and_cost, Job(engine, options=waits))[0][1] == 4 * whole


def remove_after_sharding(rank: int, world: int) -> str:
    engine = build_engine(Job("fsdp2", "full"))
    try:
        remove_plan(engine.model)
    except PlanError as error:
        return str(error)
    return "removed"


def test_a_plan_is_not_removed_from_under_fsdp2(ranks: RankGroups) -> None:
    assert all("remove its plan before sharding" in message for message in ranks(2).run(remove_after_sharding))
