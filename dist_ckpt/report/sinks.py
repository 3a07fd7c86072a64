"""Where a run's records go, besides the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport


class Sink(Protocol):
    """One place that takes records, on rank 0. None of its methods may be a reason for the training to stop."""

    def step(self, line: Mapping[str, float | int]) -> None:
        """After an update: ``step loss grad_norm lr tokens tokens_per_s step_s``, after a validation ``eval_loss``."""
        ...

    def memory(self, report: MemoryReport) -> None:
        """Every rank's memory at the boundary of the update whose line came last."""
        ...

    def profile(self, profiles: Sequence[StepProfile]) -> None:
        """What the deep step has found, a profile a rank; its report came before."""
        ...

    def finish(self, exit_code: int) -> None:
        """No record follows. The run's end is recorded, and sinks that come before this one have finished.

        Args:
            exit_code: of the run.
        """
        ...
