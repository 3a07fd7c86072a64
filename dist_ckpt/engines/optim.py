"""The optimizer and its schedule, the same for every engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer

_NO_DECAY = re.compile(
    r"(^|[._])(norm|bias|ln|layernorm|batchnorm)\w*(\.|$)|(^|[._])\w*norm\w*\.weight$", re.IGNORECASE
)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (arXiv:1711.05101) with linear warm-up and cosine decay (arXiv:1608.03983)."""

    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 10
    total_steps: int = 60
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter, by its name in the plain model: not to norms and biases.

    By name, because FSDP1 hands out flat pieces whose number of dimensions says nothing.
    """
    return _NO_DECAY.search(name) is None


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerOptions) -> Optimizer:
    """AdamW with two parameter groups, with and without weight decay, fused where torch can.

    The fused kernel needs no transient memory, the ``foreach`` one as much as the parameters.

    Args:
        parameters: (name in the plain model, parameter); tied ones once.
    """
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    decayed = [p for name, p in trained if decays(name)]
    kept = [p for name, p in trained if not decays(name)]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for _, p in trained)
    # The engine sets the learning rate before each step, so a saved state needs the moments alone.
    return AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=fused,
    )


def learning_rate(step: int, options: OptimizerOptions) -> float:
    """The rate of update ``step`` (from 0): linear up to ``lr`` over the warm-up, then a cosine to ``lr·min_lr_ratio``.

    A pure function of the step, so that nothing about the schedule has to be saved.
    """
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    span = max(options.total_steps - options.warmup_steps, 1)
    progress = min((step - options.warmup_steps) / span, 1.0)
    floor = options.lr * options.min_lr_ratio
    return floor + (options.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
