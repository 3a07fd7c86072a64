"""What the rest of a run says about the things that a DeepSpeed configuration says too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RunSettings:
    """The run's own options, which ``"auto"`` stands for and which the file must not contradict."""

    micro_batch: int
    """Sequences that a rank, or a whole pipeline, processes at a time."""
    grad_accum: int
    """Micro-batches an update."""
    data_ranks: int
    """Ranks that read rows of their own: all of them, or in a pipeline ranks / stages."""
    world_size: int
    stages: int
    """Of the pipeline; 1: there is none."""
    clip: float | None
    """Largest gradient norm; None clips nothing."""
    precision: Literal["fp32", "bf16"]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    device: Literal["cpu", "cuda", "meta"]
    hidden_size: int | None = None
    """Width of the model, of which ``"auto"`` makes the sizes of buckets, as Hugging Face's Trainer does. None: they
    are DeepSpeed's defaults, which are for large models (a bucket of 500,000,000 elements)."""

    def __post_init__(self) -> None:
        assert self.data_ranks * self.stages == self.world_size, "data_ranks is world_size / stages"

    @property
    def global_batch(self) -> int:
        """Sequences an update, over all ranks."""
        return self.micro_batch * self.grad_accum * self.data_ranks


@dataclass(frozen=True)
class Agreement:
    """A key of the file that says the same thing as an option of the run."""

    key: str
    value: Callable[[RunSettings], Any]
    """What the run says, as the file would; ``"auto"`` stands for it."""
    option: Callable[[Any], str]
    """The run's option that says a value of the file."""


def _named(option: str) -> Callable[[Any], str]:
    return lambda value: f"{option}={value}"


AGREEMENTS = (
    Agreement("train_micro_batch_size_per_gpu", lambda run: run.micro_batch, _named("train.micro_batch")),
    Agreement("gradient_accumulation_steps", lambda run: run.grad_accum, _named("train.grad_accum")),
    Agreement("gradient_clipping", lambda run: run.clip or 0.0, lambda value: f"train.clip={value or 'null'}"),
    Agreement(
        "bf16.enabled",
        lambda run: run.precision == "bf16",
        lambda value: f"train.precision={'bf16' if value else 'fp32'}",
    ),
    Agreement("optimizer.params.lr", lambda run: run.lr, _named("train.lr")),
    Agreement(
        "optimizer.params.betas",
        lambda run: list(run.betas),
        lambda value: f"train.beta1={value[0]} train.beta2={value[1]}",
    ),
    Agreement("optimizer.params.eps", lambda run: run.eps, _named("train.optimizer_eps")),
    Agreement("optimizer.params.weight_decay", lambda run: run.weight_decay, _named("train.weight_decay")),
    Agreement("pipeline.stages", lambda run: run.stages, _named("engine.stages")),
)
"""``train_batch_size`` is missing: it is a product of others, and checked as such."""
