"""Every option of a training run, as typed dataclasses, and how they are read and written."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dist_ckpt.errors import ConfigError, choices
from dist_ckpt.policy import NoPolicy, Policy
from dist_ckpt.trainer.checks import check_sections
from dist_ckpt.trainer.data.config import DataConfig
from dist_ckpt.trainer.keys import build, leaves
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.overrides import compose_overrides, parse_yaml
from dist_ckpt.typed import Checked, Choice, Interval, Positive, Range, Size, shown


class Precision(Choice):
    """Number format of forward and backward. Weights, optimizer and reductions stay fp32; under DeepSpeed, bf16 weights
    have fp32 masters, and reductions are bf16 unless its file says otherwise."""

    fp32 = "fp32"
    bf16 = "bf16"


class AccumSync(Choice):
    """When the ranks reduce the gradients of an update with several micro-batches."""

    every = "every"
    """After each micro-batch: under FSDP, gradients stay sharded."""
    boundary = "boundary"
    """Once per update: less traffic, but under FSDP each rank holds unsharded gradients until then."""


class EngineName(Choice):
    """How the model is sharded and stepped."""

    ddp = "ddp"
    fsdp1 = "fsdp1"
    fsdp2 = "fsdp2"
    deepspeed = "deepspeed"
    deepspeed_pipe = "deepspeed_pipe"


class DeviceType(Choice):
    """Where the ranks compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TrainConfig(Checked, section="train"):
    """Batches, optimizer, precision, saving and evaluation."""

    steps: Size = 60
    """Number of updates."""
    micro_batch: Size = 4
    """Sequences that a rank processes at a time; activation memory grows with it."""
    grad_accum: Size | None = None
    """Micro-batches per update on each rank. null: 1, or what ``global_batch`` requires."""
    global_batch: Size | None = None
    """Sequences per update over all ranks. null: micro_batch · ranks · grad_accum."""
    seq_len: Size = 128
    """Tokens per sequence; at most ``model.max_seq_len``."""
    lr: Positive = 3e-3
    """Peak learning rate of AdamW."""
    min_lr_ratio: Annotated[float, Range(least=0, most=1)] = 0.1
    """Fraction of ``lr`` at the end of the cosine schedule."""
    warmup_steps: Interval = 10
    """Updates over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Range(least=0)] = 0.1
    """Decoupled weight decay of AdamW; not applied to norms and biases."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay of AdamW's running mean of gradients."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of AdamW's running mean of squared gradients."""
    optimizer_eps: Positive = 1e-8
    """Added to the denominator of AdamW's update."""
    clip: Positive | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down. null: no clipping."""
    seed: Annotated[int, Range(least=0, below=2**32)] = 0
    """Seed of the initial weights, the order of the data, and dropout."""
    precision: Precision = Precision.fp32
    compile: bool = False
    """Whether each block is compiled by ``torch.compile``."""
    save_every: Interval = 0
    """Updates between saved training states; one more is saved at the end. 0: save only after SIGTERM."""
    keep: Size = 2
    """How many training states are kept; older ones are removed."""
    resume: str | None = None
    """``auto``: the newest complete training state in ``run_dir``, if any; otherwise a ``step_N`` folder's path."""
    eval_every: Interval = 0
    """Updates between validations. 0: no validation."""
    eval_batches: Size = 4
    """Micro-batches on each rank per validation."""
    accum_sync: AccumSync | None = None
    """null: ``boundary`` for ddp, ``every`` for fsdp1 and fsdp2. DeepSpeed's engines have their own way."""
    check_gradients: bool = True
    """Whether the run stops after its first backward where a parameter has no gradient and would have one without the
    policy."""
    memory_limit_gib: Positive | None = None
    """Memory that the process of a rank may hold: on a GPU torch's share of it, on the CPU all of its data. More is out
    of memory. null: what the device has."""
    memory_fraction: Annotated[float, Range(above=0, most=1)] | None = None
    """The same, as a fraction of the device's memory, on the CPU of the machine's."""

    def check(self) -> None:
        if self.memory_limit_gib is not None and self.memory_fraction is not None:
            raise ConfigError("train.memory_limit_gib and train.memory_fraction: both say the same thing; give one")
        if self.resume not in (None, "auto") and not re.fullmatch(r"step_\d+", PurePath(self.resume).name):
            raise ConfigError(
                f"train.resume={self.resume}: is not a step_N folder; {choices(self.resume, ('auto', 'null'))}, "
                "or the path of one, such as outputs/mine/states/step_40"
            )


