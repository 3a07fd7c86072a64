"""What a sweep is asked for: which policies, on which run, how often."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.deepspeed_config import read_config
from dist_ckpt.errors import ConfigError, PlanError
from dist_ckpt.memory.records import GIB
from dist_ckpt.policy import NoPolicy, PerStagePolicy, Policy, SegmentsPolicy, described, policy_from
from dist_ckpt.report.run_layout import WARM_UP_STEPS
from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import Config, load_config
from dist_ckpt.trainer.keys import build, leaves
from dist_ckpt.trainer.overrides import compose_overrides
from dist_ckpt.typed import Checked, Positive, Size, shown

DEFAULTS = ("train.steps=12",)
"""Where a sweep's default differs from the training program's."""

_OURS = {
    "ckpt": "sweep.ckpt names the policies, as in sweep.ckpt=[none,full,{mode: every_k, k: 2}]",
    "report": "a sweep measures every run alike; take the option away",
    "dry_run": "a sweep runs for real; launch/train.py has the dry run",
    "world_size": "nproc is the number of ranks",
    "train.resume": "each run starts anew; the sweep itself goes on where it was if run_dir names its folder",
    "train.save_every": "the runs of a sweep are not continued; take the option away",
}
"""Options of the training program that the sweep sets itself, and what to do instead."""


@dataclass
class SweepConfig(Checked, section="sweep"):
    """The policies that are compared, and how often each is run."""

    ckpt: tuple[Policy, ...] = ()
    """Policies: names, or modes with their options, as in ``[none, full, {mode: every_k, k: 2}]``."""
    k: tuple[int, ...] = ()
    """Lengths of segments: ``[0, 2, 4]`` is no policy, then segments of 2 and of 4 blocks."""
    rounds: Size = 3
    """How often each policy is run. Rounds are interleaved, so that a machine that slows down slows all of them."""
    budget_gib: Positive | None = None
    """Memory of a rank. Finds the largest ``train.micro_batch`` whose peak stays within it, by real runs, and its
    throughput. null: not looked for."""

    def __post_init__(self) -> None:
        if isinstance(self.ckpt, (str, Mapping)) or not isinstance(self.ckpt, Sequence):
            raise ConfigError(f"sweep.ckpt={shown(self.ckpt)}: must be a list of policies, as in [none,full]")
        policies = []
        for number, spec in enumerate(self.ckpt):
            try:
                policies.append(policy_from(spec))
            except PlanError as error:
                raise PlanError(f"sweep.ckpt[{number}]: {error}") from None
        self.ckpt = tuple(policies)
        super().__post_init__()

    def check(self) -> None:
        if wrong := [k for k in self.k if k < 0]:
            raise ConfigError(f"sweep.k: {wrong[0]} is no number of blocks; must be 0 (no policy) or more")
        if not self.policies:
            raise ConfigError("sweep: nothing to compare; give sweep.ckpt=[none,full], sweep.k=[0,2,4] or both")

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Each once, in the order given."""
        segments = (SegmentsPolicy(k=k) if k else NoPolicy() for k in self.k)
        return tuple(dict.fromkeys((*self.ckpt, *segments)))


@dataclass
class SweepOptions(Checked):
    """The options that are the sweep's own, before those of the training program."""

    nproc: Size = 1
    """Ranks of each run, all on this machine."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def check(self) -> None:
        self.sweep.check()  # also where no option of it is given


@dataclass(frozen=True)
class Candidate:
    """One policy of a sweep."""

    policy: Policy

    @property
    def label(self) -> str:
        """For people: ``segments (k=2)``."""
        if isinstance(self.policy, PerStagePolicy):
            return f"per_stage [{', '.join(Candidate(policy).label for policy in self.policy.per_stage)}]"
        return described(self.policy.to_dict())

    @property
    def name(self) -> str:
        """For a folder: ``segments-k=2``."""
        plain = re.sub(r"[ (),]+", "-", self.label).strip("-")
        if re.fullmatch(r"[\w=.-]{1,60}", plain):
            return plain
        digest = hashlib.sha256(json.dumps(self.policy.to_dict()).encode()).hexdigest()[:8]
        return f"{self.policy.mode}-{digest}"

    @property
    def k(self) -> int | None:
        """Blocks a segment, 0 without a policy; None for what is no point of that curve."""
        if isinstance(self.policy, NoPolicy):
            return 0
        if not isinstance(self.policy, SegmentsPolicy) or self.policy != SegmentsPolicy(k=self.policy.k):
            return None
        return self.policy.k if isinstance(self.policy.k, int) else None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What asks the training program for it."""
        mode, *options = self.policy.to_dict().items()
        defaults = type(self.policy)().to_dict()
        return (f"ckpt={mode[1]}", *(f"ckpt.{k}={hydra_text(v)}" for k, v in options if v != defaults[k]))


