"""The charts of a run, each with the table that says the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_ckpt.errors import counted
from dist_ckpt.memory.profile.step_profile import KINDS, StepProfile
from dist_ckpt.memory.records import ACCOUNTED, MemoryReport, RankMemory, in_bytes
from dist_ckpt.report.html import deep_step, figures
from dist_ckpt.report.html.parts import Bytes, Cell, Chart, Share, Table

BARS = 64
"""Ranks that are drawn side by side; of more, the heaviest. Tables have all."""

ROWS = 120
"""Of a table that could be long: holdings, phases, steps."""

POINTS = 1000
"""Of a curve over steps."""


def at_peak_chart(report: MemoryReport, ranks: Sequence[RankMemory]) -> Chart:
    """What fills each rank's memory at its worst moment."""
    drawn, note = _drawn(ranks)
    used = [kind for kind in KINDS if any((rank.at_peak or {}).get(kind) for rank in ranks)]
    stacks: dict[str, list[int]] = {kind: [(rank.at_peak or {}).get(kind, 0) for rank in drawn] for kind in used}
    rows = tuple(
        (
            *_place(rank, report),
            (rank.at_peak or {}).get("phase"),
            Bytes(rank.peak),
            *(Bytes((rank.at_peak or {}).get(kind)) for kind in KINDS),
        )
        for rank in ranks
    )
    return Chart(
        f"What fills each rank's memory at its peak, step {report.step}",
        f"Bytes by kind at the peak of each of {counted(len(drawn), 'rank')}.",
        figures.stacked_bars([_label(rank) for rank in drawn], stacks, axis="rank", capacity=_capacity(drawn)),
        Table(f"memory at the peak, step {report.step}", (*_place_columns(report), "phase", "peak", *KINDS), rows),
        note + _beyond(drawn),
    )


def ledger_chart(report: MemoryReport) -> Chart:
    """Each rank's categories, which are a sum of maxima and no moment of the step."""
    drawn, note = _drawn(report.ranks)
    stacks = {name: [getattr(rank, name) or 0 for rank in drawn] for name in ACCOUNTED}
    peaks = [rank.peak for rank in drawn]
    marks = {"peak": peaks} if any(peak is not None for peak in peaks) else None
    labels, columns = [_label(rank) for rank in drawn], (*_place_columns(report), *ACCOUNTED, "accounted")
    rows = tuple(
        (*_place(rank, report), *(Bytes(getattr(rank, name)) for name in columns[len(_place_columns(report)) :]))
        for rank in report.ranks
    )
    return Chart(
        f"Each rank's memory by category, step {report.step}",
        f"Bytes by category of each of {counted(len(drawn), 'rank')}.",
        figures.stacked_bars(labels, stacks, axis="rank", capacity=_capacity(drawn), marks=marks),
        Table(f"memory by category, step {report.step}", columns, rows),
        "The categories are each at its highest, which is no one moment. " + note + _beyond(drawn),
    )


def boundary_table(report: MemoryReport) -> Table:
    """Every figure of every rank, but those that no rank can say."""
    names = (
        *ACCOUNTED, "offloaded", "accounted", "live", "unattributed", "peak", "reserved", "non_torch",
        "device_used", "capacity",
    )  # fmt: skip
    known = [name for name in names if any(getattr(rank, name) is not None for rank in report.ranks)]
    retries = any(rank.alloc_retries is not None for rank in report.ranks)
    columns = (*_place_columns(report), "device", *known, *(("alloc_retries",) if retries else ()))
    rows = tuple(
        (
            *_place(rank, report),
            rank.device,
            *(Bytes(getattr(rank, name)) for name in known),
            *((rank.alloc_retries,) if retries else ()),
        )
        for rank in report.ranks
    )
    unknown = [name for name in names if name not in known]
    note = f"What the device cannot say has no column: {', '.join(unknown)}." if unknown else ""
    return Table(f"every rank at the boundary of step {report.step}", columns, rows, note)


def timeline_chart(profile: StepProfile, capacity: int | None = None) -> Chart:
    """A rank's deep step over time, and its phases as a table."""
    used = [kind for kind in KINDS if any(phase.at_peak.get(kind) for phase in profile.phases)]
    kept, note = thinned(len(profile.phases), ROWS, "phases", f"profile/rank_{profile.rank}.json")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            deep_step.named(phase),
            f"{1e3 * phase.start_s:,.2f}",
            f"{1e3 * phase.end_s:,.2f}",
            Bytes(phase.peak_bytes),
            *(Bytes(phase.at_peak.get(kind)) for kind in used),
        )
        for phase in (profile.phases[n] for n in kept)
    )
    notes = []
    if len(profile.times_s) > deep_step.CURVE_POINTS:
        drawn = len(deep_step.kept_moments(profile))
        recorded = len(profile.times_s)  # long curves are thinned when they are recorded
        notes.append(f"Drawn are {drawn:,} of the {recorded:,} moments that the record keeps, the highest among them.")
    if len(profile.spans) > deep_step.SPANS:
        notes.append(f"{deep_step.SPANS} of {len(profile.spans):,} calls of modules are drawn, the longest.")
    return Chart(
        "Alive over the step, by kind",
        f"Memory of rank {profile.rank} over step {profile.step}; its peak is {in_bytes(profile.peak_bytes)} in "
        f"{profile.phase}, after {1e3 * profile.peak_s:,.1f} ms of {1e3 * profile.duration_s:,.1f} ms.",
        deep_step.timeline(profile, capacity),
        Table("the highest moment of each phase", ("phase", "from, ms", "to, ms", "peak", *used), rows, note),
        " ".join(notes),
    )


