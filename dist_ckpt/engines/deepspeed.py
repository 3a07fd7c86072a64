"""DeepSpeed's ZeRO: what is sharded, offloaded and how it is communicated is what its configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.compat import zero
from dist_ckpt.engines.base import materialize
from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.engines.gradients import LostGradients
from dist_ckpt.engines.optim import build_optimizer
from dist_ckpt.engines.reached import Reached
from dist_ckpt.engines.told import ToldEngine
from dist_ckpt.errors import EngineError
from dist_ckpt.guards.accumulation import guard_accumulation
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.states.deepspeed import DeepSpeedSource
from dist_ckpt.states.source import StateSource


class DeepSpeedEngine(ToldEngine, DataParallelEngine):
    """ZeRO stages 0 to 3. The optimizer is ours, so that an update means the same as under other engines."""

    name = "deepspeed"
    model: Any
    """DeepSpeed's own engine."""
    _reached: Reached | None = None
    _norm: float | None = None
    """Of the last update, where DeepSpeed has none to show."""

    def refuses(self, plan: Plan) -> list[str]:
        config, problems = self.options.deepspeed, super().refuses(plan)
        if config is not None and config.stage == 3 and self.options.compile:
            problems.append("train.compile: ZeRO-3 gathers parameters in hooks that compiled code does not run")
        return problems

    def training_state(self) -> StateSource:
        return DeepSpeedSource(self.model)

    def close(self) -> None:
        compat.close(self.model)

    def _build(self, model: nn.Module, blocks: Sequence[str]) -> None:
        config = self._config
        compat.start(self.device)
        # ZeRO-3 takes parameters from the host one by one.
        materialize(model, torch.device("cpu") if config.stage == 3 else self.device, self._initialize)
        self._reached = Reached(model) if self._lost_gradients is not None else None
        self.optimizer = build_optimizer(named_parameters(model), self.options.optimizer)
        self.model = compat.build(model, self.optimizer, config.as_dict(), self.device)
        guard_accumulation(self.model)
        if zero.keeps_no_norm(self.model):
            zero.clip_by(self.model, self._clip_whole_gradients)

    def _count_tokens(self, micro_batches: Sequence[Batch]) -> int:
        """As elsewhere.

        Raises:
            EngineError: on every rank: one of them has another number of micro-batches than DeepSpeed counts to.
        """
        expected = self.model.gradient_accumulation_steps()
        if self._sum_over_ranks(len(micro_batches) != expected):
            counts = [0] * dist.get_world_size()
            dist.all_gather_object(counts, len(micro_batches))
            given = ", ".join(map(str, sorted(set(counts))))
            raise EngineError(
                f"step {self.step + 1}: DeepSpeed was told {expected} micro-batches an update, and given {given}: set "
                "train.grad_accum (gradient_accumulation_steps) to what each rank trains on"
            )
        return super()._count_tokens(micro_batches)

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        with compat.forwards_forgotten():
            self.model.backward(loss, scale_wrt_gas=False)  # the loss is weighted already
        if not is_last:
            self.model.step()  # counts a micro-batch, no more

    def _refuse_lost_gradients(self, check: LostGradients, micro_batches: Sequence[Batch]) -> None:
        assert self._reached is not None
        check.refuse(self.model, micro_batches, self.device, with_gradient=self._reached.names)
        self._reached.close()
        self._reached = None

    def _update(self, loss: float) -> float:
        self._refuse_non_finite(loss, 0.0)
        self.model.step()
        norm = self._norm if self._norm is not None else float(self.model.get_global_grad_norm())
        if not self.model.was_step_applied():  # the weights are as before
            self._refuse_non_finite(loss, float("inf"))
        return norm

    def _clip_whole_gradients(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.module.parameters(), self.model.gradient_clipping())
        self._norm = float(norm)
        self._refuse_non_finite(0.0, self._norm)