@dataclass
class EngineConfig(Checked, section="engine"):
    """How the model is sharded and stepped."""

    name: EngineName = EngineName.fsdp2
    """Set by the group: ``engine=ddp``."""
    replicas: Size = 1
    """fsdp2: groups of ranks that each hold the whole model, sharded within the group (HSDP). Must divide the number of
    ranks."""
    allow_untested: bool = False
    """Take a policy that no test has proven right under this engine, precision and compilation (docs/support.md)."""
    config: str | None = None
    """deepspeed, deepspeed_pipe: a DeepSpeed configuration in JSON. null: ZeRO stage 2, in a pipeline stage 1."""
    stages: Size = 1
    """deepspeed_pipe: stages of the pipeline. Must divide the number of ranks."""
    partition: str | tuple[int, ...] = "parameters"
    """deepspeed_pipe: how blocks are dealt to stages. ``uniform``: equal numbers of blocks; ``parameters``: the largest
    stage has as few parameters as possible; ``type:TransformerBlock``: equal numbers of modules of a class; or the
    number of blocks of each stage, as ``[6,6,7,5]``."""

    @property
    def is_deepspeed(self) -> bool:
        return self.name in (EngineName.deepspeed, EngineName.deepspeed_pipe)

    def check(self) -> None:
        pipe = EngineName.deepspeed_pipe
        owners = {
            "replicas": (EngineName.fsdp2,),
            "config": (EngineName.deepspeed, pipe),
            "stages": (pipe,),
            "partition": (pipe,),
        }
        defaults = {f.name: f.default for f in fields(self)}
        for option, engines in owners.items():
            value = getattr(self, option)
            if value != defaults[option] and self.name not in engines:
                raise ConfigError(
                    f"engine.{option}={shown(value)}: is an option of engine={' and engine='.join(engines)}, "
                    f"not of engine={self.name}"
                )
        if self.name is pipe and self.stages == 1:
            raise ConfigError("engine.stages: engine=deepspeed_pipe needs 2 or more; engine=deepspeed has none")


@dataclass
class DeviceConfig(Checked, section="device"):
    """Where the ranks compute."""

    type: DeviceType = DeviceType.auto
    """Set by the group: ``device=cpu``."""


class Wandb(Choice):
    """Whether the run is also recorded by Weights & Biases."""

    disabled = "disabled"
    offline = "offline"
    """Into the run folder, without network or account; ``wandb sync`` uploads it."""
    online = "online"


@dataclass
class ReportConfig(Checked, section="report"):
    """What a run reports about memory."""

    every: Size = 10
    """Updates between memory reports of all ranks; the last update is always reported."""
    profile_step: Size | None = None
    """The update in which every allocation of every rank is recorded: what fills memory at its worst moment. It takes
    longer than others. null: none."""
    html: bool = False
    """Whether ``report.html`` is written at the end, into the run folder."""
    wandb: Wandb = Wandb.disabled
    wandb_project: str = "dist_ckpt"
    """Project of the Weights & Biases run."""
    wandb_max_ranks: Size = 16
    """Ranks up to which each has curves of its own there; of more, the largest, least, mean and heaviest are shown."""


