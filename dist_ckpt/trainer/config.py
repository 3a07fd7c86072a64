"""Everything that a training run can be told, as typed dataclasses, and how they are read and written."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dist_ckpt.errors import ConfigError
from dist_ckpt.policy import POLICIES, NoPolicy, Policy
from dist_ckpt.trainer.checks import check_values
from dist_ckpt.trainer.data.config import DataConfig
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.overrides import compose_overrides, parse_yaml
from dist_ckpt.trainer.typed import build, leaves


class Choice(str, Enum):
    """A value with a fixed set of names. It compares, prints and formats as its name."""

    def __str__(self) -> str:
        return str(self.value)


class Precision(Choice):
    """Numbers that forward and backward compute with; weights, optimizer and reductions are fp32 in both."""

    fp32 = "fp32"
    bf16 = "bf16"


class AccumSync(Choice):
    """When the ranks reduce gradients that are accumulated over several micro-batches."""

    every = "every"
    """After each micro-batch: under FSDP gradients stay sharded."""
    boundary = "boundary"
    """Once per update: less traffic, but under FSDP each rank holds whole gradients until then."""


class EngineName(Choice):
    """How the model is sharded and stepped."""

    ddp = "ddp"
    fsdp1 = "fsdp1"
    fsdp2 = "fsdp2"


class DeviceType(Choice):
    """Where the ranks compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TrainConfig:
    """Batches, optimizer, precision, saving and evaluation."""

    steps: int = 60
    """Updates of the weights."""
    micro_batch: int = 4
    """Sequences that a rank works on at a time; activation memory grows with it."""
    grad_accum: int | None = None
    """Micro-batches per update on each rank. null: 1, or what ``global_batch`` asks for."""
    global_batch: int | None = None
    """Sequences per update over all ranks. null: micro_batch · ranks · grad_accum."""
    seq_len: int = 128
    """Tokens a row; at most ``model.max_seq_len``."""
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    min_lr_ratio: float = 0.1
    """Share of ``lr`` that the cosine ends at."""
    warmup_steps: int = 10
    """Updates over which the learning rate rises linearly."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay; norms and other parameters without decay are left out."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    optimizer_eps: float = 1e-8
    """Added to the root of the latter."""
    clip: float | None = 1.0
    """Largest global gradient norm. null: no clipping."""
    seed: int = 0
    """Of initial weights, the order of the data and dropout."""
    precision: Precision = Precision.fp32
    compile: bool = False
    """Whether the model is compiled by ``torch.compile``."""
    save_every: int = 0
    """Updates between saved training states, and one at the end. 0: only after a SIGTERM."""
    keep: int = 2
    """Newest training states that are kept; older ones are removed."""
    resume: str | None = None
    """``auto``: the newest complete training state of ``run_dir``, if any; or a ``step_N`` folder's path."""
    eval_every: int = 0
    """Updates between validations. 0: none."""
    eval_batches: int = 4
    """Micro-batches on each rank per validation."""
    accum_sync: AccumSync | None = None
    """null: ``boundary`` for ddp, ``every`` for fsdp1 and fsdp2."""


@dataclass
class EngineConfig:
    """How the model is sharded and stepped."""

    name: EngineName = EngineName.fsdp2
    """Set by the group: ``engine=ddp``."""
    replicas: int = 1
    """fsdp2: groups of ranks, each with the whole model, sharded inside it (HSDP); divides the ranks."""


@dataclass
class DeviceConfig:
    """Where the ranks compute."""

    type: DeviceType = DeviceType.auto
    """Set by the group: ``device=cpu``."""


@dataclass
class ReportConfig:
    """What a run says about memory."""

    every: int = 1
    """Updates between memory reports of all ranks."""


