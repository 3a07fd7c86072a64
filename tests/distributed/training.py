"""Short trainings for distributed tests: what a rank computes, as plain numbers that travel between processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.compat import zero
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.deepspeed_config import DeepSpeedConfig, RunSettings, resolve
from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.engines.optim import OptimizerOptions
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Stages
from dist_ckpt.planning import make_plan
from dist_ckpt.stages import layers_of, partition
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 61}
"""Sizes that no number of ranks divides evenly, so that padding is always exercised."""


@dataclass(frozen=True)
class Job:
    """One training: what is built and what is fed."""

    engine: str = "fsdp2"
    """Its name, of DeepSpeed's with the stage: ``deepspeed, ZeRO 3``. A pipeline has two stages."""
    policy: Any = "none"
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    """More options of DeepSpeed's ``zero_optimization``."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """More options of DeepSpeed's."""
    steps: int = 2
    accumulation: int = 3
    rows: int = 2
    """Rows of one micro-batch on one rank."""
    seq: int = 24
    ragged: bool = False
    """Whether documents end early, so that micro-batches and ranks have unlike numbers of targets."""
    on_meta: bool = False
    lr: float = 1e-2


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    grads: list[dict[str, Tensor]]
    """This rank's part of each gradient at each boundary, before clipping."""
    weights: dict[str, Tensor]
    """This rank's part of each weight at the end."""
    memory: list[RankMemory]


def rows_of(job: Job, step: int, micro: int, rank: int, world: int, vocab: int) -> dict[str, Tensor]:
    """The rank's rows of a micro-batch: the same global rows whatever the number of ranks."""
    first = ((step * job.accumulation + micro) * world + rank) * job.rows
    ids, labels = [], []
    for index in range(first, first + job.rows):
        generator = torch.Generator().manual_seed(1000 + index)
        row = torch.randint(0, vocab, (job.seq + 1,), generator=generator)
        target = row[1:].clone()
        if job.ragged:
            target[random.Random(index).randint(1, job.seq) :] = IGNORE_INDEX
        ids.append(row[:-1])
        labels.append(target)
    return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}


def deepspeed_config(job: Job, stage: int, stages: int = 1) -> DeepSpeedConfig:
    """A configuration in which a model as small as ours has shards, buckets and prefetches as a large one has."""
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero["reduce_bucket_size"] = 2000
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 2000}
    world = dist.get_world_size()
    optimizer = OptimizerOptions()
    run = RunSettings(
        micro_batch=job.rows,
        grad_accum=job.accumulation,
        data_ranks=world // stages,
        world_size=world,
        stages=stages,
        clip=job.options.get("clip", TrainingOptions.clip),
        precision=job.options.get("precision", "fp32"),
        lr=job.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        device="cpu",
    )
    return resolve({"zero_optimization": zero | job.zero, **job.deepspeed}, run)


def build_engine(job: Job) -> DataParallelEngine:
    config = ModelConfig(**(SMALL | job.model))

    def initialize(module: nn.Module) -> None:
        if isinstance(module, Transformer):
            module.init_buffers()
        init_parameters(module, seed=3, n_layers=config.n_layers)

    with torch.device("meta" if job.on_meta else "cpu"):
        model = Transformer(config)
    if not job.on_meta:
        initialize(model)
    return engine_for(job, model, lambda module, batch: module(**batch), initialize)


def engine_for(
    job: Job,
    model: nn.Module,
    loss_sum: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    initialize: Callable[[nn.Module], None] | None = None,
) -> DataParallelEngine:
    """The job's engine, for any model."""
    name, _, stage = job.engine.partition(", ZeRO ")
    stages = stages_of(job, model)
    options = {"optimizer": OptimizerOptions(lr=job.lr, warmup_steps=0)} | job.options
    if stage:
        options = {"deepspeed": deepspeed_config(job, int(stage), len(stages) or 1)} | options
    engine = ENGINES[name](TrainingOptions(**options), torch.device("cpu"), loss_sum, initialize=initialize)
    engine.prepare(model, make_plan(model, job.policy, stages=stages))
    return engine


def stages_of(job: Job, model: nn.Module) -> Stages:
    """Two stages for a pipeline, else none."""
    return partition(layers_of(model), model, 2, "uniform") if job.engine.startswith("deepspeed_pipe") else ()


def local_grads(engine: DataParallelEngine) -> dict[str, Tensor]:
    found = {name: zero.local_grad(p) for name, p in named_parameters(engine.model)}
    local = {name: local_tensor(grad) for name, grad in found.items() if grad is not None}
    return {name: grad.detach().clone() for name, grad in local.items() if grad.numel()}


def whole_grads(engine: DataParallelEngine) -> dict[str, Tensor]:
    """Unsharded gradients (of DDP, FSDP2 and DeepSpeed), on every rank."""
    found = {}
    for name, parameter in named_parameters(engine.model):
        if zero.is_engine(engine.model):
            from deepspeed.utils import safe_get_full_grad

            grad = safe_get_full_grad(parameter)
        else:
            grad = parameter.grad
        assert grad is not None, name
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return found


class Boundary:
    """Calls back at each boundary, before gradients are clipped."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.boundary = call

    def forward_ended(self, root: Tensor) -> None:
        """Nothing to note."""

    def backward_ended(self) -> None:
        """Nothing to note."""


def train(
    rank: int,
    world: int,
    job: Job,
    grads_of: Callable[[DataParallelEngine], dict[str, Tensor]] = local_grads,
) -> Outcome:
    """Runs a job on this rank."""
    torch._dynamo.reset()  # a long-lived rank would reach the compiler's limit and go on uncompiled, with other dropout
    engine = build_engine(job)
    torch.manual_seed(100 + rank)
    outcome = Outcome([], [], [], [], {}, [])
    engine.observer = Boundary(lambda: outcome.grads.append(grads_of(engine)))
    vocab = (SMALL | job.model)["vocab_size"]
    for step in range(job.steps):
        here = engine.data_rank, engine.data_ranks
        batches = [rows_of(job, step, m, *here, vocab) for m in range(job.accumulation)]
        result = engine.train_step(batches, measure=True)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.tokens.append(result.tokens)
        assert engine.memory is not None
        outcome.memory.append(engine.memory)
    outcome.weights = {n: local_tensor(p).detach().clone() for n, p in named_parameters(engine.model) if p.numel()}
    engine.close()
    return outcome


def train_all(rank: int, world: int, jobs: list[Job]) -> list[Outcome]:
    """Several jobs in a row, so that a matrix costs one round trip to the ranks."""
    return [train(rank, world, job) for job in jobs]


def train_all_wholly(rank: int, world: int, jobs: list[Job]) -> list[Outcome]:
    """As :func:`train_all`, with whole gradients instead of this rank's."""
    return [train(rank, world, job, grads_of=whole_grads) for job in jobs]
