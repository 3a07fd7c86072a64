"""The deep step of one rank, as figures: what is alive over time, and what fills memory at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dist_ckpt.memory.profile.step_profile import Phase, StepProfile
from dist_ckpt.memory.records import in_bytes
from dist_ckpt.report.html.figures import CAPACITY_IN_SIGHT, STACKED, Figure, Scale, capacity_line, pattern

CURVE_POINTS = 400
"""Moments of a rank's curves in a page; of those between, the highest."""

SPANS = 400
"""Calls of modules that are drawn of a rank; the longest."""

_LANES = ("backward", "recompute", "forward", "phase")
_WORK_COLORS = {"forward": "$forward", "recompute": "$recompute", "backward": "$backward"}
_PHASE_COLORS = _WORK_COLORS | {"loss": "$loss", "optimizer": "$optimizer-step", "other": "$soft"}


def named(phase: Phase) -> str:
    """``forward 2`` is that of the third micro-batch."""
    return phase.name if phase.micro_batch is None else f"{phase.name} {phase.micro_batch}"


def kept_moments(profile: StepProfile, most: int = CURVE_POINTS) -> tuple[int, ...]:
    """Which moments of the timeline to draw: of equal parts of the step the highest one, and the first and the last."""
    count = len(profile.times_s)
    if count <= most:
        return tuple(range(count))
    totals = [sum(values) for values in zip(*profile.timeline.values(), strict=True)]
    edges = [1 + n * (count - 2) // (most - 2) for n in range(most - 1)]
    highest = (max(range(a, b), key=totals.__getitem__) for a, b in pairwise(edges))
    return (0, *highest, count - 1)


def timeline(profile: StepProfile, capacity: int | None = None) -> Figure:
    """What is alive over the step, by kind; below it which phase it is in and which module runs."""
    moments, scale = kept_moments(profile), Scale.of([profile.peak_bytes])
    milliseconds = [round(1e3 * profile.times_s[n], 4) for n in moments]
    areas: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "alive",
            "name": kind,
            "x": milliseconds,
            "y": [scale(profile.timeline[kind][n]) for n in moments],  # type: ignore[index]
            "line": {"width": 0, "shape": "hv", "color": f"${kind}"},
            "fillcolor": f"${kind}",
            "hovertemplate": f"%{{y:,.3f}} {scale.unit}",
            **({"fillpattern": pattern(kind)["pattern"]} if pattern(kind) else {}),
        }
        for kind in STACKED
        if any(profile.timeline.get(kind, ()))  # type: ignore[call-overload]
    ]
    totals = [sum(profile.timeline[kind][n] for kind in profile.timeline) for n in moments]
    everything = {
        "type": "scatter",
        "mode": "lines",
        "name": "all",
        "x": milliseconds,
        "y": [scale(total) for total in totals],
        "line": {"width": 0, "color": "$ink"},
        "text": [_doing(profile, profile.times_s[n]) for n in moments],
        "hovertemplate": f"<b>%{{y:,.3f}} {scale.unit}</b>, %{{text}}<extra></extra>",
        "showlegend": False,
    }
    peak_ms = 1e3 * profile.peak_s
    on_the_right = profile.peak_s > 0.6 * profile.duration_s
    layout: dict[str, Any] = {
        "height": 520,
        "bargap": 0.12,
        "barmode": "overlay",
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "xaxis": {
            "title": {"text": "ms from the start of the step"}, "anchor": "y2", "range": _whole(profile),
            "unifiedhovertitle": {"text": "%{x:,.2f} ms"},
        },
        "yaxis": {"title": {"text": scale.unit}, "domain": [0.36, 1], "range": [0, scale(1.12 * profile.peak_bytes)]},
        "yaxis2": {
            "domain": [0, 0.31], "type": "category", "categoryorder": "array", "categoryarray": list(_LANES),
            "range": [-0.6, len(_LANES) - 0.4], "showgrid": False,
        },
        "shapes": [_upright(peak_ms, "$ink", "dot"), *_borders(profile.phases)],
        "annotations": [
            {
                "x": peak_ms, "y": scale(profile.peak_bytes), "yanchor": "bottom", "showarrow": False,
                "xanchor": "right" if on_the_right else "left",
                "text": f"<b>{scale(profile.peak_bytes):,.4g} {scale.unit}</b> in {profile.phase}",
            }
        ],
    }  # fmt: skip
    if capacity is not None and capacity <= CAPACITY_IN_SIGHT * profile.peak_bytes:
        across = capacity_line(capacity, scale)
        layout["shapes"] += across["shapes"]
        layout["annotations"] += across["annotations"]
        layout["yaxis"]["range"] = [0, max(1.08 * scale(capacity), layout["yaxis"]["range"][1])]
    return {"data": [everything, *areas, _phase_lane(profile.phases), *_work_lanes(profile)], "layout": layout}


