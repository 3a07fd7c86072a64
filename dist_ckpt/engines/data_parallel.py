"""What the engines share in which every rank runs the whole model on its own rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.batch import Batch, count_targets
from dist_ckpt.engines.base import Engine, StepResult, blocks_if_any, refuse_other_meshes
from dist_ckpt.engines.gradients import LostGradients
from dist_ckpt.errors import EngineError
from dist_ckpt.memory.ledger import Owner, owners_of
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.plan import Plan
from dist_ckpt.wrap.apply import apply_plan
from dist_ckpt.wrap.module import why_uncompiled


class DataParallelEngine(Engine):
    """Engines in which every rank runs the whole model on its own rows."""

    optimizer: Optimizer
    _lost_gradients: LostGradients | None = None

    @abstractmethod
    def _build(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Shards the model, on the device and initialized if it came without memory; sets ``model``, ``optimizer``."""

    @abstractmethod
    def _update(self, loss: float) -> float:
        """Clips, steps and drops the gradients; returns the norm before.

        Args:
            loss: the update's mean, which must be finite for the weights to change.
        """

    def refuses(self, plan: Plan) -> list[str]:
        return super().refuses(plan) + ([f"{self.name} has no pipeline stages"] if plan.stages else [])

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """As every engine.

        What is sharded and compiled are the model's own blocks, whatever blocks the policy names: a policy must not
        change how ranks communicate.
        """
        self._refuse_plan(plan)
        refuse_other_meshes(model)
        blocks = blocks_if_any(model) or plan.blocks
        if self.options.check_gradients and plan.regions:
            self._lost_gradients = LostGradients(model, self._loss_sum)
        apply_plan(model, plan)
        if self.options.compile:
            compile_blocks(model, blocks)
        self._build(model, blocks)
        self.model.train()
        self.meter = MemoryMeter(self.model, owners=self.owners)

    def train_step(self, micro_batches: Sequence[Batch], measure: bool = False) -> StepResult:
        world = dist.get_world_size()
        tokens = self._count_tokens(micro_batches)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with self._micro_batch(is_last):
                with self._autocast():
                    loss = self._loss_sum(self.model, {k: v.to(self.device) for k, v in batch.items()})
                self.meter.after_forward(loss)
                if self.observer is not None:
                    self.observer.forward_ended(loss)
                total += loss.detach()
                self._backward(loss * (world / tokens), is_last)  # engines average over ranks
                if self.observer is not None:
                    self.observer.backward_ended()
            del loss
        if measure:
            self.memory = self.meter.boundary(self.step + 1)
        else:
            self.meter.reset()
        if self.observer is not None:
            self.observer.boundary()
        if self._lost_gradients is not None:
            self._refuse_lost_gradients(self._lost_gradients, micro_batches)
            self._lost_gradients = None
        mean = self._sum_over_ranks(float(total)) / tokens
        rate = self._set_learning_rate(self.optimizer)
        norm = self._update(mean)
        self.step += 1
        return StepResult(mean, norm, tokens, rate)

    @torch.no_grad()
    def eval_loss(self, batches: Iterable[Batch]) -> float:
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in batches:
            with self._autocast():
                total += float(self._loss_sum(self.model, {k: v.to(self.device) for k, v in batch.items()}))
            tokens += count_targets(batch)
        self.model.train()
        return self._sum_over_ranks(total) / max(self._sum_over_ranks(tokens), 1)

    def owners(self) -> Iterator[Owner]:
        return owners_of(self.model, self.optimizer)

    def _count_tokens(self, micro_batches: Sequence[Batch]) -> int:
        """Tokens of the whole update that have a target.

        The divisor has to be known before the first backward: dividing each micro-batch by its own tokens would give
        the tokens of short ones more weight.
        """
        tokens = int(self._sum_over_ranks(sum(count_targets(b) for b in micro_batches)))
        self._refuse_no_targets(tokens)
        return tokens

    def _micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch, of whose backward it is known whether it is the update's last."""
        return nullcontext()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """The backward of one micro-batch, whose loss is weighted already."""
        loss.backward()

    def _refuse_lost_gradients(self, check: LostGradients, micro_batches: Sequence[Batch]) -> None:
        check.refuse(self.model, micro_batches, self.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        """For engines that keep fp32 weights in the model; the others cast what they gather."""
        return nullcontext()


def compile_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Compiles each block by itself, in place.

    Raises:
        EngineError: the model has no blocks, or one of them must not recompute in compiled code.
    """
    if not blocks:
        raise EngineError("train.compile: compiles block by block, and this model has no list of blocks")
    modules = dict(model.named_modules())
    for name in blocks:
        if problem := why_uncompiled(modules[name]):
            raise EngineError(f"train.compile: {name}: {problem}")
        modules[name].compile()
