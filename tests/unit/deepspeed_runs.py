"""Runs, and pieces of DeepSpeed configurations for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from dist_ckpt.deepspeed_config import RunSettings

RUN = RunSettings(
    micro_batch=4,
    grad_accum=2,
    data_ranks=2,
    world_size=2,
    stages=1,
    clip=1.0,
    precision="fp32",
    lr=3e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    device="cpu",
)
BF16 = dataclasses.replace(RUN, precision="bf16")
PIPE = dataclasses.replace(RUN, world_size=8, stages=4)


def zero(stage: Any, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def optimizer(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}
