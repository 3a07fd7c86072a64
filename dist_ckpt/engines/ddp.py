"""Replicated parameters: torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt.engines.base import materialize
from dist_ckpt.engines.torch_engine import TorchEngine

_SYNC_BUFFERS = next(  # renamed in torch 2.13
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class DDPEngine(TorchEngine):
    """Every rank holds the whole model; gradients are reduced once an update."""

    name = "ddp"
    default_accum_sync = "boundary"
    model: DistributedDataParallel

    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        materialize(model, self.device, self._initialize)
        # With gradients as views of the buckets these are no second copy, and every byte has an owner.
        # Buffers that are no part of the state (rotary tables) are equal on all ranks, so none are sent each forward.
        persistent = any(m._buffers.keys() - m._non_persistent_buffers_set for m in model.modules())
        sync = {_SYNC_BUFFERS: persistent}
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **sync)  # type: ignore[arg-type]

    def reduction(self, reduce: bool) -> AbstractContextManager[Any]:
        return nullcontext() if reduce else self.model.no_sync()

    def clip_gradients(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")