@dataclass
class Config:
    """A whole run. :func:`load_config` makes one; :func:`~dist_ckpt.trainer.checks.check` knows ranks."""

    train: TrainConfig = field(default_factory=TrainConfig)
    ckpt: Policy = field(default_factory=NoPolicy)
    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    run_dir: str | None = None
    """Folder that the run writes to. null: a new one, ``outputs/<time>-<engine>-<ckpt>``."""
    dry_run: bool = False
    """Print the plan and what it costs; start nothing."""
    world_size: int | None = None
    """Ranks to plan for with ``dry_run``. In a run torchrun gives it, and another number is an error."""

    def ranks(self, world_size: int) -> int:
        """Ranks that this configuration is about; a dry run's may differ from the ``world_size`` running."""
        return self.world_size if self.dry_run and self.world_size is not None else world_size

    def resolved_grad_accum(self, world_size: int) -> int:
        """Micro-batches per update on each of ``world_size`` ranks.

        Raises:
            ConfigError: ``global_batch`` is no whole number of micro-batches or contradicts ``grad_accum``.
        """
        train = self.train
        if train.global_batch is None:
            return 1 if train.grad_accum is None else train.grad_accum
        at_once = train.micro_batch * world_size
        sizes = f"train.micro_batch={train.micro_batch} × {world_size} rank{'s'[: world_size != 1]}"
        given = f"train.global_batch={train.global_batch}"
        accum, rest = divmod(train.global_batch, at_once)
        if rest or accum < 1:
            near = [at_once * n for n in (accum, accum + 1) if n]
            raise ConfigError(
                f"{given}: must be a whole number of {sizes} = {at_once} sequences; "
                f"nearest: {' or '.join(map(str, near))}"
            )
        if train.grad_accum not in (None, accum):
            raise ConfigError(
                f"{given} and train.grad_accum={train.grad_accum} disagree: {sizes} needs "
                f"train.grad_accum={accum} for it; give one of the two"
            )
        return accum

    def resolved_global_batch(self, world_size: int) -> int:
        """Sequences per update over all of ``world_size`` ranks; raises as :meth:`resolved_grad_accum`."""
        return self.train.micro_batch * world_size * self.resolved_grad_accum(world_size)

    def resolved_accum_sync(self) -> AccumSync:
        """``train.accum_sync``, or the engine's default."""
        default = AccumSync.boundary if self.engine.name is EngineName.ddp else AccumSync.every
        return self.train.accum_sync or default


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration that a command line asks for; reads ``configs/``, writes nothing.

    Args:
        overrides: arguments in Hydra's grammar, as people type them: ``+ckpt=every_k``, ``ckpt.k=4``,
            ``engine=ddp``, ``train.lr=1e-3``. ``ckpt=NAME`` and ``+ckpt=NAME`` are the same.

    Raises:
        ConfigError: an argument that cannot be read, an unknown key or group choice, a value of the wrong
            type or out of range, options that do not fit together.
        PlanError: an option that the chosen policy does not have.
    """
    texts = {key for key, hint in leaves(Config).items() if str in hint and not key.startswith("ckpt.")}
    return _config_from(compose_overrides(overrides, texts))


def config_from_yaml(text: str) -> Config:
    """The configuration that :func:`config_yaml` wrote; keys that are left out have their defaults.

    Raises:
        ConfigError: no YAML, or what :func:`load_config` refuses.
        PlanError: an option that the policy does not have.
    """
    return _config_from(parse_yaml(text))


def config_yaml(config: Config) -> str:
    """The whole configuration as YAML, every key; :func:`config_from_yaml` gives an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(_plain(config))))


def _config_from(data: Mapping[str, Any]) -> Config:
    _require_mode(data.get("ckpt"))
    # Merged by hand: OmegaConf's merge would keep the default where a value is "???".
    merged = _merged(_plain(Config()), data)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or "a value"
        raise ConfigError(f"{where}: cannot be resolved: {str(error).splitlines()[0]}") from error
    config = build(Config, typing.cast("dict[str, Any]", resolved))
    check_values(config)
    return config


def _merged(below: dict[str, Any], above: Mapping[Any, Any]) -> dict[str, Any]:
    """``below`` with what ``above`` says instead; neither is changed."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(under, dict) and isinstance(value, Mapping)
        result[key] = _merged(typing.cast("dict[str, Any]", under), value) if both else value
    return result


def _require_mode(ckpt: Any) -> None:
    """Refuses options without a policy: a message about the default one would name what nobody chose."""
    if not isinstance(ckpt, Mapping) or "mode" in ckpt or not ckpt:
        return
    key = next(iter(ckpt))
    owners = [mode for mode, cls in POLICIES.items() if key in {f.name for f in fields(cls)}]
    names = owners or [mode for mode in POLICIES if mode != "none"]
    whose = f"it is an option of {', '.join(owners)}: " if owners else ""
    raise ConfigError(f"ckpt.{key}: no policy is chosen; {whose}add {' or '.join(f'+ckpt={n}' for n in names)}")


def _plain(value: Any) -> Any:
    """Data that YAML knows."""
    if isinstance(value, Policy):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _escaped(value: Any) -> Any:
    """Text with a literal ``${``, which OmegaConf would otherwise read as an interpolation."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
