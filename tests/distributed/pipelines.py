"""Short trainings of pipelines for distributed tests, and the same trainings in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.batch import Batch, count_targets
from dist_ckpt.deepspeed_config import RunSettings, resolve
from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.optim import OptimizerOptions, build_optimizer, learning_rate
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.planning import make_plan
from dist_ckpt.stages import LayerList, layers_of, partition
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from tests.distributed.training import Job as Rows
from tests.distributed.training import rows_of

SIZES = {"n_layers": 6, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 61}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


@dataclass(frozen=True)
class Pipe:
    """One training of a pipeline."""

    stages: int = 2
    gas: int = 2
    """Micro-batches an update."""
    zero: int = 0
    policy: Any = "none"
    model: Any = field(default_factory=dict)
    """Options of our transformer; or a module-level function that makes another model, the same on each call."""
    layers: Callable[[nn.Module], LayerList] = layers_of
    loss_sum: Callable[[nn.Module, Batch], Tensor] = own_loss
    precision: str = "fp32"
    clip: float | None = None
    steps: int = 3
    lr: float = 1e-2
    eps: float = 1e-8
    partition: Any = "uniform"
    check_gradients: bool = True


@dataclass
class Outcome:
    """What one rank saw."""

    stage: int
    losses: list[float]
    norms: list[float]
    tokens: list[int]
    weights: dict[str, Tensor]
    memory: RankMemory | None


def make_model(pipe: Pipe) -> nn.Module:
    """Our transformer without memory, or another model with its own."""
    if callable(pipe.model):
        made: nn.Module = pipe.model()
        return made
    with torch.device("meta"):
        return Transformer(ModelConfig(**(SIZES | pipe.model)))


def initialize(model: nn.Module) -> None:
    if isinstance(model, Transformer):
        model.init_buffers()
    init_parameters(model, seed=3, n_layers=6)


def options_of(pipe: Pipe, world: int) -> TrainingOptions:
    optimizer = OptimizerOptions(lr=pipe.lr, warmup_steps=0, eps=pipe.eps)
    run = RunSettings(
        micro_batch=2,
        grad_accum=pipe.gas,
        data_ranks=world // pipe.stages,
        world_size=world,
        stages=pipe.stages,
        clip=pipe.clip,
        precision=pipe.precision,  # type: ignore[arg-type]
        lr=pipe.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=pipe.eps,
        weight_decay=optimizer.weight_decay,
        device="cpu",
    )
    config = resolve(
        {"zero_optimization": {"stage": pipe.zero} | ({"reduce_bucket_size": 5000} if pipe.zero else {})}, run
    )
    return TrainingOptions(
        precision=pipe.precision,  # type: ignore[arg-type]
        clip=pipe.clip,
        layers=pipe.layers,
        deepspeed=config,
        allow_untested=True,
        optimizer=optimizer,
        check_gradients=pipe.check_gradients,
    )


def rows(step: int, micro: int, data_rank: int, data_ranks: int, gas: int, seq: int = 24, vocab: int = 61) -> Batch:
    return rows_of(Rows(accumulation=gas, ragged=True, seq=seq), step, micro, data_rank, data_ranks, vocab)


@contextlib.contextmanager
def prepared(world: int, pipe: Pipe, model: nn.Module | None = None) -> Iterator[Any]:
    """The engine of a training, which ends with the block."""
    model = make_model(pipe) if model is None else model
    engine = ENGINES["deepspeed_pipe"](options_of(pipe, world), torch.device("cpu"), pipe.loss_sum, initialize)
    engine.prepare(
        model, make_plan(model, pipe.policy, stages=partition(pipe.layers(model), model, pipe.stages, pipe.partition))
    )
    try:
        yield engine
    finally:
        engine.close()


def train_pipe(rank: int, world: int, pipe: Pipe) -> Outcome:
    with prepared(world, pipe) as engine:
        torch.manual_seed(100 + rank)
        results = []
        for step in range(pipe.steps):
            micro_batches = [rows(step, m, engine.data_rank, engine.data_ranks, pipe.gas) for m in range(pipe.gas)]
            results.append(engine.train_step(micro_batches, measure=True))
        return Outcome(
            engine.stage,
            [r.loss for r in results],
            [r.grad_norm for r in results],
            [r.tokens for r in results],
            {name: p.detach().float().clone() for name, p in named_parameters(engine.model)},
            engine.memory,
        )


def train_pipes(rank: int, world: int, pipes: Sequence[Pipe]) -> list[Outcome]:
    """Several trainings in a row: starting DeepSpeed costs more than each of them."""
    return [train_pipe(rank, world, pipe) for pipe in pipes]


def serial(pipe: Pipe, data_ranks: int = 1) -> Outcome:
    """The same training in this process, in plain PyTorch and without a plan."""
    model = make_model(pipe)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
        if isinstance(model, Transformer) and model.config.tied:
            model.output.weight = model.tok_embeddings.weight
        initialize(model)
    options = OptimizerOptions(lr=pipe.lr, warmup_steps=0, eps=pipe.eps)
    optimizer = build_optimizer(named_parameters(model), options)
    outcome = Outcome(0, [], [], [], {}, None)
    for step in range(pipe.steps):
        batches = [rows(step, m, r, data_ranks, pipe.gas) for m in range(pipe.gas) for r in range(data_ranks)]
        tokens = sum(map(count_targets, batches))
        total = 0.0
        for batch in batches:
            loss = pipe.loss_sum(model, batch)
            total += float(loss.detach())
            (loss * (1 / tokens)).backward()
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), pipe.clip or float("inf"))))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(total / tokens)
        outcome.tokens.append(tokens)
    outcome.weights = {name: p.detach().clone() for name, p in named_parameters(model)}
    return outcome


def distance(outcomes: Sequence[Outcome], expected: Outcome) -> float:
    """The largest difference of any weight; every weight must be on some rank."""
    assert {name for outcome in outcomes for name in outcome.weights} == expected.weights.keys()
    return max(
        float((weight - expected.weights[name]).abs().max())
        for outcome in outcomes
        for name, weight in outcome.weights.items()
    )


def with_policies(pipe: Pipe, policies: Sequence[Any]) -> list[Pipe]:
    return [dataclasses.replace(pipe, policy=policy) for policy in policies]
