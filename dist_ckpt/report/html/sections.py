"""The sections of a run's page. Each is empty, and left out, where its records are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from dist_ckpt.errors import counted
from dist_ckpt.memory.profile.step_profile import KINDS, StepProfile
from dist_ckpt.memory.records import GIB, MemoryReport, in_bytes
from dist_ckpt.report.advice import RunFacts, advice
from dist_ckpt.report.glossary import MEANINGS
from dist_ckpt.report.html import deep_step, figures
from dist_ckpt.report.html.charts import (
    ROWS,
    at_peak_chart,
    at_peak_tiles,
    boundary_table,
    ledger_chart,
    shown_profiles,
    steps_chart,
    thinned,
    timeline_chart,
)
from dist_ckpt.report.html.parts import (
    Bytes,
    Cell,
    Chart,
    Code,
    Columns,
    Fact,
    Facts,
    Listing,
    Panel,
    Panels,
    Part,
    Table,
)
from dist_ckpt.report.html.plan_tree import plan_tree
from dist_ckpt.report.run_data import RunData
from dist_ckpt.report.run_layout import OUT_OF_MEMORY, RunLayout

PROFILES = 16
"""Ranks whose deep step is in a page: the heaviest of each stage, then the heaviest of all."""


def glance(run: RunData) -> tuple[Part, ...]:
    """What to know first: the worst moment, what it is made of, speed, and what to try next."""
    items = [*_memory_facts(run), *_speed_facts(run)]
    found = _advice(run)
    parts: list[Part] = [Facts(tuple(items))] if items else []
    if grown := _leaks(run):
        parts.append(Listing(grown, "Memory that grows from report to report"))
    if found:
        parts.append(Listing(found, "What to try next, the largest gain first"))
    return tuple(parts)


def out_of_memory(run: RunData) -> tuple[Part, ...]:
    """The ranks that ran out of memory."""
    if not run.post_mortems:
        if (run.exit or {}).get("code") != OUT_OF_MEMORY:
            return ()
        return (
            "No rank had written down what filled its memory when this page was made. What is in oom/ of the run "
            f"folder by now is in a new page: python launch/report.py {run.path}",
        )
    shown = ("rank", "stage", "phase", "module", "requested_bytes", "held_bytes", "limit_bytes")
    rows = tuple(
        tuple(Bytes(one.get(name)) if name.endswith("bytes") else one.get(name) for name in shown)
        for one in run.post_mortems
    )
    columns = tuple(name.replace("_bytes", "").replace("_", " ") for name in shown)
    return (
        Table("ranks that ran out of memory", columns, rows),
        "What was alive there is in oom/rank_r.html of the run folder.",
    )


def memory_per_rank(run: RunData) -> tuple[Part, ...]:
    """Every rank's memory: at its worst moment after a deep step, else by category."""
    report = run.memory
    if report is None:
        return ()
    deep = [rank for rank in report.ranks if rank.at_peak is not None]
    parts: list[Part] = [at_peak_chart(report, deep)] if deep else [ledger_chart(report)]
    if deep and len(deep) < len(report.ranks):
        missing = [str(rank.rank) for rank in report.ranks if rank.at_peak is None]
        parts.append(f"Without a deep step, and so not in the chart: rank {', '.join(missing)}.")
    return (*parts, boundary_table(report))


def the_deep_step(run: RunData) -> tuple[Part, ...]:
    """What each rank's update consisted of, allocation by allocation."""
    if not run.profiles:
        return ()
    shown = shown_profiles(run.profiles, PROFILES)
    intro = f"Step {run.profiles[0].step}, allocation by allocation."
    if left_out := len(run.profiles) - len(shown):
        intro += (
            f" {len(shown)} of {len(run.profiles)} ranks are here, the heaviest of each stage and of all; the other "
            f"{left_out} are in {RunLayout(run.path).profiles}."
        )
    capacities = {rank.rank: rank.capacity for rank in run.memory.ranks} if run.memory else {}
    panels = (
        Panel(_panel_name(profile), (timeline_chart(profile, capacities.get(profile.rank)), at_peak_tiles(profile)))
        for profile in shown
    )
    return (intro, Panels("Rank", tuple(panels)))


