"""What advice has to know of a run besides its memory: plain data, from a live run or from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_ckpt.plan import Plan
from dist_ckpt.report.predicted import Predicted


@dataclass(frozen=True)
class RunFacts:
    """A run as its folder tells it. Without ``config``, for anybody's own loop, advice names no key of ours."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.yaml`` as data."""
    plan: Plan | None = None
    """``plan.json``."""
    costs: Sequence[Predicted] = ()
    """``cost.json``: of each stage, or the only one."""

    def get(self, key: str) -> Any:
        """The value of a key such as ``train.seq_len``; None where there is no such key."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def engine(self) -> str | None:
        """``fsdp2``; None for anybody's own loop."""
        return self.get("engine.name")

    def either(self, keys: str, words: str) -> str:
        """What is to be done: with keys of the training program, or in words for anybody's own loop."""
        return words if self.engine is None else keys

    @property
    def stages(self) -> int:
        return self.get("engine.stages") or (len(self.plan.stages) if self.plan is not None else 0) or 1

    @property
    def accumulates(self) -> bool:
        """Whether an update has several micro-batches."""
        return (self.get("train.grad_accum") or 1) > 1 or self.get("train.global_batch") is not None

    @property
    def segment(self) -> int:
        """The most blocks that are recomputed as one."""
        return max((len(region.modules) for region in self.plan.regions), default=0) if self.plan is not None else 0

    @property
    def modes(self) -> tuple[str, ...]:
        """The policy of each stage; of all of them alike where there are no stages or all have one."""
        policy = self.plan.policy if self.plan is not None else {}
        if policy.get("mode") != "per_stage":
            return (str(policy.get("mode", "none")),) * self.stages
        return tuple(one if isinstance(one, str) else one["mode"] for one in policy["per_stage"])

    def mode_of(self, stage: int | None) -> str:
        return self.modes[stage or 0]
