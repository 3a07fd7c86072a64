"""What types cannot say: ranges, and options that have to fit together. Needs no torch, disk or ranks."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from dist_ckpt.errors import ConfigError, choices

if TYPE_CHECKING:
    from dist_ckpt.trainer.config import Config, TrainConfig


def check(config: Config, world_size: int) -> None:
    """Every check there is, before any process group exists; the same on each rank.

    Args:
        config: what is asked for.
        world_size: ranks that are running, 1 without torchrun; a dry run is about ``config.world_size``.

    Raises:
        ConfigError: the first thing that does not fit.
    """
    check_values(config)
    asked = config.world_size
    if asked is not None and not config.dry_run and asked != world_size:
        raise ConfigError(
            f"world_size={asked}: this run has {_ranks(world_size)}; torchrun --nproc_per_node {asked} "
            "starts as many, dry_run=true plans for them"
        )
    ranks = config.ranks(world_size)
    replicas = config.engine.replicas
    if ranks % replicas:
        divisors = [n for n in range(1, min(ranks, 4096) + 1) if ranks % n == 0]
        raise ConfigError(
            f"engine.replicas={replicas}: must divide the {_ranks(ranks)}; valid: {', '.join(map(str, divisors))}"
        )
    config.resolved_grad_accum(ranks)


def check_values(config: Config) -> None:
    """The checks that need no number of ranks.

    Raises:
        ConfigError: the first thing that does not fit.
    """
    _check_train(config.train)
    _at_least("engine.replicas", config.engine.replicas, 1)
    if config.engine.replicas > 1 and config.engine.name != "fsdp2":
        raise ConfigError(
            f"engine.replicas={config.engine.replicas}: no option of engine={config.engine.name}, only of engine=fsdp2"
        )
    config.model.check()
    if config.train.seq_len > config.model.max_seq_len:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len}: is above model.max_seq_len={config.model.max_seq_len}"
        )
    if config.data.kind in ("stdlib", "text") and config.model.vocab_size < 256:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: data={config.data.kind} has a token for each byte, "
            "so it must be at least 256; data=synthetic takes any"
        )
    _at_least("report.every", config.report.every, 1)
    if config.run_dir is not None and not config.run_dir.strip():
        raise ConfigError("run_dir: is empty; name a folder, or null for a new one")
    if config.world_size is not None:
        _at_least("world_size", config.world_size, 1)
    if config.train.resume == "auto" and config.run_dir is None:
        raise ConfigError("train.resume=auto: needs run_dir, the folder to look in; without it each run has a new one")


def _check_train(train: TrainConfig) -> None:
    for name in ("steps", "micro_batch", "grad_accum", "global_batch", "seq_len", "keep", "eval_batches"):
        value = getattr(train, name)
        if value is not None:
            _at_least(f"train.{name}", value, 1)
    for name in ("warmup_steps", "save_every", "eval_every", "seed", "weight_decay"):
        _at_least(f"train.{name}", getattr(train, name), 0)
    for name in ("lr", "optimizer_eps"):
        if getattr(train, name) <= 0:
            raise ConfigError(f"train.{name}={getattr(train, name)}: must be above 0")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(train, name) < 1:
            raise ConfigError(f"train.{name}={getattr(train, name)}: must be at least 0 and below 1")
    if not 0 <= train.min_lr_ratio <= 1:
        raise ConfigError(f"train.min_lr_ratio={train.min_lr_ratio}: must be between 0 and 1")
    if train.clip is not None and train.clip <= 0:
        raise ConfigError(f"train.clip={train.clip}: must be above 0, or null for no clipping")
    if train.seed >= 2**32:
        raise ConfigError(f"train.seed={train.seed}: must be below 2**32")
    if train.resume not in (None, "auto") and not re.fullmatch(r"step_\d+", PurePath(train.resume).name):
        raise ConfigError(
            f"train.resume={train.resume}: is no step_N folder; {choices(train.resume, ('auto', 'null'))}, "
            "or the path of one, such as outputs/mine/states/step_40"
        )


def _at_least(where: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(f"{where}={value}: must be at least {least}")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
