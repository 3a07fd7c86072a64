"""What the runs of a sweep say together: one row a policy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt.memory.records import GIB
from dist_ckpt.trainer.sweep.fit import Fit
from dist_ckpt.trainer.sweep.outcome import Outcome, Status


@dataclass(frozen=True)
class Measured:
    """All that was run of one policy."""

    label: str
    k: int | None
    flops_ratio: float | None
    """FLOPs of forward, recompute and backward over those without recompute; exact, None if the policy was refused."""
    rounds: Mapping[int, Outcome]
    """By number. The first is the one in which bytes are measured."""
    samples: int
    """Sequences per update over all ranks."""
    trials: Mapping[int, Outcome]
    """Other micro-batches that were tried."""
    trial_samples: Mapping[int, int]
    """The same as ``samples``, of each of them."""
    fit: Fit | None = None


@dataclass(frozen=True)
class ResultRow:
    """One policy. None where there is nothing to say: the policy failed, or ``none`` is not there to compare with."""

    label: str
    k: int | None
    status: Status
    """How its first run that failed has ended, if any has."""
    reason: str
    rounds: int
    """Runs that were done; the figures are theirs."""
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    step_s: float | None = None
    """The median of all timed updates of all rounds."""
    step_low_s: float | None = None
    """The first quartile; ``step_high_s`` is the third. Half of all updates lie between."""
    step_high_s: float | None = None
    slowdown: float | None = None
    """Step time over that of ``none``: the median over rounds of the ratios within a round."""
    flops_ratio: float | None = None
    samples_per_s: float | None = None
    samples_per_s_per_gib: float | None = None
    """Of the rank with the highest peak."""
    loss_difference: float | None = None
    """The largest relative difference of any update's loss from ``none``'s; 0: equal bit for bit."""
    fit_micro_batch: int | None = None
    """The largest that fits the budget; 0: not even one sequence does."""
    fit_is_all: bool = False
    """It takes every row there is."""
    fit_samples_per_s: float | None = None


def summarize(measured: Sequence[Measured]) -> tuple[ResultRow, ...]:
    """One row a policy that has been run, in order."""
    base = next((one for one in measured if one.k == 0 and 1 in one.rounds and one.rounds[1].is_done), None)
    return tuple(_row(one, base) for one in measured if one.rounds)


def step_median_s(outcome: Outcome) -> float:
    """Of one run that is done."""
    return statistics.median(outcome.step_s)


def _row(one: Measured, base: Measured | None) -> ResultRow:
    outcomes = tuple(one.rounds.values())
    done = [outcome for outcome in outcomes if outcome.is_done]
    end = next((outcome for outcome in outcomes if not outcome.is_done), outcomes[0])
    if not done:
        return ResultRow(one.label, one.k, end.status, end.reason, 0, flops_ratio=one.flops_ratio)
    times = [seconds for outcome in done for seconds in outcome.step_s]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    peak, rate = done[0].peak_bytes, one.samples / middle
    size = one.fit.micro_batch if one.fit is not None else None
    return ResultRow(
        label=one.label,
        k=one.k,
        status=end.status,
        reason=end.reason,
        rounds=len(done),
        saved_bytes=done[0].saved_bytes,
        peak_bytes=peak,
        step_s=middle,
        step_low_s=low,
        step_high_s=high,
        slowdown=_slowdown(one.rounds, base.rounds) if base is not None else None,
        flops_ratio=one.flops_ratio,
        samples_per_s=rate,
        samples_per_s_per_gib=rate * GIB / peak if peak else None,
        loss_difference=_loss_difference(done, base.rounds[1]) if base is not None else None,
        fit_micro_batch=size,
        fit_is_all=one.fit is not None and one.fit.is_all,
        fit_samples_per_s=one.trial_samples[size] / step_median_s(one.trials[size]) if size else None,
    )


def _slowdown(rounds: Mapping[int, Outcome], base: Mapping[int, Outcome]) -> float | None:
    """Pairs of one round saw the machine in about the same state, so their ratio says more than that of all medians."""
    both = [(rounds[number], base[number]) for number in rounds if number in base]
    pairs = [(one, other) for one, other in both if one.is_done and other.is_done]
    ratios = [step_median_s(one) / step_median_s(other) for one, other in pairs]
    return statistics.median(ratios) if ratios else None


def _loss_difference(rounds: Sequence[Outcome], base: Outcome) -> float:
    pairs = [pair for outcome in rounds for pair in zip(outcome.losses, base.losses, strict=True)]
    return max(abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0 for one, other in pairs)
