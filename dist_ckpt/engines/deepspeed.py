"""DeepSpeed's ZeRO: what is sharded, offloaded and how it is communicated is what its configuration says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from dist_ckpt.errors import EngineError
from dist_ckpt.guards.accumulation import guard_accumulation
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.states.deepspeed import DeepSpeedSource
from dist_ckpt.states.source import StateSource


class DeepSpeedEngine(DataParallelEngine):
    """ZeRO stages 0 to 3. The optimizer is ours, so that an update means the same as under other engines."""

    name = "deepspeed"
    default_accum_sync = "boundary"
    model: Any
    """DeepSpeed's own engine."""

    def refuses(self, plan: Plan) -> list[str]:
        config, options = self.options.deepspeed, self.options
        problems = super().refuses(plan)
        if options.accum_sync is not None:
            problems.append(
                f"train.accum_sync={options.accum_sync} is an option of ddp, fsdp1 and fsdp2: when gradients are "
                "reduced follows from the ZeRO stage"
            )
        if config is None:
            return [*problems, "engine=deepspeed needs a configuration: engine.config"]
        if options.compile and config.stage == 3:
            problems.append("train.compile: ZeRO-3 gathers parameters in hooks that compiled code does not run")
        return problems

    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        config = self._config
        compat.start(self.device)
        # ZeRO-3 takes parameters from the host one by one.
        materialize(model, torch.device("cpu") if config.stage == 3 else self.device, self._initialize)
        self._reached = Reached(model) if self._lost_gradients is not None else None
        self.optimizer = build_optimizer(named_parameters(model), self.options.optimizer)
        engine = compat.build(model, self.optimizer, config.data, self.device)
        guard_accumulation(engine)
        self._norm: float | None = None
        if zero.keeps_no_norm(engine):
            engine.clip_fp32_gradients = functools.partial(self._clip_whole_gradients, engine)
        return engine

    def reduction(self, reduce: bool) -> AbstractContextManager[Any]:
        """DeepSpeed's own: it counts micro-batches."""
        return nullcontext()

    def clip_gradients(self, max_norm: float) -> float:
        raise AssertionError("DeepSpeed clips in its step")

    def training_state(self) -> StateSource:
        return DeepSpeedSource(self.model)

    def close(self) -> None:
        compat.close(self.model)

    @property
    def _config(self) -> Any:
        assert self.options.deepspeed is not None, "refused before"
        return self.options.deepspeed

    def _build(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.model = self.shard(model, blocks)

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

    def _clip_whole_gradients(self, engine: Any) -> None:
        """What DeepSpeed calls before the step where no optimizer of its own does it and keeps the norm."""
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())
        self._norm = float(norm)
        self._refuse_non_finite(0.0, self._norm)
