"""The runs of a sweep, one after the other: rounds first, then the search for the largest micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dist_ckpt.errors import PlanError
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.sweep import fit
from dist_ckpt.trainer.sweep.folder import SweepFolder, cleared
from dist_ckpt.trainer.sweep.launch import run, torchrun
from dist_ckpt.trainer.sweep.options import DEFAULTS, Candidate, Sweep, hydra_text
from dist_ckpt.trainer.sweep.outcome import CONSOLE, Outcome, Status, outcome_of, store, stored
from dist_ckpt.trainer.sweep.summary import Measured, ResultRow, summarize

if TYPE_CHECKING:
    from dist_ckpt.trainer.data.corpus import Files


@dataclass(frozen=True)
class Prediction:
    """What is known of a policy before any run."""

    flops_ratio: float | None = None
    """FLOPs of forward, recompute and backward over those without recompute, of all stages."""
    refusal: str | None = None
    """Why it is not run at all."""
    most: int = 0
    """The largest micro-batch that the data has rows for."""


class SweepProgress(Protocol):
    """Who is told how far the sweep is."""

    def starts(self, what: str, left: int) -> None:
        """A run starts, and ``left`` follow for certain."""
        ...

    def ends(self, what: str, outcome: Outcome, was_stored: bool) -> None:
        """A run has ended, now or in an earlier part of the sweep."""
        ...


def predict(sweep: Sweep, files: Files | None) -> dict[Candidate, Prediction]:
    """What each policy costs, exactly, on tensors without memory; starts nothing.

    Args:
        files: those of the data.

    Raises:
        DistCkptError: a mistake that is not about one policy, or one that every policy shares.
    """
    from dist_ckpt.trainer.job import Job

    found: dict[Candidate, Prediction] = {}
    place = Place(world_size=sweep.nproc, local_world_size=sweep.nproc)
    refused: PlanError | None = None
    for candidate in sweep.candidates:
        try:
            job = Job.build(dataclasses.replace(sweep.config, ckpt=candidate.policy), place, files)
            costs = [cost.micro_batch for cost in job.costs()]
        except PlanError as error:
            refused = refused or error
            found[candidate] = Prediction(refusal=str(error))
            continue
        ratio = sum(cost.flops for cost in costs) / sum(cost.baseline_flops for cost in costs)
        accum = sweep.config.resolved_grad_accum(sweep.nproc)
        found[candidate] = Prediction(ratio, most=job.train_rows.num_rows // accum)
    if refused is not None and all(prediction.refusal for prediction in found.values()):
        raise refused
    return found


@dataclass
class SweepRunner:
    """A sweep that is being run; whatever ends it, :meth:`results` says what it has measured.

    Args:
        train: the training program, ``launch/train.py``.
    """

    sweep: Sweep
    predictions: Mapping[Candidate, Prediction]
    folder: SweepFolder
    train: Path
    progress: SweepProgress
    rounds: dict[Candidate, dict[int, Outcome]] = field(default_factory=dict)
    """By number, from 1."""
    trials: dict[Candidate, dict[int, Outcome]] = field(default_factory=dict)
    """By micro-batch."""

    def run(self) -> None:
        """Runs what has not been run in an earlier part of the sweep."""
        order = self._schedule()
        self._warm_up(len(order))
        for position, (candidate, number) in enumerate(order):
            before = self.rounds.setdefault(candidate, {})
            if refusal := self.predictions[candidate].refusal:
                self._refuse(candidate, refusal)
            elif all(outcome.is_done for outcome in before.values()):  # a failure is a result, and not tried again
                what = f"round {number}/{self.sweep.options.rounds}  {candidate.label}"
                left, size = len(order) - position - 1, self.sweep.config.train.micro_batch
                before[number] = self._run(candidate, _round(number), what, left, size, profiled=number == 1)
        for candidate in self.sweep.candidates:
            if self.sweep.budget_bytes is not None and self._is_measured(candidate):
                self._fit(candidate, self.sweep.budget_bytes)

    def results(self) -> tuple[ResultRow, ...]:
        """What is known so far."""
        return summarize([self._measured(candidate) for candidate in self.sweep.candidates])

    def _schedule(self) -> list[tuple[Candidate, int]]:
        """Every round of every policy: first what was run before, so that an interruption loses none of it. The order
        turns around from round to round, so that what drifts during a round, such as a machine's temperature, favors
        nobody."""
        candidates, rounds = self.sweep.candidates, self.sweep.options.rounds
        order = [
            (one, n) for n in range(1, rounds + 1) for one in (candidates if n % 2 else tuple(reversed(candidates)))
        ]
        return sorted(order, key=lambda one: stored(self.folder.run(one[0].name, _round(one[1]))) is None)

    def _warm_up(self, left: int) -> None:
        """One run that counts for nothing: whichever policy came first would pay for cold files and clocks."""
        runnable = [one for one in self.sweep.candidates if not self.predictions[one].refusal]
        is_new = all(stored(self.folder.run(one.name, _round(1))) is None for one in runnable)
        if runnable and is_new:
            what, size = f"warm-up, not counted  {runnable[0].label}", self.sweep.config.train.micro_batch
            self._run(runnable[0], "warm_up", what, left, size, profiled=False)

    def _fit(self, candidate: Candidate, budget_bytes: int) -> None:
        most, size = self.predictions[candidate].most, self.sweep.config.train.micro_batch
        tried = self.trials.setdefault(candidate, {})
        tried[size] = self.rounds[candidate][1]
        while self._found(candidate) is None and all(_says_something(outcome) for outcome in tried.values()):
            size = fit.next_try(_peaks(tried), budget_bytes, most)
            what = f"largest micro-batch  {candidate.label}  {size}"
            tried[size] = self._run(candidate, f"micro_batch_{size}", what, 0, size, profiled=True)

    def _found(self, candidate: Candidate) -> fit.Fit | None:
        budget, tried = self.sweep.budget_bytes, self.trials.get(candidate)
        if budget is None or not tried:
            return None
        return fit.found(_peaks(tried), budget, self.predictions[candidate].most)

    def _run(self, candidate: Candidate, name: str, what: str, left: int, micro_batch: int, profiled: bool) -> Outcome:
        """One run, unless it has been done before."""
        self.progress.starts(what, left)
        path = self.folder.run(candidate.name, name)
        outcome = stored(path)
        was_stored = outcome is not None
        if outcome is None:
            cleared(path)
            command = torchrun(self.sweep.nproc, self.train, self._arguments(candidate, path, micro_batch, profiled))
            outcome = outcome_of(path, run(command, path / CONSOLE, self.folder.lock))
            store(path, outcome)
        self.progress.ends(what, outcome, was_stored)
        return outcome

    def _arguments(self, candidate: Candidate, path: Path, micro_batch: int, profiled: bool) -> Sequence[str]:
        """Later ones count, so that the sweep's come last."""
        steps = self.sweep.steps
        ours: Mapping[str, object] = {
            "run_dir": str(path),
            "train.micro_batch": micro_batch,
            "train.save_every": 0,
            "report.every": steps,
            "report.html": False,
            "report.wandb": "disabled",
            "report.profile_step": steps if profiled else None,  # bytes are the same in every round
        }
        forced = [f"{key}={hydra_text(value)}" for key, value in ours.items()]
        return (*DEFAULTS, *self.sweep.arguments, *candidate.arguments, *forced)

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        if not self.rounds[candidate]:
            self.rounds[candidate][1] = Outcome(Status.refused, reason)
            self.progress.ends(candidate.label, self.rounds[candidate][1], was_stored=False)

    def _is_measured(self, candidate: Candidate) -> bool:
        first = self.rounds.get(candidate, {}).get(1)
        return first is not None and first.is_done

    def _measured(self, candidate: Candidate) -> Measured:
        tried = self.trials.get(candidate, {})
        return Measured(
            label=candidate.label,
            k=candidate.k,
            flops_ratio=self.predictions[candidate].flops_ratio,
            rounds=dict(sorted(self.rounds.get(candidate, {}).items())),
            samples=self.sweep.samples(self.sweep.config.train.micro_batch),
            trials=tried,
            trial_samples={size: self.sweep.samples(size) for size in tried},
            fit=self._found(candidate),
        )


def _round(number: int) -> str:
    return f"round_{number}"


def _peaks(tried: Mapping[int, Outcome]) -> dict[int, int | None]:
    return {size: outcome.peak_bytes for size, outcome in tried.items() if _says_something(outcome)}


def _says_something(outcome: Outcome) -> bool:
    """Whether a run tells how much memory its micro-batch takes; any other failure ends the search."""
    return outcome.peak_bytes is not None or outcome.status is Status.out_of_memory