def stages(run: RunData) -> tuple[Part, ...]:
    """What each stage of a pipeline holds, and when."""
    ranks = run.memory.ranks if run.memory is not None else ()
    numbers = sorted({rank.stage for rank in ranks if rank.stage is not None})
    if not numbers:
        return ()
    profiles = {
        stage: max((p for p in run.profiles if p.stage == stage), key=lambda p: p.peak_bytes)
        for stage in numbers
        if any(p.stage == stage for p in run.profiles)
    }
    predicted = {one.stage: one for one in run.predicted}
    columns = (
        "stage", "ranks", "parameters", "in flight, predicted", "in flight, seen", "saved, predicted",
        "activations, measured", "peak",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for stage in numbers:
        of_stage, expected, profile = [r for r in ranks if r.stage == stage], predicted.get(stage), profiles.get(stage)
        rows.append(
            (
                str(stage),
                ", ".join(str(rank.rank) for rank in of_stage),
                expected.parameters if expected else None,
                expected.in_flight if expected else None,
                max(count for _, count in deep_step.in_flight_curve(profile)) if profile else None,
                Bytes(expected.saved_bytes if expected else None),
                Bytes(_most(rank.activations for rank in of_stage)),
                Bytes(_most(rank.peak for rank in of_stage)),
            )
        )
    table = Table("stages", columns, tuple(rows))
    if not profiles:
        return (table, "When each stage holds what is recorded with report.profile_step.")
    summary = "Forward and backward of each micro-batch on each stage over the step, and micro-batches in flight."
    return (Chart("Micro-batches on their way", summary, deep_step.schedule(profiles), table),)


def training(run: RunData) -> tuple[Part, ...]:
    """Loss, speed and what speed costs in memory, step by step."""
    if not run.steps:
        return ()
    heaviest, samples = run.heaviest_bytes, run.samples
    curves: list[tuple[str, str, bool, list[float | None]]] = [
        ("Loss", "loss", False, [line["loss"] for line in run.steps]),
        ("Gradient norm", "norm", True, [line["grad_norm"] for line in run.steps]),
        ("Step time", "s", True, [line["step_s"] for line in run.steps]),
        ("Throughput", "tokens/s", True, [line["tokens_per_s"] for line in run.steps]),
    ]
    if samples and heaviest and run.samples_per_s_gib is not None:
        per_gib = [samples / line["step_s"] / (heaviest / GIB) for line in run.steps]
        curves.append(("Samples per second and GiB of the heaviest rank", "samples/s/GiB", True, [*per_gib]))
    curves.append(("Learning rate", "rate", True, [line["lr"] for line in run.steps]))
    places = [line["step"] for line in run.steps]
    charts = [
        steps_chart(title, unit, {unit: (places, values)}, from_zero=from_zero)
        for title, unit, from_zero, values in curves
    ]
    if validated := [line for line in run.steps if "eval_loss" in line]:
        of_validation = ([line["step"] for line in validated], [line["eval_loss"] for line in validated])
        both = {"training": (places, [line["loss"] for line in run.steps]), "validation": of_validation}
        charts[0] = steps_chart("Loss", "loss", both, from_zero=False)
    deep = (
        f"Step {run.profiles[0].step} is the deep one: recording every allocation takes time." if run.profiles else ""
    )
    return (*filter(None, (deep,)), Columns(tuple(charts)))


def predicted(run: RunData) -> tuple[Part, ...]:
    """What the plan should cost, and what it did."""
    if not run.predicted:
        return ()
    ranks = run.reports[-1].ranks if run.reports else ()
    labels = ["all" if one.stage is None else str(one.stage) for one in run.predicted]
    measured = [_most(r.activations for r in ranks if one.stage in (None, r.stage)) for one in run.predicted]
    groups: dict[str, list[int | None]] = {
        "predicted without a policy": [one.baseline_saved_bytes for one in run.predicted],
        "predicted": [one.saved_bytes for one in run.predicted],
        "measured": measured,
    }
    columns = (
        "stage", "in flight", *groups, "measured to predicted", "FLOPs of a micro-batch", "recomputed FLOPs",
    )  # fmt: skip
    rows = tuple(
        (
            label,
            one.in_flight,
            Bytes(one.baseline_saved_bytes),
            Bytes(one.saved_bytes),
            Bytes(seen),
            None if seen is None or not one.saved_bytes else f"{seen / one.saved_bytes - 1:+.2%}",
            f"{one.flops:.4g}",
            f"{one.recomputed:+.1%}" if one.recomputed is not None else None,
        )
        for label, one, seen in zip(labels, run.predicted, measured, strict=True)
    )
    table = Table("activations that wait for backward, and FLOPs", columns, rows)
    summary = "Activations by stage: predicted without a policy, predicted with it, and measured on the heaviest rank."
    figure = figures.grouped_bars(labels, groups, axis="stage")
    return (Chart("Activations that wait for backward", summary, figure, table),)


def over_the_run(run: RunData) -> tuple[Part, ...]:
    """Each report's heaviest rank: what grows here, grows until memory is full."""
    if len(run.reports) < 2:
        return ()
    names = [n for n in ("accounted", "live", "peak", "reserved") if _known(run.reports, n)]
    steps = [report.step for report in run.reports]
    most = {name: [_most(getattr(rank, name) for rank in report.ranks) for report in run.reports] for name in names}
    scale = figures.Scale.of([count for counts in most.values() for count in counts])
    curves = {n: (steps, [None if c is None else scale(c) for c in counts]) for n, counts in most.items()}
    columns = ("step", *(f"{name}, most" for name in names))
    rows: list[tuple[Cell, ...]] = [(step, *(Bytes(most[name][n]) for name in names)) for n, step in enumerate(steps)]
    kept, note = thinned(len(rows), ROWS, "reports", RunLayout(run.path).memory)
    return (
        Chart(
            "The most that any rank held",
            "The highest figures of any rank, report by report.",
            figures.lines(curves, x="step", y=scale.unit),
            Table("memory over the run", columns, tuple(rows[n] for n in kept), note),
        ),
    )


def the_plan(run: RunData) -> tuple[Part, ...]:
    """What is recomputed and what is kept."""
    if run.plan is None:
        return ()
    return (*plan_tree(run.plan), Code("The plan as text", str(run.plan)))


def configuration(run: RunData) -> tuple[Part, ...]:
    """What was asked for."""
    if run.config is None:
        return ()
    return (Code("All options", yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)),)


