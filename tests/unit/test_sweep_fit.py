"""The search for the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dist_ckpt.trainer.sweep.fit import Fit, found, next_try

CURVES: dict[str, Callable[[int], int | None]] = {
    "line": lambda size: 1000 + 37 * size,
    "bent": lambda size: 1000 + 37 * size + size * size // 3,
    "steps": lambda size: 1000 + 512 * (size // 16),
    "flat": lambda size: 1000,
    "nothing above 90": lambda size: None if size > 90 else 1000 + 11 * size,
}


def searched(curve: Callable[[int], int | None], start: int, budget: int, most: int) -> tuple[Fit, list[int]]:
    peaks = {start: curve(start)}
    while (end := found(peaks, budget, most)) is None:
        size = next_try(peaks, budget, most)
        assert 1 <= size <= most and size not in peaks
        known = [one for one, peak in peaks.items() if peak is not None and peak <= budget]
        assert not known or size <= 4 * max(known), "never far beyond what is known to fit"
        peaks[size] = curve(size)
    return end, list(peaks)


@pytest.mark.parametrize("start", [1, 4, 100])
@pytest.mark.parametrize("budget", [999, 1037, 1500, 4000, 10**9])
@pytest.mark.parametrize("name", CURVES)
def test_the_largest_that_fits_is_found(name: str, budget: int, start: int) -> None:
    curve, most = CURVES[name], 500
    fitting = [size for size in range(1, most + 1) if (peak := curve(size)) is not None and peak <= budget]
    largest = max(fitting, default=0)
    end, runs = searched(curve, start, budget, most)
    assert end == Fit(largest, is_all=largest == most)
    assert len(runs) <= 16


def test_a_line_takes_few_runs() -> None:
    end, runs = searched(CURVES["line"], 4, 1000 + 37 * 60, 10_000)
    assert end.micro_batch == 60
    assert runs == [4, 8, 32, 60, 61]
