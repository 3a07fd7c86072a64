"""What no section of a configuration can check alone. Needs no torch, disk or process group."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dist_ckpt.errors import ConfigError
from dist_ckpt.trainer.deepspeed import deepspeed_config

if TYPE_CHECKING:
    from dist_ckpt.trainer.config import Config


def check_sections(config: Config) -> None:
    """Options of different sections that contradict each other.

    Raises:
        ConfigError: the first such pair.
    """
    train, model = config.train, config.model
    if model.kind == "decoder":
        check_model_sizes(config, model.vocab_size, model.max_seq_len)
    if (config.engine.name, train.precision, train.accum_sync) == ("fsdp1", "bf16", "boundary"):
        # FSDP1 keeps unreduced gradients in the dtype it computes in.
        raise ConfigError(
            "train.accum_sync=boundary: engine=fsdp1 with train.precision=bf16 would accumulate micro-batches in "
            "bfloat16; use train.accum_sync=every, train.precision=fp32, engine=fsdp2 or engine=ddp"
        )
    if config.engine.is_deepspeed and train.accum_sync is not None:
        raise ConfigError(
            f"train.accum_sync={train.accum_sync}: engine={config.engine.name} reduces where DeepSpeed's own boundary "
            "logic says; leave it null"
        )
    if (deep := config.report.profile_step) is not None and deep > train.steps:
        raise ConfigError(f"report.profile_step={deep}: the run ends at train.steps={train.steps}")
    if config.report.html and (missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]):
        raise ConfigError(f"report.html=true: needs {' and '.join(missing)}: pip install 'dist_ckpt[report]'")
    if train.resume == "auto" and config.run_dir is None:
        raise ConfigError("train.resume=auto: needs run_dir, the folder to look in; without it each run has a new one")


def check_model_sizes(config: Config, vocab_size: int, max_seq_len: int | None) -> None:
    """Checks rows and tokens against what the model takes.

    Args:
        config: what is asked for.
        vocab_size, max_seq_len: the model's own, which ``model=hf`` reads from a file.

    Raises:
        ConfigError: rows that are too long, or more tokens than the model knows.
    """
    data, seq_len = config.data.kind, config.train.seq_len
    if max_seq_len is not None and seq_len > max_seq_len:
        raise ConfigError(f"train.seq_len={seq_len}: is above model.max_seq_len={max_seq_len}")
    if data in ("stdlib", "text") and vocab_size < 256:
        raise ConfigError(
            f"model.vocab_size={vocab_size}: data={data} has one token per byte, so it must be at least 256; "
            "data=synthetic takes any"
        )


def check(config: Config, world_size: int) -> None:
    """Checks the configuration against the number of ranks; the same on each rank.

    Args:
        config: what is asked for.
        world_size: ranks that are running, 1 without torchrun; a dry run is about ``config.world_size``.

    Raises:
        ConfigError: the first thing that does not fit.
    """
    asked = config.world_size
    if asked is not None and not config.dry_run and asked != world_size:
        raise ConfigError(
            f"world_size={asked}: this run has {_ranks(world_size)}; torchrun --nproc_per_node {asked} starts that "
            "many, dry_run=true plans for them"
        )
    ranks, replicas = config.ranks(world_size), config.engine.replicas
    if ranks % replicas:
        valid = ", ".join(map(str, _divisors(ranks)))
        raise ConfigError(f"engine.replicas={replicas}: must divide the {_ranks(ranks)}; valid: {valid}")
    if ranks % (stages := config.engine.stages):
        raise ConfigError(
            f"engine.stages={stages}: must divide the {_ranks(ranks)}; valid: "
            f"{', '.join(map(str, _divisors(ranks, least=2))) or '(none: start more ranks)'}"
        )
    config.resolved_grad_accum(ranks)
    if config.engine.is_deepspeed:
        deepspeed_config(config, ranks)


def check_batch(config: Config, world_size: int, num_rows: int) -> None:
    """Checks the batch against the data: what one rank reads for an update has to be within an epoch.

    Args:
        config: what is asked for.
        world_size: as in :func:`check`.
        num_rows: training rows per epoch.

    Raises:
        ConfigError: an update needs more.
    """
    micro_batch, accum = config.train.micro_batch, config.resolved_grad_accum(config.ranks(world_size))
    if micro_batch * accum > num_rows:
        parts = f"train.micro_batch={micro_batch}" + f" × {accum} micro-batches per update" * (accum > 1)
        raise ConfigError(
            f"{parts}: more than the {num_rows:,} training rows of an epoch; use at most that many, more data, or "
            "shorter rows (train.seq_len)"
        )


def _divisors(count: int, least: int = 1) -> list[int]:
    return [n for n in range(least, min(count, 4096) + 1) if count % n == 0]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
