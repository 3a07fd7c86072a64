"""From what a user wrote to what DeepSpeed gets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dist_ckpt.deepspeed_config.rules import REMARKS, RULES
from dist_ckpt.deepspeed_config.run import RunSettings
from dist_ckpt.deepspeed_config.schema import SCHEMA
from dist_ckpt.deepspeed_config.walk import Walk, at, is_stage, listed
from dist_ckpt.errors import ConfigError

BUCKETS: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
"""Elements that ``"auto"`` stands for, by the width of the model: transformers/integrations/deepspeed.py."""

_PASSED_ON = (
    "communication_data_type",
    "data_types",
    "dump_state",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "timers",
)


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What DeepSpeed is told; made by :func:`resolve`."""

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


def resolve(data: Mapping[str, Any], run: RunSettings, path: str | None = None) -> DeepSpeedConfig:
    """Checks a configuration against DeepSpeed's keys and the run, and completes it.

    Args:
        data: as :func:`~dist_ckpt.deepspeed_config.read_config` gives it.
        path: the file, for messages.

    Raises:
        ConfigError: everything that is wrong, a line each.
    """
    given = at(data, "zero_optimization.stage")
    stage = given if is_stage(given) else None if "zero_optimization" in data else 0
    walk = Walk(SCHEMA, stage)
    taken = walk.taken(data)
    problems = walk.problems + [problem for rule in RULES for problem in rule(taken, run)]
    if problems:
        raise ConfigError(listed(problems, path))
    assert stage is not None, "a configuration without problems has a stage"
    notes = walk.notes + [remark for rule in REMARKS for remark in rule(taken, run)]
    return DeepSpeedConfig(_complete(taken, stage, run), stage, run.precision, path, tuple(notes))


def _complete(taken: Mapping[str, Any], stage: int, run: RunSettings) -> dict[str, Any]:
    passed = {name: taken[name] for name in _PASSED_ON if name in taken}
    if "steps_per_print" not in passed:
        # DeepSpeed's throughput timer would wait for the device in every step, and log nothing.
        passed.setdefault("timers", {"throughput": {"enabled": False}})
    result = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.grad_accum,
        # Without it DeepSpeed clips at 1.0, and 0 leaves some engines without a norm.
        "gradient_clipping": math.inf if run.clip is None else run.clip,
        "zero_optimization": _zero(taken.get("zero_optimization", {"stage": stage}), run),
        # ZeRO 1 and 2 leave the weights alone where the norm is not finite, and the engine then stops every rank.
        "bf16": {"enabled": run.precision == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": taken.get("wall_clock_breakdown", False),
        **_without_auto(passed),
    }
    if run.stages > 1:  # a plan recomputes, not the pipeline
        result["pipeline"] = {"activation_checkpoint_interval": 0, "use_reentrant": False}
    return result


def _zero(section: Mapping[str, Any], run: RunSettings) -> dict[str, Any]:
    """With the sizes that ``"auto"`` stands for; the other ``"auto"`` are DeepSpeed's defaults."""
    sizes = {name: size(run.hidden_size) for name, size in BUCKETS.items()} if run.hidden_size is not None else {}
    return _without_auto(
        {name: sizes.get(name, value) if value == "auto" else value for name, value in section.items()}
    )


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in section.items()
        if not (isinstance(value, str) and value == "auto")
    }
