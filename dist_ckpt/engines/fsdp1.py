"""Sharded flat parameters: torch's FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from dist_ckpt.engines.base import materialize
from dist_ckpt.engines.torch_engine import TorchEngine
from dist_ckpt.plan import Plan


class FSDP1Engine(TorchEngine):
    """Each rank needs memory for the whole model once, at the start; a model too large for that wants ``fsdp2``."""

    name = "fsdp1"
    default_accum_sync = "every"
    accumulates_unsharded = True
    model: FullyShardedDataParallel

    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        materialize(model, self.device, self._initialize)
        units = {module for name, module in model.named_modules() if name in set(blocks)}
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_id=self.device,  # also on the CPU, where FSDP1 would look for an accelerator
            mixed_precision=bf16 if self.options.precision == "bf16" else None,
            use_orig_params=True,
        )

    def reduction(self, reduce: bool) -> AbstractContextManager[Any]:
        return nullcontext() if reduce else self.model.no_sync()

    def clip_gradients(self, max_norm: float) -> float:
        return float(self.model.clip_grad_norm_(max_norm))

    def refuses(self, plan: Plan) -> list[str]:
        problems = super().refuses(plan)
        if self.options.precision == "bf16" and self.options.accum_sync == "boundary":
            problems.append(
                "fsdp1 accumulates unreduced gradients in bf16: use train.accum_sync=every, train.precision=fp32, or "
                "engine=fsdp2, which accumulates them in fp32"
            )
        return problems
