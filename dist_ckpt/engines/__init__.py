"""How the model is sharded and stepped: a file an engine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from dist_ckpt.compat.deepspeed import load as load_deepspeed
from dist_ckpt.engines.base import Engine, StepResult, TrainingOptions


class _Engines(Mapping[str, type[Engine]]):
    """Engine name to class. A class is imported when it is asked for: DeepSpeed's take seconds, and an extra.

    Raises:
        EngineError: on being asked for one of DeepSpeed's: it is missing, or of a version that is not known here.
    """

    _classes: Mapping[str, str] = MappingProxyType(
        {
            "ddp": "DDPEngine",
            "fsdp1": "FSDP1Engine",
            "fsdp2": "FSDP2Engine",
            "deepspeed": "DeepSpeedEngine",
            "deepspeed_pipe": "PipelineEngine",
        }
    )

    def __getitem__(self, name: str) -> type[Engine]:
        found = self._classes[name]
        if name.startswith("deepspeed"):
            load_deepspeed()  # before anything is started that a missing package would have to end
        engine: type[Engine] = getattr(importlib.import_module(f"dist_ckpt.engines.{name}"), found)
        return engine

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


ENGINES: Mapping[str, type[Engine]] = _Engines()

__all__ = ["ENGINES", "Engine", "StepResult", "TrainingOptions"]
