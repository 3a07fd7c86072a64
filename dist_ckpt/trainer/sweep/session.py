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
from dist_ckpt.trainer.sweep.options import DEFAULTS, Cell, Sweep, hydra_text
from dist_ckpt.trainer.sweep.outcome import CONSOLE, Outcome, Status, outcome_of, store, stored
from dist_ckpt.trainer.sweep.summary import Line, Measured, summarize

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


class Watcher(Protocol):
    """Who is told how far the sweep is."""

    def starts(self, what: str, left: int) -> None:
        """A run starts, and ``left`` follow for certain."""
        ...

    def ends(self, what: str, outcome: Outcome, was_stored: bool) -> None:
        """A run has ended, now or in an earlier part of the sweep."""
        ...


def predict(sweep: Sweep, files: Files | None) -> dict[Cell, Prediction]:
    """What each policy costs, exactly, on tensors without memory; starts nothing.

    Args:
        files: those of the data.

    Raises:
        DistCkptError: a mistake that is not about one policy, or one that every policy shares.
    """
    from dist_ckpt.trainer.job import Job

    found: dict[Cell, Prediction] = {}
    place = Place(world_size=sweep.nproc, local_world_size=sweep.nproc)
    refused: PlanError | None = None
    for cell in sweep.cells:
        try:
            job = Job.build(dataclasses.replace(sweep.config, ckpt=cell.policy), place, files)
            costs = [cost.micro_batch for cost in job.costs()]
        except PlanError as error:
            refused = refused or error
            found[cell] = Prediction(refusal=str(error))
            continue
        ratio = sum(cost.flops for cost in costs) / sum(cost.baseline_flops for cost in costs)
        accum = sweep.config.resolved_grad_accum(sweep.nproc)
        found[cell] = Prediction(ratio, most=job.train_rows.num_rows // accum)
    if refused is not None and all(prediction.refusal for prediction in found.values()):
        raise refused
    return found


@dataclass
class Session:
    """A sweep that is being run; whatever ends it, :meth:`lines` says what it has measured.

    Args:
        train: the training program, ``launch/train.py``.
    """

    sweep: Sweep
    predictions: Mapping[Cell, Prediction]
    folder: SweepFolder
    train: Path
    watcher: Watcher
    rounds: dict[Cell, dict[int, Outcome]] = field(default_factory=dict)
    """By number, from 1."""
    trials: dict[Cell, dict[int, Outcome]] = field(default_factory=dict)
    """By micro-batch."""

    def run(self) -> None:
        """Runs what has not been run in an earlier part of the sweep."""
        for position, (cell, number) in enumerate(order := self._schedule()):
            before = self.rounds.setdefault(cell, {})
            if refusal := self.predictions[cell].refusal:
                self._refuse(cell, refusal)
            elif all(outcome.is_done for outcome in before.values()):  # a failure is a result, and not tried again
                what = f"round {number}/{self.sweep.options.rounds}  {cell.label}"
                left, size = len(order) - position - 1, self.sweep.config.train.micro_batch
                before[number] = self._run(cell, _round(number), what, left, size, profiled=number == 1)
        for cell in self.sweep.cells:
            if self.sweep.budget_bytes is not None and self._is_measured(cell):
                self._fit(cell, self.sweep.budget_bytes)

    def lines(self) -> tuple[Line, ...]:
        """What is known so far."""
        return summarize([self._measured(cell) for cell in self.sweep.cells])

    def _schedule(self) -> list[tuple[Cell, int]]:
        """Every round of every policy: first what was run before, so that an interruption loses none of it. The order
        turns around from round to round, so that what drifts during a round, such as a machine's temperature, favors
        nobody."""
        cells, rounds = self.sweep.cells, self.sweep.options.rounds
        order = [(cell, n) for n in range(1, rounds + 1) for cell in (cells if n % 2 else tuple(reversed(cells)))]
        return sorted(order, key=lambda one: stored(self.folder.run(one[0].name, _round(one[1]))) is None)

    def _fit(self, cell: Cell, budget_bytes: int) -> None:
        most, size = self.predictions[cell].most, self.sweep.config.train.micro_batch
        tried = self.trials.setdefault(cell, {})
        tried[size] = self.rounds[cell][1]
        while self._found(cell) is None and all(_says_something(outcome) for outcome in tried.values()):
            size = fit.next_try(_peaks(tried), budget_bytes, most)
            what = f"largest micro-batch  {cell.label}  {size}"
            tried[size] = self._run(cell, f"micro_batch_{size}", what, 0, size, profiled=True)

    def _found(self, cell: Cell) -> fit.Fit | None:
        budget, tried = self.sweep.budget_bytes, self.trials.get(cell)
        if budget is None or not tried:
            return None
        return fit.found(_peaks(tried), budget, self.predictions[cell].most)

    def _run(self, cell: Cell, name: str, what: str, left: int, micro_batch: int, profiled: bool) -> Outcome:
        """One run, unless it has been done before."""
        self.watcher.starts(what, left)
        path = self.folder.run(cell.name, name)
        outcome = stored(path)
        was_stored = outcome is not None
        if outcome is None:
            cleared(path)
            command = torchrun(self.sweep.nproc, self.train, self._arguments(cell, path, micro_batch, profiled))
            outcome = outcome_of(path, run(command, path / CONSOLE, self.folder.lock))
            store(path, outcome)
        self.watcher.ends(what, outcome, was_stored)
        return outcome

    def _arguments(self, cell: Cell, path: Path, micro_batch: int, profiled: bool) -> Sequence[str]:
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
        return (*DEFAULTS, *self.sweep.arguments, *cell.arguments, *forced)

    def _refuse(self, cell: Cell, reason: str) -> None:
        if not self.rounds[cell]:
            self.rounds[cell][1] = Outcome(Status.refused, reason)
            self.watcher.ends(cell.label, self.rounds[cell][1], was_stored=False)

    def _is_measured(self, cell: Cell) -> bool:
        first = self.rounds.get(cell, {}).get(1)
        return first is not None and first.is_done

    def _measured(self, cell: Cell) -> Measured:
        tried = self.trials.get(cell, {})
        return Measured(
            label=cell.label,
            k=cell.k,
            flops_ratio=self.predictions[cell].flops_ratio,
            rounds=dict(sorted(self.rounds.get(cell, {}).items())),
            samples=self.sweep.samples(self.sweep.config.train.micro_batch),
            trials=tried,
            trial_samples={size: self.sweep.samples(size) for size in tried},
            fit=self._found(cell),
        )


def _round(number: int) -> str:
    return f"round_{number}"


def _peaks(tried: Mapping[int, Outcome]) -> dict[int, int | None]:
    return {size: outcome.peak_bytes for size, outcome in tried.items() if _says_something(outcome)}


def _says_something(outcome: Outcome) -> bool:
    """Whether a run tells how much memory its micro-batch takes; any other failure ends the search."""
    return outcome.peak_bytes is not None or outcome.status is Status.out_of_memory
