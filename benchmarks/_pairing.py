"""Comparing two ways of doing a step in one run, so that a machine whose speed drifts is fair to both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """Step-time ratios of one way to another, a pair a round."""

    ratios: tuple[float, ...]
    base_s: float
    """Median seconds of the way compared with."""

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def upper_95(self) -> float:
        """Upper bound of a 95 % confidence interval of the median, from order statistics (no distribution assumed)."""
        return sorted(self.ratios)[_upper_rank(len(self.ratios)) - 1]

    @property
    def lower_95(self) -> float:
        """The interval's lower bound."""
        return sorted(self.ratios)[len(self.ratios) - _upper_rank(len(self.ratios))]

    def __str__(self) -> str:
        return (
            f"ratio {self.median:.4f} (95 % of the median in {self.lower_95:.4f} … {self.upper_95:.4f}; "
            f"{len(self.ratios)} rounds of {self.base_s * 1e3:.0f} ms)"
        )


def paired(ways: Sequence[Callable[[], object]], rounds: int) -> list[Paired]:
    """Times all ways in every round and compares each with the first.

    The order turns from round to round, so that no way always runs first. One round before is not counted.
    """
    assert rounds >= 15
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        order = [(number + i) % len(ways) for i in range(len(ways))]
        for i in order if number % 2 else reversed(order):
            start = time.perf_counter()
            ways[i]()
            if number:
                seconds[i].append(time.perf_counter() - start)
    base = statistics.median(seconds[0])
    return [Paired(tuple(s / b for s, b in zip(way, seconds[0], strict=True)), base) for way in seconds[1:]]


def _upper_rank(n: int) -> int:
    """Smallest rank r so that the median lies below the r-th smallest of n with probability ≥ 97.5 %."""
    from math import comb

    below = 0
    for rank in range(1, n + 1):
        below += comb(n, rank - 1)
        if below / 2**n >= 0.975:
            return rank
    return n
