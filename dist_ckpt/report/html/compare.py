"""Several runs side by side: what each policy takes in memory and time, and where their plans differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.memory.records import ACCOUNTED, in_bytes
from dist_ckpt.report.html import charts, figures
from dist_ckpt.report.html.parts import Bytes, Cell, Chart, Panel, Panels, Part, Table
from dist_ckpt.report.html.plan_tree import plan_differences
from dist_ckpt.report.run_data import RunData, policy_text


def names_of(runs: Sequence[RunData]) -> tuple[str, ...]:
    """What to call each run: by engine and policy where that tells them apart, else by folder too."""
    labels = [run.label for run in runs]
    names = [
        label if labels.count(label) == 1 else f"{label} ({run.name})" for label, run in zip(labels, runs, strict=True)
    ]
    return tuple(name if names.count(name) == 1 else f"{name}, {n + 1}" for n, name in enumerate(names))


def overview(runs: Sequence[RunData]) -> tuple[Part, ...]:
    """A row a run, and the peak of each against its step time."""
    names = names_of(runs)
    columns = (
        "run", "ranks", "peak", "accounted", "step time, s", "tokens/s", "samples/s", "samples/s/GiB",
        "recomputed FLOPs", "last loss", "folder",
    )  # fmt: skip
    table = Table("runs", columns, tuple(_row(name, run) for name, run in zip(names, runs, strict=True)))
    peaks, note = _comparable(runs)
    trades = [
        figures.Trade(name, run.step_s, nbytes)
        for name, run, nbytes in zip(names, runs, peaks, strict=True)
        if run.step_s is not None and nbytes is not None
    ]
    if not trades:
        return (table,)
    if missing := [name for name in names if name not in [trade.label for trade in trades]]:
        note = f"Not in the chart: {', '.join(missing)}. {note}"
    if len({run.samples for run in runs}) > 1:
        note += " The runs' updates differ in samples: samples/s, in the table, tells which is faster."
    measured = any(peak is not None for peak in _peaks(runs))
    memory = "peak of the heaviest rank" if measured else "accounted on the heaviest rank"
    chart = Chart(
        "Memory against time: lower left is better",
        "A point a run: its step time, and the memory of its heaviest rank.",
        figures.pareto(trades, memory),
        table,
        note.strip(),
    )
    return (chart,)


def memory(runs: Sequence[RunData]) -> tuple[Part, ...]:
    """What fills the heaviest rank of each run."""
    named = [(name, run.memory.heaviest) for name, run in zip(names_of(runs), runs, strict=True) if run.memory]
    deep = [(name, rank) for name, rank in named if rank.at_peak is not None]
    found, kinds = (deep, KINDS) if deep else (named, ACCOUNTED)
    if not found:
        return ()
    stacks: dict[str, list[int]] = {
        kind: [(rank.at_peak or {}).get(kind, 0) if deep else getattr(rank, kind) or 0 for _, rank in found]
        for kind in kinds
    }
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, rank.rank, *(Bytes(stacks[kind][n]) for kind in kinds), Bytes(sum(stacks[kind][n] for kind in kinds)))
        for n, (name, rank) in enumerate(found)
    )
    what = "at its peak" if deep else "by category"
    note = "" if deep else "Each category at its highest, which is no one moment."
    if missing := [name for name in names_of(runs) if name not in [one for one, _ in found]]:
        note = f"Not in the chart: {', '.join(missing)}. {_NO_PEAK if deep else ''}"
    chart = Chart(
        f"The heaviest rank of each run {what}",
        f"Bytes by kind of the heaviest rank of {len(found)} runs.",
        figures.stacked_bars([name for name, _ in found], stacks, axis="run"),
        Table(f"the heaviest rank {what}", ("run", "rank", *kinds, "sum"), rows),
        note,
    )
    return (chart,)


_NO_PEAK = "A run has a measured peak on an accelerator, or with report.profile_step."


def _peaks(runs: Sequence[RunData]) -> list[int | None]:
    return [run.memory.heaviest.peak if run.memory is not None else None for run in runs]


def _comparable(runs: Sequence[RunData]) -> tuple[list[int | None], str]:
    """Bytes of each run's heaviest rank that mean the same, and what is to be said about them.

    What is accounted is a sum of maxima, and leaves out what is temporary: beside a peak it would look like a gain.
    """
    peaks = _peaks(runs)
    if any(peak is not None for peak in peaks):
        return peaks, "" if None not in peaks else _NO_PEAK
    return [
        run.heaviest_bytes for run in runs
    ], "No run has a measured peak: these are sums of each category's highest."


def deep_steps(runs: Sequence[RunData]) -> tuple[Part, ...]:
    """The deep step of each run's heaviest rank."""
    panels = []
    for name, run in zip(names_of(runs), runs, strict=True):
        if run.profiles:
            profile = charts.shown_profiles(run.profiles, 1)[0]
            title = f"{name}, rank {profile.rank}: peak {in_bytes(profile.peak_bytes)} in {profile.phase}"
            panels.append(Panel(title, (charts.timeline_chart(profile), charts.at_peak_tiles(profile))))
    return (Panels("Run", tuple(panels)),) if panels else ()


def losses(runs: Sequence[RunData]) -> tuple[Part, ...]:
    """Each run's loss: a policy leaves it as it was."""
    curves = {
        name: ([line["step"] for line in run.steps], [line["loss"] for line in run.steps])
        for name, run in zip(names_of(runs), runs, strict=True)
        if run.steps
    }
    return (charts.steps_chart("Loss", "loss", curves, from_zero=False),) if curves else ()


def differences(runs: Sequence[RunData]) -> tuple[Part, ...]:
    """What the runs do otherwise: with each block, and in their options."""
    named = list(zip(names_of(runs), runs, strict=True))
    planned = [(name, run.plan) for name, run in named if run.plan is not None]
    parts: list[Part] = []
    if planned:
        parts.append(plan_differences([name for name, _ in planned], [plan for _, plan in planned]))
    configured = [(name, dict(_leaves(run.config))) for name, run in named if run.config is not None]
    rows = []
    for key in dict.fromkeys(key for _, options in configured for key in options):
        values = [_text(options[key]) if key in options else "-" for _, options in configured]
        if len(set(values)) > 1:
            rows.append((key, *values))
    if rows:
        parts.append(Table("options that differ", ("option", *(name for name, _ in configured)), tuple(rows)))
    return tuple(parts)


def _row(name: str, run: RunData) -> tuple[Cell, ...]:
    heaviest = run.memory.heaviest if run.memory is not None else None
    more = [one.recomputed for one in run.predicted if one.recomputed is not None]
    return (
        name,
        run.world_size,
        Bytes(heaviest.peak if heaviest else None),
        Bytes(heaviest.accounted if heaviest else None),
        run.step_s,
        run.tokens_per_s,
        run.samples_per_s,
        run.samples_per_s_gib,
        f"+{max(more):.1%}" if more else None,
        run.steps[-1]["loss"] if run.steps else None,
        str(run.path),
    )


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a run by key; its policy is one, as it is described: modes have options of their own."""
    for key, value in options.items():
        if prefix + key == "ckpt" and isinstance(value, Mapping):
            yield "ckpt", policy_text(value)
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif prefix + key != "run_dir":  # it always differs
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
