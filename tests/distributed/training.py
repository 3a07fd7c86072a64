"""Short trainings for distributed tests: what a rank computes, as plain numbers that travel between processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.engines.optim import OptimizerOptions
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

SMALL = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 61}
"""Sizes that no number of ranks divides evenly, so that padding is always exercised."""


@dataclass(frozen=True)
class Job:
    """One training: what is built and what is fed."""

    engine: str = "fsdp2"
    policy: Any = "none"
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
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


def build_engine(job: Job) -> DataParallelEngine:
    config = ModelConfig(**(SMALL | job.model))

    def initialize(module: nn.Module) -> None:
        if isinstance(module, Transformer):
            module.init_buffers()
        init_parameters(module, seed=3, n_layers=config.n_layers)

    options = TrainingOptions(**({"optimizer": OptimizerOptions(lr=job.lr, warmup_steps=0)} | job.options))
    engine = ENGINES[job.engine](
        options, torch.device("cpu"), lambda model, batch: model(**batch), initialize=initialize
    )
    with torch.device("meta" if job.on_meta else "cpu"):
        model = Transformer(config)
    if not job.on_meta:
        initialize(model)
    engine.prepare(model, make_plan(model, job.policy))
    return engine


def local_grads(engine: DataParallelEngine) -> dict[str, Tensor]:
    named = named_parameters(engine.model)
    return {n: local_tensor(p.grad).detach().clone() for n, p in named if p.grad is not None and p.grad.numel()}


def whole_grads(engine: DataParallelEngine) -> dict[str, Tensor]:
    """Unsharded gradients (DDP and FSDP2), on every rank."""
    found = {}
    for name, parameter in named_parameters(engine.model):
        grad = parameter.grad
        assert grad is not None, name
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return found


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
    clip = engine.clip_gradients

    def snapshot(max_norm: float) -> float:
        outcome.grads.append(grads_of(engine))
        return clip(max_norm)

    engine.clip_gradients = snapshot  # type: ignore[method-assign]
    vocab = engine.model.config.vocab_size if hasattr(engine.model, "config") else SMALL["vocab_size"]
    for step in range(job.steps):
        batches = [rows_of(job, step, m, rank, world, vocab) for m in range(job.accumulation)]
        result = engine.train_step(batches, measure=True)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.tokens.append(result.tokens)
        assert engine.memory is not None
        outcome.memory.append(engine.memory)
    outcome.weights = {n: local_tensor(p).detach().clone() for n, p in named_parameters(engine.model) if p.numel()}
    return outcome


def train_all(rank: int, world: int, jobs: list[Job]) -> list[Outcome]:
    """Several jobs in a row, so that a matrix costs one round trip to the ranks."""
    return [train(rank, world, job) for job in jobs]
