"""What the engines share that wrap a model in a class of torch's, and step a torch optimizer themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from torch import nn

from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.engines.optim import build_optimizer
from dist_ckpt.names import named_parameters
from dist_ckpt.states.modules import ModuleSource
from dist_ckpt.states.source import StateSource


class TorchEngine(DataParallelEngine):
    """Engines in which it is ours to say when gradients are reduced, to clip them and to step."""

    default_accum_sync: ClassVar[Literal["every", "boundary"]]
    accumulates_unsharded: ClassVar[bool] = False
    """Whether gradients that wait for the boundary are whole on each rank, though parameters are sharded."""

    @abstractmethod
    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        """The sharded model on the device, its parameters initialised if it came without memory."""

    @abstractmethod
    def reduction(self, reduce: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch whose backward does or does not reduce gradients over ranks."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Clips to a global norm and returns the norm before."""

    def accumulation_cost_bytes(self) -> int:
        waits = self.options.accum_sync == "boundary" and self.accumulates_unsharded
        return 4 * self._trained_numel if waits else 0

    def training_state(self) -> StateSource:
        return ModuleSource(self.model, self.optimizer)

    def _build(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._trained_numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.model = self.shard(model, blocks)
        self.optimizer = build_optimizer(named_parameters(self.model), self.options.optimizer)

    def _micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        every = (self.options.accum_sync or self.default_accum_sync) == "every"
        return self.reduction(every or is_last)

    def _update(self, loss: float) -> float:
        norm = self.clip_gradients(self.options.clip if self.options.clip is not None else float("inf"))
        self._refuse_non_finite(loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