def at_peak(profile: StepProfile) -> Figure:
    """What is alive at the peak, as nested areas: kinds, in them blocks, in these what made it."""
    tiles: dict[tuple[str, ...], int] = defaultdict(int)
    for one in profile.holdings:
        block, rest = _block_and_rest(one.module)
        path = ("all", one.kind, block, f"{rest}<br>{one.source}" if rest else one.source)
        for depth in range(1, len(path) + 1):
            tiles[path[:depth]] += one.nbytes
    if profile.rest_bytes > 0:
        tiles["all",] += profile.rest_bytes
        tiles["all", "smaller ones"] = profile.rest_bytes
    colors = [f"${path[1]}" if path[1:] and path[1] in profile.at_peak else "$soft" for path in tiles]
    return {
        "data": [
            {
                "type": "treemap",
                "ids": ["/".join(path) for path in tiles],
                "parents": ["/".join(path[:-1]) for path in tiles],
                "labels": [path[-1] for path in tiles],
                "values": list(tiles.values()),
                "text": [in_bytes(nbytes) for nbytes in tiles.values()],
                "branchvalues": "total",
                "root": {"color": "$soft"},
                "marker": {
                    "colors": colors,
                    "line": {"color": "$card", "width": 1},
                    "pad": {"t": 20, "l": 3, "r": 3, "b": 3},
                },
                "textfont": {"color": "$card"},
                "texttemplate": "%{label}<br>%{text}",
                "hovertemplate": "%{customdata}<br>%{text}<extra></extra>",
                "customdata": [" › ".join(path[1:]).replace("<br>", " › ") or "the peak" for path in tiles],
                "pathbar": {"visible": False},
                "tiling": {"pad": 1},
                "sort": True,
            }
        ],
        "layout": {
            "height": 440,
            "uniformtext": {"mode": "hide", "minsize": 10},
            "margin": {"l": 0, "r": 0, "t": 4, "b": 0},
        },
    }


def schedule(profiles: Mapping[int, StepProfile]) -> Figure:
    """What each stage of a pipeline does over the step, and how many micro-batches it holds.

    Args:
        profiles: of one rank a stage.
    """
    stages = sorted(profiles)
    lanes = [f"stage {stage}" for stage in reversed(stages)]
    bars = []
    for work in ("forward", "loss", "backward", "optimizer"):
        drawn = [(stage, phase) for stage in stages for phase in profiles[stage].phases if phase.name == work]
        bars.append(
            _lane(
                work,
                [f"stage {stage}" for stage, _ in drawn],
                [(phase.start_s, phase.end_s) for _, phase in drawn],
                ["" if phase.micro_batch is None else str(phase.micro_batch) for _, phase in drawn],
                _PHASE_COLORS[work],
                [f"stage {stage}, {named(phase)}" for stage, phase in drawn],
                show=True,
            )
        )
    held = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"in flight, stage {stage}",
            "x": [round(1e3 * moment, 4) for moment, _ in in_flight_curve(profiles[stage])],
            "y": [count for _, count in in_flight_curve(profiles[stage])],
            "line": {"shape": "hv", "width": 2, "color": f"$s{n % 8}"},
            "hovertemplate": "%{y}",
        }
        for n, stage in enumerate(stages)
    ]
    longest = max(profiles.values(), key=lambda profile: profile.duration_s)
    share = min(0.6, 0.16 * len(stages))
    layout = {
        "height": 260 + 46 * len(stages),
        "bargap": 0.25,
        "barmode": "overlay",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "hovermode": "closest",
        "xaxis": {"title": {"text": "ms from the start of each stage's step"}, "range": _whole(longest), "anchor": "y"},
        "yaxis": {"title": {"text": "in flight"}, "domain": [0, 0.93 - share], "dtick": 1, "rangemode": "tozero"},
        "yaxis2": {
            "domain": [1 - share, 1], "type": "category", "categoryorder": "array", "categoryarray": lanes,
            "showgrid": False,
        },
    }  # fmt: skip
    return {"data": [*bars, *held], "layout": layout}


