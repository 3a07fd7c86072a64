"""How the model is sharded and stepped: a file an engine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from dist_ckpt.engines.base import Engine, StepResult, TrainingOptions
from dist_ckpt.errors import ConfigError


class _Engines(Mapping[str, type[Engine]]):
    """Engine name to class. A class is imported when it is asked for: DeepSpeed's take seconds, and an extra."""

    _classes: Mapping[str, str] = {
        "ddp": "DDPEngine",
        "fsdp1": "FSDP1Engine",
        "fsdp2": "FSDP2Engine",
        "deepspeed": "DeepSpeedEngine",
        "deepspeed_pipe": "PipelineEngine",
    }

    def __getitem__(self, name: str) -> type[Engine]:
        found = self._classes[name]
        try:
            engine: type[Engine] = getattr(importlib.import_module(f"dist_ckpt.engines.{name}"), found)
        except ModuleNotFoundError as error:
            if error.name != "deepspeed":
                raise
            raise ConfigError(
                f"engine={name}: needs the package deepspeed: pip install 'dist_ckpt[deepspeed]'"
            ) from error
        return engine

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


ENGINES: Mapping[str, type[Engine]] = _Engines()

__all__ = ["ENGINES", "Engine", "StepResult", "TrainingOptions"]
