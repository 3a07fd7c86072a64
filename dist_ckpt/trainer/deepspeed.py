"""What a run tells DeepSpeed: its JSON configuration, checked against the run's own options. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dist_ckpt.deepspeed_config import DeepSpeedConfig, RunSettings, policy_of, read_config, resolve
from dist_ckpt.policy import Policy, policy_from

if TYPE_CHECKING:
    from dist_ckpt.trainer.config import Config


def deepspeed_config(
    config: Config, ranks: int, device: Literal["cpu", "cuda"] | None = None, hidden_size: int | None = None
) -> DeepSpeedConfig:
    """The complete configuration that DeepSpeed gets.

    Args:
        ranks: of the run, or those that a dry run plans for.
        device: where the ranks compute; None as long as nobody has looked for GPUs.
        hidden_size: width of the model, once it is known; of our own decoder the configuration says it.

    Raises:
        ConfigError: everything in the file that is wrong, does nothing, or contradicts the run.
    """
    train, engine = config.train, config.engine
    run = RunSettings(
        micro_batch=train.micro_batch,
        grad_accum=config.resolved_grad_accum(ranks),
        data_ranks=config.data_ranks(ranks),
        world_size=ranks,
        stages=engine.stages,
        clip=train.clip,
        precision="bf16" if train.precision == "bf16" else "fp32",
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.optimizer_eps,
        weight_decay=train.weight_decay,
        device=device or ("cpu" if config.device.type == "cpu" else "cuda"),
        hidden_size=hidden_size or (config.model.d_model if config.model.kind == "decoder" else None),
    )
    return resolve(_given(config), run, engine.config)


def asked_policy(config: Config, num_blocks: int) -> Policy:
    """The run's policy: ``ckpt``, what DeepSpeed's configuration asks for, or the one inside the other.

    Args:
        num_blocks: of the model.

    Raises:
        ConfigError: both say what to recompute, and cannot be nested.
    """
    if not config.engine.is_deepspeed:
        return config.ckpt
    found = policy_of(_given(config), num_blocks, config.ckpt.to_dict(), config.engine.config)
    return config.ckpt if found is None else policy_from(found)


def _given(config: Config) -> dict[str, Any]:
    """The configuration as the user has it, or the usual one."""
    if config.engine.config is not None:
        return read_config(config.engine.config)
    stage = 2 if config.engine.stages == 1 else 1
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}