def in_flight_curve(profile: StepProfile) -> tuple[tuple[float, int], ...]:
    """How many micro-batches have been through forward and not yet through backward: moments in s, and counts."""
    steps = [(0.0, 0)]
    forwards = {p.micro_batch: p.end_s for p in profile.phases if p.name in ("forward", "loss")}
    backwards = {p.micro_batch: p.end_s for p in profile.phases if p.name == "backward"}
    steps += [(moment, 1) for number, moment in forwards.items() if number is not None]
    steps += [(moment, -1) for number, moment in backwards.items() if number in forwards and number is not None]
    curve, count = [], 0
    for moment, change in sorted(steps):
        count += change
        curve.append((moment, count))
    return (*curve, (profile.duration_s, count))


def _doing(profile: StepProfile, moment: float) -> str:
    """The phase at a moment, and the module that runs, the innermost one."""
    phase = next((named(one) for one in reversed(profile.phases) if one.start_s <= moment), "")
    running = [span for span in profile.spans if span.start_s <= moment < span.end_s]
    if not running:
        return phase
    span = max(running, key=lambda one: one.start_s)
    return f"{phase}: {span.work} of {span.module or 'the model'}"


def _whole(profile: StepProfile) -> list[float]:
    return [0.0, 1e3 * profile.duration_s]


def _borders(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Thin lines where phases meet; none where there are too many to tell apart."""
    return [_upright(1e3 * phase.start_s, "$line", "solid") for phase in phases[1:]] if len(phases) <= 40 else []


def _upright(place: float, color: str, dash: str) -> dict[str, Any]:
    line = {"color": color, "width": 1, "dash": dash}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": place, "x1": place, "line": line}


def _phase_lane(phases: Sequence[Phase]) -> dict[str, Any]:
    names = [named(phase) for phase in phases]
    places = [(phase.start_s, phase.end_s) for phase in phases]
    colors = [_PHASE_COLORS[phase.name] for phase in phases]
    return _lane("phase", ["phase"] * len(phases), places, names, colors)


def _work_lanes(profile: StepProfile) -> list[dict[str, Any]]:
    longest = sorted(profile.spans, key=lambda span: span.start_s - span.end_s)[:SPANS]
    lanes = []
    for work, color in _WORK_COLORS.items():
        spans = [span for span in longest if span.work == work]
        if spans:
            names = [span.module or "the model" for span in spans]
            places = [(span.start_s, span.end_s) for span in spans]
            lanes.append(_lane(work, [work] * len(spans), places, [name.rpartition(".")[2] for name in names], color))
    return lanes


def _lane(
    name: str,
    lanes: Sequence[str],
    places: Sequence[tuple[float, float]],
    texts: Sequence[str],
    color: str | Sequence[str],
    hover: Sequence[str] | None = None,
    show: bool = False,
) -> dict[str, Any]:
    """Bars from one moment to another, in lanes.

    Args:
        hover: what each says to a pointer; None where it says nothing, as Plotly looks for bars at their lengths when
            it speaks of one moment in all curves.
    """
    milliseconds = [1e3 * (end - start) for start, end in places]
    told = {"hovertemplate": "%{customdata}<extra></extra>"}
    said: dict[str, Any] = (
        {"hoverinfo": "skip"}
        if hover is None
        else {"customdata": [f"{text}: {one:,.3g} ms" for text, one in zip(hover, milliseconds, strict=True)], **told}
    )
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "yaxis": "y2",
        "y": list(lanes),
        "base": [round(1e3 * start, 4) for start, _ in places],
        "x": [round(one, 4) for one in milliseconds],
        "text": list(texts),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "$card"},
        "marker": {"color": color if isinstance(color, str) else list(color), "line": {"color": "$card", "width": 0.5}},
        "showlegend": show,
        **said,
    }


def _block_and_rest(module: str | None) -> tuple[str, str]:
    """A module's block and its place in there: ``layers.3`` and ``attention.wq``."""
    if module is None:
        return "outside any module", ""
    parts = module.split(".")
    end = next((n for n, part in enumerate(parts, start=1) if part.isdigit()), 1)
    return ".".join(parts[:end]) or "the model itself", ".".join(parts[end:])
