"""How the model is sharded and stepped: a file an engine."""

from __future__ import annotations

import types
from collections.abc import Mapping

from dist_ckpt.engines.base import DataParallelEngine, Engine, StepResult, TrainingOptions
from dist_ckpt.engines.ddp import DDPEngine
from dist_ckpt.engines.fsdp1 import FSDP1Engine
from dist_ckpt.engines.fsdp2 import FSDP2Engine

ENGINES: Mapping[str, type[DataParallelEngine]] = types.MappingProxyType(
    {engine.name: engine for engine in (DDPEngine, FSDP1Engine, FSDP2Engine)}
)
"""Engine name to class."""

__all__ = [
    "ENGINES",
    "DDPEngine",
    "DataParallelEngine",
    "Engine",
    "FSDP1Engine",
    "FSDP2Engine",
    "StepResult",
    "TrainingOptions",
]
