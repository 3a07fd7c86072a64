"""The names under which W&B has a run's numbers: torchtitan's where it has one, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dist_ckpt.memory.records import ACCOUNTED, GIB, MemoryReport, RankMemory

PARTS = (*ACCOUNTED, "unattributed")
"""Of a rank's memory at the boundary, activations at their peak."""
_CURVES = (*PARTS, "offloaded", "peak")

_LINE_NAMES = {
    "loss": "loss_metrics/global_avg_loss",
    "eval_loss": "validation_metrics/loss",
    "step_s": "time_metrics/end_to_end(s)",
}  # fmt: skip


def line_metrics(line: Mapping[str, Any], world_size: int) -> dict[str, float]:
    """A line of ``metrics.jsonl``. ``throughput(tps)`` is of one device, as in torchtitan; ``tokens_per_s`` of all.

    >>> line_metrics({"step": 3, "loss": 2.5, "lr": 0.1, "tokens_per_s": 800.0}, 8)
    {'loss_metrics/global_avg_loss': 2.5, 'lr': 0.1, 'tokens_per_s': 800.0, 'throughput(tps)': 100.0}
    """
    named = {_LINE_NAMES.get(name, name): value for name, value in line.items() if name != "step"}
    return named | {"throughput(tps)": line["tokens_per_s"] / world_size}


def memory_metrics(report: MemoryReport, max_ranks: int) -> dict[str, float]:
    """Of every rank at one step. What a device cannot say is left out.

    Args:
        max_ranks: each rank has its curves in a job of up to so many; a larger one has the largest, least, mean and
            heaviest rank's.
    """
    ranks = report.ranks
    most = {"memory/max_active(GiB)": "peak", "memory/max_reserved(GiB)": "reserved"}
    named: dict[str, float] = {
        name: max(found) / GIB for name, column in most.items() if (found := _known(ranks, column))
    }
    if retries := _known(ranks, "alloc_retries"):
        named["memory/num_alloc_retries"] = sum(retries)
    named["memory/num_ooms"] = 0  # the first one ends the run
    if len(ranks) <= max_ranks:
        for rank in ranks:
            named |= _curves(f"rank_{rank.rank}", {column: getattr(rank, column) for column in _CURVES})
        return named
    over: dict[str, Callable[[Sequence[int]], float]] = {"max": max, "min": min, "mean": _mean}
    for which, of in over.items():
        named |= _curves(which, {c: of(found) if (found := _known(ranks, c)) else None for c in _CURVES})
    named |= _curves("heaviest", {column: getattr(report.heaviest, column) for column in _CURVES})
    return named | {"memory/heaviest/rank": report.heaviest.rank}


def rank_table(report: MemoryReport) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the table of all ranks, without columns that are empty on each."""
    ranks = report.ranks
    places = ["rank", *(place for place in ("stage", "device") if _known(ranks, place))]
    counts = [c for c in (*PARTS, "offloaded", "accounted", "peak", "reserved", "capacity") if _known(ranks, c)]
    rows = [[*(getattr(rank, p) for p in places), *(_gib(getattr(rank, c)) for c in counts)] for rank in ranks]
    return [*places, *(f"{count}(GiB)" for count in counts)], rows


def peak_table(report: MemoryReport) -> tuple[list[str], list[list[Any]]] | None:
    """The same for the moment of each rank's peak, by kind; None without a deep step."""
    found = [(rank.rank, rank.at_peak) for rank in report.ranks if rank.at_peak]
    kinds = list(dict.fromkeys(kind for _, at_peak in found for kind in at_peak if kind != "phase"))
    rows = [[rank, at_peak["phase"], *(_gib(at_peak.get(kind, 0)) for kind in kinds)] for rank, at_peak in found]
    return (["rank", "phase", *(f"{kind}(GiB)" for kind in kinds)], rows) if found else None


def stacks(columns: Sequence[str], rows: Sequence[Sequence[Any]], parts: Sequence[str]) -> dict[str, list[float]]:
    """For stacked bars over ranks: a table's columns that are parts of a whole."""
    places = {column.removesuffix("(GiB)"): number for number, column in enumerate(columns)}
    return {part: [row[places[part]] or 0.0 for row in rows] for part in parts if part in places}


def _curves(whose: str, counts: Mapping[str, float | None]) -> dict[str, float]:
    return {f"memory/{whose}/{name}(GiB)": count / GIB for name, count in counts.items() if count is not None}


def _known(ranks: Sequence[RankMemory], column: str) -> list[Any]:
    return [value for rank in ranks if (value := getattr(rank, column)) is not None]


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts)


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB
