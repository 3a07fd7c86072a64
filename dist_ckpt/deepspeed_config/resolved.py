"""A configuration that is complete: what an engine gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dist_ckpt.deepspeed_config.walk import at


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What DeepSpeed is told; made by :func:`~dist_ckpt.deepspeed_config.resolve`."""

    data: Mapping[str, Any]
    """Complete: no ``"auto"``, batch sizes, clipping (``inf`` where nothing is clipped) and precision explicit, no
    optimizer (torch's AdamW is passed as the client's) and no activation checkpointing (a plan does it)."""
    stage: int
    """Of ZeRO."""
    precision: Literal["fp32", "bf16"]
    path: str | None = None
    """The file; None for a configuration that was not read from one."""
    notes: tuple[str, ...] = ()
    """What the file asks for and the run does in another way, or without gain; to be said once."""

    def as_dict(self) -> dict[str, Any]:
        """A copy of ``data`` for ``deepspeed.initialize``, which changes what it is given."""
        return copy.deepcopy(dict(self.data))

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states and their gradients lie in host memory."""
        return at(self.data, "zero_optimization.offload_optimizer.device") == "cpu"

    @property
    def offloads_params(self) -> bool:
        """Whether shards of parameters lie in host memory."""
        return at(self.data, "zero_optimization.offload_param.device") == "cpu"

    @property
    def accumulation(self) -> Literal["fp32", "bf16"]:
        """Number format in which gradients are accumulated over micro-batches."""
        return at(self.data, "data_types.grad_accum_dtype") or self.precision

    @property
    def hpz_size(self) -> int:
        """Ranks that hold a whole second copy of the weights between them; 1: there is none."""
        return at(self.data, "zero_optimization.zero_hpz_partition_size") or 1

    @property
    def memory_efficient_linear(self) -> bool:
        """Whether DeepSpeed replaces ``torch.nn.functional.linear``, as it does at stage 3 unless told not to."""
        return self.stage == 3 and at(self.data, "zero_optimization.memory_efficient_linear") is not False