def how_to_read(run: RunData) -> tuple[Part, ...]:
    """What the words for memory mean."""
    if run.memory is None:
        return ()
    return (Table("what the words mean", ("word", "meaning"), tuple(MEANINGS.items())),)


def missing(run: RunData) -> tuple[Part, ...]:
    """What this page cannot show, and how to get it."""
    absent = {
        "the configuration (config.yaml)": run.config is None,
        "the plan (plan.json)": run.plan is None,
        "any step (metrics.jsonl)": not run.steps,
        "any rank's memory (memory.jsonl)": not run.reports,
        "the deep step, which says what fills memory at the peak: report.profile_step=N records it": not run.profiles,
        "what the plan should cost (cost.json): report.html=true writes it": not run.predicted,
        "how the run ended (exit.json): it is still going on, or was killed": run.exit is None,
    }
    items = tuple((text, "") for text, is_so in absent.items() if is_so)
    return (Listing(items, "The run folder does not have"),) if items else ()


def _leaks(run: RunData) -> tuple[tuple[str, str], ...]:
    """What the last report says of each rank's leak; ranks that say the same stand together."""
    said: dict[str, list[str]] = {}
    for rank in run.reports[-1].ranks if run.reports else ():
        if rank.leak is not None:
            said.setdefault(rank.leak, []).append(str(rank.rank))
    return tuple((text, f"rank {', '.join(ranks)}") for text, ranks in said.items())