@dataclass(frozen=True)
class Sweep:
    """Everything that is asked for, checked as far as that needs neither torch nor the model."""

    nproc: int
    options: SweepConfig
    config: Config
    """Of each run, but for its policy and its folder."""
    arguments: tuple[str, ...]
    """The training program's own, as typed."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(map(Candidate, self.options.policies))

    @property
    def steps(self) -> int:
        """Updates of each run. The last one is measured allocation by allocation, and not timed."""
        return self.config.train.steps

    @property
    def budget_bytes(self) -> int | None:
        budget = self.options.budget_gib
        return None if budget is None else int(budget * GIB)

    def with_micro_batch(self, size: int) -> Config:
        """The runs' configuration with another micro-batch."""
        return dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, micro_batch=size))

    def samples(self, micro_batch: int) -> int:
        """Sequences per update over all ranks."""
        return self.with_micro_batch(micro_batch).resolved_global_batch(self.nproc)

    def facts(self) -> dict[str, str]:
        """What runs must have in common to be compared: every option but the policy and the folder."""
        keys = (key for key in leaves(Config) if key != "run_dir" and key.partition(".")[0] not in ("ckpt", "report"))
        values = {key: functools.reduce(getattr, key.split("."), self.config) for key in keys}
        return {"nproc": str(self.nproc), **{key: shown(value) for key, value in values.items()}}


def read_sweep(arguments: Sequence[str]) -> Sweep:
    """The sweep that a command line asks for; reads ``configs/``, writes nothing.

    Args:
        arguments: ``nproc=2``, ``sweep.k=[0,2,4]`` and such, and any options of the training program.

    Raises:
        ConfigError: as :func:`~dist_ckpt.trainer.config.load_config`, an option that the sweep sets itself, too few
            steps, or a configuration that does not fit the number of ranks.
        PlanError: an option that a policy does not have.
    """
    own = [argument for argument in arguments if _key(argument) == "nproc" or _key(argument).startswith("sweep")]
    passed = tuple(argument for argument in arguments if argument not in own)
    for argument in passed:
        for key, remedy in _OURS.items():
            if _key(argument) == key or _key(argument).startswith(f"{key}."):
                raise ConfigError(f"{argument}: {remedy}")
    given = compose_overrides(own, ())
    options = build(SweepOptions, {key: given[key] for key in ("nproc", "sweep") if key in given})
    config = load_config((*DEFAULTS, *passed))
    sweep = Sweep(options.nproc, options.sweep, config, passed)
    _check(sweep)
    return sweep


def hydra_text(value: Any) -> str:
    """Plain data in the grammar of the command line.

    >>> hydra_text({"mode": "every_k", "k": 2, "blocks": ["layers.*", None]})
    '{mode:"every_k",k:2,blocks:["layers.*",null]}'
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_text, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace('"', r"\"") + '"'
    return shown(value)


def _key(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0].strip()


def _check(sweep: Sweep) -> None:
    config, least = sweep.config, WARM_UP_STEPS + 2
    if sweep.steps < least:
        raise ConfigError(
            f"train.steps={sweep.steps}: {WARM_UP_STEPS} updates warm up, and the last is measured allocation by "
            f"allocation; with at least {least} one is timed"
        )
    if sweep.budget_bytes is not None and config.train.global_batch is not None:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch}: sweep.budget_gib tries other sizes of train.micro_batch; "
            "give train.grad_accum instead"
        )
    if config.engine.config is not None and "activation_checkpointing" in read_config(config.engine.config):
        raise ConfigError(
            f"{config.engine.config}: its section activation_checkpointing is a policy, and those of a sweep are "
            "sweep.ckpt and sweep.k; remove the section"
        )
    check(config, sweep.nproc)