@dataclass
class Config(Checked):
    """A whole run; :func:`~dist_ckpt.trainer.checks.check` checks it against the number of ranks."""

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
    """Print the plan and its cost, and start nothing."""
    world_size: Size | None = None
    """Number of ranks that a ``dry_run`` plans for. In a run, torchrun sets it, and any other number is an error."""

    def check(self) -> None:
        if self.run_dir is not None and not self.run_dir.strip():
            raise ConfigError("run_dir: is empty; name a folder, or null for a new one")
        check_sections(self)

    def ranks(self, world_size: int) -> int:
        """Number of ranks of this run; that of a dry run may differ from the ``world_size`` that is running."""
        return self.world_size if self.dry_run and self.world_size is not None else world_size

    def data_ranks(self, world_size: int) -> int:
        """Ranks with rows of their own: the stages of one pipeline share theirs."""
        return world_size // self.engine.stages

    def resolved_grad_accum(self, world_size: int) -> int:
        """Micro-batches per update on each of ``world_size`` ranks.

        Raises:
            ConfigError: ``global_batch`` is not a whole number of micro-batches, or contradicts ``grad_accum``.
        """
        train = self.train
        if train.global_batch is None:
            return 1 if train.grad_accum is None else train.grad_accum
        ranks, stages = self.data_ranks(world_size), self.engine.stages
        at_once = train.micro_batch * ranks
        sizes = f"train.micro_batch={train.micro_batch} × {ranks} rank{'s'[: ranks != 1]}"
        sizes = sizes if stages == 1 else f"{sizes.replace('rank', 'pipeline')} of {stages} stages"
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
                f"train.grad_accum={accum}; give one of the two"
            )
        return accum

    def resolved_global_batch(self, world_size: int) -> int:
        """Sequences per update over all of ``world_size`` ranks; raises as :meth:`resolved_grad_accum`."""
        return self.train.micro_batch * self.data_ranks(world_size) * self.resolved_grad_accum(world_size)


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration that a command line asks for; reads ``configs/``, writes nothing.

    Args:
        overrides: arguments in Hydra's grammar, as typed: ``+ckpt=every_k``, ``ckpt.k=4``,
            ``engine=ddp``, ``train.lr=1e-3``. ``ckpt=NAME`` and ``+ckpt=NAME`` are the same.

    Raises:
        ConfigError: an argument that cannot be read, an unknown key or group choice, a value of the wrong
            type or out of range, options that contradict each other.
        PlanError: an option that the chosen policy does not have.
    """
    texts = {key for key, hint in leaves(Config).items() if str in hint and not key.startswith("ckpt.")}
    return _config_from(compose_overrides(overrides, texts))


def config_from_yaml(text: str) -> Config:
    """The configuration that :func:`config_yaml` wrote; keys that are left out have their defaults.

    Raises:
        ConfigError: not YAML, or anything that :func:`load_config` refuses.
        PlanError: an option that the policy does not have.
    """
    return _config_from(parse_yaml(text))


def config_yaml(config: Config) -> str:
    """The whole configuration as YAML, every key; :func:`config_from_yaml` gives an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(_plain(config))))


def _config_from(data: Mapping[str, Any]) -> Config:
    defaults = _plain(Config())
    if data.get("ckpt"):  # its options belong to its own mode, not to the default one
        del defaults["ckpt"]
    # Merged by hand: OmegaConf's merge would keep the default where a value is "???".
    merged = _merged(defaults, data)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or "a value"
        raise ConfigError(f"{where}: cannot be resolved: {str(error).splitlines()[0]}") from error
    return build(Config, typing.cast("dict[str, Any]", resolved))


def _merged(below: dict[str, Any], above: Mapping[Any, Any]) -> dict[str, Any]:
    """``below``, overridden by ``above``; neither is changed."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(under, dict) and isinstance(value, Mapping)
        result[key] = _merged(typing.cast("dict[str, Any]", under), value) if both else value
    return result


def _plain(value: Any) -> Any:
    """As data that YAML can hold."""
    if isinstance(value, Policy):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def _escaped(value: Any) -> Any:
    """With each literal ``${`` escaped, which OmegaConf would otherwise read as an interpolation."""
    if isinstance(value, dict):
        return {k: _escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