def at_peak_tiles(profile: StepProfile) -> Chart:
    """What is alive at a rank's peak: area is bytes."""
    listed = profile.holdings[:ROWS]
    smaller = sum(one.nbytes for one in profile.holdings[ROWS:]) + profile.rest_bytes
    whole = profile.peak_bytes or 1
    rows: list[tuple[Cell, ...]] = [
        (
            one.kind, one.module or "-", one.source, "-" if one.shape is None else " × ".join(map(str, one.shape)),
            one.dtype or "-", one.count, Bytes(one.nbytes), Share(one.nbytes / whole),
        )
        for one in listed
    ]  # fmt: skip
    if smaller:
        rows.append(("smaller ones", "", "", "", "", None, Bytes(smaller), Share(smaller / whole)))
    columns = ("kind", "module", "made by", "shape", "dtype", "count", "bytes", "of the peak")
    return Chart(
        f"Alive at the peak: {in_bytes(profile.peak_bytes)} in {profile.phase}",
        f"What rank {profile.rank} holds at its peak, by kind, module and operation; areas are bytes.",
        deep_step.at_peak(profile),
        Table("alive at the peak, heaviest first", columns, tuple(rows)),
        f"Gray: smaller ones, {in_bytes(profile.rest_bytes)}." if profile.rest_bytes else "",
    )


def steps_chart(
    title: str,
    unit: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    from_zero: bool,
) -> Chart:
    """Values over steps; of long runs, some of them."""
    drawn, notes = {}, []
    for name, (places, values) in curves.items():
        kept, note = thinned(len(places), POINTS, "steps", "metrics.jsonl")
        notes.append(note)
        drawn[name] = ([places[n] for n in kept], [_finite(values[n]) for n in kept])
    rows = [
        (int(place), name, value)
        for name, (places, values) in curves.items()
        for place, value in zip(places, values, strict=True)
    ]
    kept, rows_note = thinned(len(rows), ROWS, "values", "metrics.jsonl")
    several = len(curves) > 1
    return Chart(
        title,
        f"{title} over steps.",
        figures.lines(drawn, x="step", y=unit, from_zero=from_zero),
        Table(
            title,
            ("step", *(("of",) if several else ()), unit),
            tuple((step, *((name,) if several else ()), value) for step, name, value in (rows[n] for n in kept)),
            rows_note,
        ),
        " ".join(dict.fromkeys(filter(None, notes))),
    )


def shown_profiles(profiles: Sequence[StepProfile], most: int) -> tuple[StepProfile, ...]:
    """The ranks whose deep step is shown, heaviest first: the heaviest of each stage, then the heaviest of all."""
    by_weight = sorted(profiles, key=lambda profile: (-profile.peak_bytes, profile.rank))
    firsts = list({profile.stage: profile for profile in reversed(by_weight)}.values())
    firsts.sort(key=by_weight.index)
    chosen = [*firsts, *(profile for profile in by_weight if profile not in firsts)][:most]
    return tuple(sorted(chosen, key=by_weight.index))


def _place_columns(report: MemoryReport) -> tuple[str, ...]:
    return ("rank", "stage") if any(rank.stage is not None for rank in report.ranks) else ("rank",)


def _place(rank: RankMemory, report: MemoryReport) -> tuple[Cell, ...]:
    return (rank.rank, rank.stage)[: len(_place_columns(report))]


def _label(rank: RankMemory) -> str:
    return str(rank.rank) if rank.stage is None else f"{rank.rank} (stage {rank.stage})"


def _drawn(ranks: Sequence[RankMemory]) -> tuple[Sequence[RankMemory], str]:
    """The ranks of a chart, and what it leaves out."""
    if len(ranks) <= BARS:
        return ranks, ""
    by_weight = sorted(ranks, key=lambda r: r.peak_or_accounted or 0, reverse=True)
    return by_weight[:BARS], f"The {BARS} heaviest of {len(ranks)} ranks, heaviest first; the table has all. "


def _capacity(ranks: Sequence[RankMemory]) -> int | None:
    return min((rank.capacity for rank in ranks if rank.capacity is not None), default=None)


def _beyond(ranks: Sequence[RankMemory]) -> str:
    """The capacity, where it lies far above what is drawn."""
    capacity = _capacity(ranks)
    highest = max((r.peak_or_accounted or 0 for r in ranks), default=0)
    if capacity is None or capacity <= figures.CAPACITY_IN_SIGHT * highest:
        return ""
    return f"The device's capacity, {in_bytes(capacity)}, lies above the chart."


def _finite(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return value if value is not None and abs(value) < float("inf") else None


def thinned(count: int, most: int, what: str, where: object) -> tuple[Sequence[int], str]:
    """Which of many to show, the first and the last among them, and what is said about the others."""
    if count <= most:
        return range(count), ""
    kept = [n * (count - 1) // (most - 1) for n in range(most)]
    return kept, f"{most:,} of {count:,} {what} are shown, evenly spread; all are in {where}."
