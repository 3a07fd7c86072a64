"""What a run has left behind, read from its folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from dist_ckpt.errors import PlanError, ReportError
from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import GIB, MemoryReport
from dist_ckpt.plan import Plan
from dist_ckpt.policy import described
from dist_ckpt.report import predicted
from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.predicted import Predicted
from dist_ckpt.report.run_layout import WARM_UP_STEPS, RunLayout, of_ranks

T = TypeVar("T")

TINY = GIB // 16
"""Bytes of a rank below which throughput is not given by the GiB."""


@dataclass(frozen=True)
class RunData:
    """The records of a run. What was not recorded is None or empty."""

    path: Path
    config: Mapping[str, Any] | None
    plan: Plan | None
    steps: tuple[Mapping[str, float], ...]
    """A line a step: ``step loss grad_norm lr tokens tokens_per_s step_s``."""
    reports: tuple[MemoryReport, ...]
    profiles: tuple[StepProfile, ...]
    """Of the deep step, by rank."""
    predicted: tuple[Predicted, ...]
    exit: Mapping[str, Any] | None
    post_mortems: tuple[Mapping[str, Any], ...]
    """Of ranks that ran out of memory, as they are in ``oom/``."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def option(self, key: str, default: Any = None) -> Any:
        """A value of the configuration: ``train.steps``."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def label(self) -> str:
        """What was run, in few words: ``fsdp2 · every_k (k=2)``."""
        policy = policy_text(self.option("ckpt")) if self.option("ckpt") is not None else None
        return " · ".join(filter(None, (self.option("engine.name"), policy))) or self.name

    @property
    def memory(self) -> MemoryReport | None:
        """The report to show: that of the deep step, which says what the peak consists of, or else the last one.

        One whose profiles are not there is from an earlier start, in which another policy may have been used.
        """
        recorded = {profile.step for profile in self.profiles}
        deep = [report for report in self.reports if report.step in recorded]
        return deep[-1] if deep else self.reports[-1] if self.reports else None

    @property
    def world_size(self) -> int | None:
        return len(self.reports[-1].ranks) if self.reports else len(self.profiles) or None

    @property
    def timed_steps(self) -> tuple[Mapping[str, float], ...]:
        """Steps without the first ones and without the deep one, unless there are no others."""
        deep = {profile.step for profile in self.profiles}
        typical = [line for line in self.steps if line["step"] not in deep]
        first = typical[0]["step"] if typical else 0
        return tuple([line for line in typical if line["step"] >= first + WARM_UP_STEPS] or self.steps)

    @property
    def step_s(self) -> float | None:
        """The median step time."""
        return statistics.median(line["step_s"] for line in self.timed_steps) if self.steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a median step over its time."""
        if not self.step_s:
            return None
        return statistics.median(line["tokens"] for line in self.timed_steps) / self.step_s

    @property
    def samples(self) -> int | None:
        """Sequences per update, over all ranks."""
        train, world_size = self.option("train"), self.world_size
        if train is None or world_size is None:
            return None
        if train.get("global_batch") is not None:
            return int(train["global_batch"])
        pipelines = world_size // self.option("engine.stages", 1)
        return int(train["micro_batch"] * (train.get("grad_accum") or 1) * pipelines)

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.step_s if self.samples and self.step_s else None

    @property
    def samples_per_s_gib(self) -> float | None:
        """Throughput per GiB of the heaviest rank: what a policy buys with the memory it takes; None where that is so
        little that a GiB is no measure of it."""
        heaviest = self.heaviest_bytes
        return self.samples_per_s / (heaviest / GIB) if self.samples_per_s and heaviest and heaviest >= TINY else None

    @property
    def heaviest_bytes(self) -> int | None:
        """Of the heaviest rank: the allocator's peak where it is known, else what is accounted."""
        if self.memory is None:
            return None
        return self.memory.heaviest.peak_or_accounted


def policy_text(policy: Mapping[str, Any] | str) -> str:
    """A policy of a configuration, for a line of text.

    >>> policy_text({"mode": "per_stage", "per_stage": [{"mode": "full"}, {"mode": "none"}]})
    'stages full, none'
    """
    if isinstance(policy, str):
        return policy
    stages = policy.get("per_stage")
    return f"stages {', '.join(map(policy_text, stages))}" if stages else described(policy)


def read_run(path: Path) -> RunData:
    """Reads a run folder, of a run that is still going on too.

    Raises:
        ReportError: the folder holds no run, or something in it cannot be read as what it should be.
    """
    if not path.is_dir():
        raise ReportError(f"{path}: no such folder; name the folder of a run (run_dir)")
    folder = RunLayout(path)
    run = RunData(
        path=path,
        config=_read(folder.config, lambda text: dict(yaml.safe_load(text))),
        plan=_read(folder.plan, Plan.from_json),
        steps=_lines(folder.metrics, _step),
        reports=_lines(folder.memory, MemoryReport.from_dict),
        profiles=tuple(
            sorted(_folder(folder.profiles, lambda text: StepProfile.from_dict(json.loads(text))), key=lambda p: p.rank)
        ),
        predicted=_read(folder.cost, predicted.from_json) or (),
        exit=_read(folder.exit, lambda text: dict(json.loads(text))),
        post_mortems=tuple(_folder(folder.oom, lambda text: dict(json.loads(text)))),
    )
    if run.config is None and run.plan is None and not run.steps and not run.reports:
        raise ReportError(
            f"{path}: holds no run: no config.yaml, plan.json, metrics.jsonl or memory.jsonl; name the folder of a run "
            "(run_dir)"
        )
    return run


_STEP_FIELDS = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s")


def _step(line: Mapping[str, Any]) -> Mapping[str, float]:
    return {**{name: line[name] for name in _STEP_FIELDS}, **line}


def _lines(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> tuple[T, ...]:
    """The records of a file of JSON lines; only its last line may have been cut short, by a kill."""
    if not path.exists():
        return ()
    records = _checked(path, lambda: read_json_lines(path))
    if len(records) < len(path.read_text(encoding="utf-8").splitlines()) - 1:
        raise ReportError(f"{path}: line {len(records) + 1} is no JSON")
    return _checked(path, lambda: tuple(parse(record) for record in records))


def _folder(path: Path, parse: Callable[[str], T]) -> list[T]:
    """The JSON files of a folder, a file a rank."""
    found = (_read(file, parse) for file in of_ranks(path))
    return [one for one in found if one is not None]


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    if not path.exists():
        return None
    return _checked(path, lambda: parse(path.read_text(encoding="utf-8")))


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except PlanError as error:
        raise ReportError(f"{path}: {error}") from None
    except KeyError as error:
        raise ReportError(f"{path}: has no field {error}; it was written by another version, or is damaged") from None
    except (OSError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ReportError(f"{path}: cannot be read: {type(error).__name__}: {error}") from None