def _memory_facts(run: RunData) -> list[Fact]:
    report = run.memory
    if report is None:
        return []
    rank = report.heaviest
    stage = f", stage {rank.stage}" if rank.stage is not None else ""
    known = rank.peak_or_accounted
    where = f"on rank {rank.rank}{stage}"
    if rank.at_peak is not None:
        where += f", in {rank.at_peak['phase']}"
    facts = [Fact("Highest peak" if rank.peak is not None else "Most memory, by category", in_bytes(known), where)]
    if rank.at_peak is not None and known:
        kinds = sorted(KINDS, key=lambda kind: -rank.at_peak[kind])[:2]  # type: ignore[index]
        most = rank.at_peak[kinds[0]] / known
        facts.append(
            Fact(
                "Largest part of it",
                kinds[0],
                f"{most:.0%} of the peak; then {kinds[1]}, {rank.at_peak[kinds[1]] / known:.0%}",
            )
        )
        unknown = rank.at_peak["unattributed"]
        facts.append(Fact("Unattributed", f"{unknown / known:.1%}", f"{in_bytes(unknown)} of the peak"))
    if rank.capacity and known:
        room = rank.capacity - known
        facts.append(Fact("Headroom", in_bytes(room), f"{room / rank.capacity:.0%} of {in_bytes(rank.capacity)}"))
    if len(report.ranks) > 1:
        peaks = [r.peak_or_accounted or 0 for r in report.ranks]
        facts.append(Fact("Lightest rank", in_bytes(min(peaks)), f"of {len(peaks)}"))
    return facts


def _speed_facts(run: RunData) -> list[Fact]:
    facts = []
    if run.step_s is not None and run.tokens_per_s is not None:
        facts.append(Fact("Step time", f"{run.step_s:.4g} s", f"median of {counted(len(run.timed_steps), 'step')}"))
        facts.append(Fact("Throughput", f"{run.tokens_per_s:,.0f} tokens/s"))
    if run.samples_per_s is not None:
        per_gib = run.samples_per_s_gib
        note = f"{per_gib:,.4g} a GiB of the heaviest rank" if per_gib is not None else ""
        facts.append(Fact("Samples per second", f"{run.samples_per_s:,.4g}", note))
    if run.steps:
        facts.append(Fact("Loss", f"{run.steps[-1]['loss']:.4f}", f"after step {int(run.steps[-1]['step'])}"))
    if run.predicted:
        more = [one.recomputed for one in run.predicted if one.recomputed is not None]
        saved = sum(one.saved_bytes for one in run.predicted)
        without = sum(one.baseline_saved_bytes for one in run.predicted)
        if more and saved < without:
            note = f"for {1 - saved / without:.0%} less to keep"
            facts.append(Fact("Recomputed FLOPs", f"+{max(more):.1%}", note))
    return facts


def _advice(run: RunData) -> tuple[tuple[str, str], ...]:
    if run.memory is None:
        return ()
    facts = RunFacts(run.config or {}, run.plan, run.predicted)
    found = advice(run.memory, run.profiles, facts)
    return tuple((one.text, "" if one.gain_bytes is None else f"about {in_bytes(one.gain_bytes)}") for one in found)


def _panel_name(profile: StepProfile) -> str:
    stage = f", stage {profile.stage}" if profile.stage is not None else ""
    return f"{profile.rank}{stage}: peak {in_bytes(profile.peak_bytes)} in {profile.phase}"


def _known(reports: Sequence[MemoryReport], name: str) -> bool:
    return any(getattr(rank, name) is not None for report in reports for rank in report.ranks)


def _most(counts: Any) -> int | None:
    return max((count for count in counts if count is not None), default=None)
