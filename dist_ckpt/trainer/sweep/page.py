"""A sweep as one HTML page: the U-curve of segments, memory against time, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_ckpt.memory.records import in_bytes
from dist_ckpt.report.html.figures import Scale, Trade, lines, pareto, pareto_front
from dist_ckpt.report.html.page import render
from dist_ckpt.report.html.parts import Bytes, Chart, Fact, Facts, Section, Table
from dist_ckpt.trainer.sweep.show import remarks, results_table
from dist_ckpt.trainer.sweep.summary import ResultRow

ROUNDS_TO_COMPARE = 3
"""Of fewer, one that was disturbed decides which policy seems the fastest."""


def sweep_page(results: Sequence[ResultRow], command: str, facts: Mapping[str, str]) -> str:
    """The page.

    Args:
        command: that started the sweep.
        facts: what all its runs have in common, by name.
    """
    charts = [chart for chart in (_u_curve(results), _trade(results)) if chart is not None]
    highlights = [Facts(tuple(found))] if (found := _highlights(results)) else []
    options = Table("what all runs have in common", ("option", "value"), tuple(facts.items()))
    sections = (
        Section("results", "Results", (*highlights, *charts, results_table(results), *remarks(results))),
        Section("columns", "How to read it", _HOW_TO_READ),
        Section("options", "Options of all runs", (options,)),
    )
    return render("sections.html.j2", title=f"Sweep of {len(results)} policies", lead=[command], sections=sections)


_HOW_TO_READ = (
    "Saved: what forward keeps for backward; peak: the allocator's, in the last update, which is measured allocation "
    "by allocation and not timed. Both are of the rank that has the most.",
    "Step: the median of all timed updates of all rounds; half of them lie within the interquartile range. "
    "Time ÷ none: the median over rounds of the ratio within a round.",
    "FLOPs ÷ none: exact, of forward, recompute and backward. Loss = none: of every update of every round.",
)


def _u_curve(results: Sequence[ResultRow]) -> Chart | None:
    """Saved and peak bytes over the length of segments: saved falls with it, and the peak soon rises."""
    points = sorted((row.k, row) for row in results if row.k is not None and row.saved_bytes is not None)
    if len(points) < 2:
        return None
    scale = Scale.of([row.peak_bytes or row.saved_bytes for _, row in points])
    curves = {
        name: ([k for k, _ in kept], [scale(nbytes) for _, nbytes in kept])
        for name, field in (("peak", "peak_bytes"), ("saved", "saved_bytes"))
        if (kept := [(k, nbytes) for k, row in points if (nbytes := getattr(row, field)) is not None])
    }
    figure = lines(curves, x="blocks a segment (0: no policy)", y=scale.unit, height=380)
    axis = {**figure["layout"]["xaxis"], "tickvals": [k for k, _ in points]}
    counted = ", ".join(str(k) for k, _ in points)
    rows = tuple((k, Bytes(row.saved_bytes), Bytes(row.peak_bytes)) for k, row in points)
    return Chart(
        title="Memory over the length of segments",
        summary=f"Saved and peak bytes of the heaviest rank for segments of {counted} blocks",
        figure={**figure, "layout": {**figure["layout"], "xaxis": axis}},
        table=Table("bytes over the length of segments", ("k", "saved", "peak"), rows),
    )


def _trade(results: Sequence[ResultRow]) -> Chart | None:
    """Peak against step time."""
    trades = [Trade(one.label, one.step_s, one.peak_bytes) for one in results if one.step_s and one.peak_bytes]
    if len(trades) < 2:
        return None
    front = pareto_front(trades)
    rows = tuple(
        (one.label, Bytes(one.peak_bytes), 1000 * one.step_s, "yes" if n in front else "no")
        for n, one in enumerate(trades)
    )
    left_out = [one.label for one in results if not (one.step_s and one.peak_bytes)]
    return Chart(
        title="Memory against time",
        summary=f"Peak of the heaviest rank against step time of {len(trades)} policies",
        figure=pareto(trades),
        table=Table("peak against step time", ("policy", "peak", "step ms", "Pareto-optimal"), rows),
        note=f"Without a point: {', '.join(left_out)}." if left_out else "",
    )


def _highlights(results: Sequence[ResultRow]) -> list[Fact]:
    done = [row for row in results if row.step_s is not None]
    if not done:
        return []
    found = []
    if min(row.rounds for row in done) >= ROUNDS_TO_COMPARE:
        fastest = min(done, key=lambda row: row.step_s or 0.0)
        found.append(Fact("fastest", fastest.label, f"{1000 * (fastest.step_s or 0):,.0f} ms a step"))
    if measured := [row for row in done if row.peak_bytes is not None]:
        smallest = min(measured, key=lambda row: row.peak_bytes or 0)
        found.append(Fact("least memory", smallest.label, f"peak {in_bytes(smallest.peak_bytes)}"))
        densest = max(measured, key=lambda row: row.samples_per_s_per_gib or 0.0)
        found.append(Fact("most samples/s/GiB", densest.label, f"{densest.samples_per_s_per_gib or 0:,.1f}"))
    if fitting := [row for row in done if row.fit_samples_per_s is not None]:
        best = max(fitting, key=lambda row: row.fit_samples_per_s or 0.0)
        note = f"{best.fit_samples_per_s or 0:,.1f} samples/s with micro-batches of {best.fit_micro_batch}"
        found.append(Fact("most samples/s within the budget", best.label, note))
    return found
