"""What is where in a run's folder: for the trainer, which writes it, and for all that read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WARM_UP_STEPS = 2
"""Updates at the start of a run that its typical step time leaves out: they allocate optimizer states, fill caches and
compile."""

OUT_OF_MEMORY = 3
"""The ``code`` in ``exit.json`` of a run that ran out of memory."""


@dataclass(frozen=True)
class RunLayout:
    """Paths inside one run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def cost(self) -> Path:
        """What the plan should cost, by prediction."""
        return self.path / "cost.json"

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        """A line a report."""
        return self.path / "memory.jsonl"

    @property
    def profiles(self) -> Path:
        """A file for each rank, of the deep step."""
        return self.path / "profile"

    @property
    def oom(self) -> Path:
        """Files for each rank that ran out of memory."""
        return self.path / "oom"

    @property
    def exit(self) -> Path:
        """How the run has ended; not there before it has."""
        return self.path / "exit.json"

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.path / "report.html"

    @property
    def wandb(self) -> Path:
        """All that Weights & Biases writes."""
        return self.path / "wandb"


def of_rank(folder: Path, rank: int) -> Path:
    """A rank's JSON file in ``profile/`` or ``oom/``."""
    return folder / f"rank_{rank}.json"


def of_ranks(folder: Path) -> list[Path]:
    """Those that are there."""
    return sorted(folder.glob("rank_*.json"))
