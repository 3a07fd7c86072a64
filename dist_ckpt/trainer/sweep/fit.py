"""The largest micro-batch that fits a budget: which one to try next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BY_THE_LINE = 6
"""Tries that follow the peaks' own line; should it be none, what is left is halved."""


@dataclass(frozen=True)
class Fit:
    """What a search has found."""

    micro_batch: int
    """The largest that fits; 0: not even one sequence does."""
    is_all: bool = False
    """It takes all rows that there are, so that the budget was never the limit."""


def found(peaks: Mapping[int, int | None], budget_bytes: int, most: int) -> Fit | None:
    """The end of the search, once the next larger micro-batch has been run as well; None until then."""
    low, high = _bracket(peaks, budget_bytes, most)
    return Fit(low, is_all=low == most) if high - low == 1 else None


def next_try(peaks: Mapping[int, int | None], budget_bytes: int, most: int) -> int:
    """The micro-batch to run next, while :func:`found` says None.

    Memory grows about linearly with the micro-batch, so two peaks lead to the neighborhood, and two more runs settle
    it. No try is more than four times what is known to fit: a machine without memory to spare stays usable.

    Args:
        peaks: micro-batch → peak bytes of the heaviest rank, None where memory ran out; not empty.
        most: the largest possible one.

    >>> next_try({4: 100, 8: 180}, 1000, 512)  # 20 bytes and 20 a sequence: 49, but not more than 4 times 8
    32
    >>> next_try({8: 180, 32: 660}, 1000, 512)
    49
    """
    low, high = _bracket(peaks, budget_bytes, most)
    known = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
    line = _crossing(known, budget_bytes) if len(peaks) < _BY_THE_LINE else None
    guess = line if line is not None else (low + high) // 2 if high <= most else 2 * low
    return max(low + 1, min(guess, high - 1, 4 * low if low else high - 1))


def _bracket(peaks: Mapping[int, int | None], budget_bytes: int, most: int) -> tuple[int, int]:
    """The largest that fits, and the least above it that does not."""
    fits = [size for size, peak in peaks.items() if peak is not None and peak <= budget_bytes]
    low = max(fits, default=0)
    return low, min((size for size in peaks if size > low), default=most + 1)


def _crossing(known: list[tuple[int, int]], budget_bytes: int) -> int | None:
    """Where the line through the two peaks nearest to the budget reaches it; None without such a line."""
    nearest = sorted(sorted(known, key=lambda one: abs(one[1] - budget_bytes))[:2])
    if len(nearest) < 2 or nearest[1][1] <= nearest[0][1]:
        return None
    (size, peak), (other, its_peak) = nearest
    return size + (budget_bytes - peak) * (other - size) // (its_peak - peak)
