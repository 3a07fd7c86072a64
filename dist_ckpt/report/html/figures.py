"""Figures for charts, as Plotly's JSON. They name their colors, which ``page.css`` has for light and for dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.memory.records import GIB, MIB, byte_unit

Figure = Mapping[str, Any]

SERIES = tuple(f"$s{n}" for n in range(8))
"""Colors of things that have none of their own, such as runs; more than eight share them."""

_STACK = ("params", "grads", "optimizer", "buffers", "other", "unsharded", "communication", "activations", "recompute")
STACKED = (*_STACK, *(kind for kind in KINDS if kind not in _STACK))
"""What stands on what: below, what stays all step long; above, what comes and goes."""

CAPACITY_IN_SIGHT = 3.0
"""A capacity of more times what is used is said, not drawn: a line up there would flatten everything below it."""


@dataclass(frozen=True)
class Scale:
    """Bytes on an axis."""

    unit: str

    @staticmethod
    def of(counts: Sequence[int | None]) -> Scale:
        return Scale(byte_unit(counts))

    def __call__(self, nbytes: float) -> float:
        return float(f"{nbytes / (GIB if self.unit == 'GiB' else MIB):.6g}")


def stacked_bars(
    labels: Sequence[str],
    stacks: Mapping[str, Sequence[int]],
    *,
    axis: str,
    capacity: int | None = None,
    marks: Mapping[str, Sequence[int | None]] | None = None,
) -> Figure:
    """A bar a label; each stack is one color of every bar, in bytes.

    Args:
        axis: what the labels are.
        capacity: a line across, if it is in sight (:data:`CAPACITY_IN_SIGHT`).
        marks: figures beside the stacks, a short line across each bar.
    """
    totals = [sum(values) for values in zip(*stacks.values(), strict=True)]
    drawn_marks = marks or {}
    highest = max([*totals, *(value for values in drawn_marks.values() for value in values if value is not None)])
    scale, few = Scale.of([highest]), len(labels) <= 16
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": list(labels),
            "y": [scale(value) for value in values],
            "marker": {"color": f"${name}", "line": {"color": "$card", "width": 0.5 if few else 0}, **pattern(name)},
            "hovertemplate": f"{axis} %{{x}}: %{{y:,.3f}} {scale.unit}",
        }
        for name, values in _in_order(stacks)
        if any(values)
    ]
    if few:
        data.append(_totals(labels, totals, scale))
    for name, values in drawn_marks.items():
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": list(labels),
                "y": [None if value is None else scale(value) for value in values],
                "marker": {"symbol": "line-ew-open", "size": 26 if few else 8, "color": "$ink", "line": {"width": 2}},
                "hovertemplate": f"{axis} %{{x}}: %{{y:,.3f}} {scale.unit}",
            }
        )
    layout: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.3 if few else 0.05,
        "height": 400,
        "hovermode": "closest",
        "xaxis": {"type": "category", "title": {"text": axis}},
        "yaxis": {"title": {"text": scale.unit}, "rangemode": "tozero"},
    }
    if capacity is not None and capacity <= CAPACITY_IN_SIGHT * highest:
        layout |= capacity_line(capacity, scale)
        layout["yaxis"]["range"] = [0, scale(1.08 * max(highest, capacity))]
    return {"data": data, "layout": layout}


def grouped_bars(labels: Sequence[str], groups: Mapping[str, Sequence[int | None]], *, axis: str) -> Figure:
    """Bars side by side, a group a label, in bytes."""
    scale = Scale.of([value for values in groups.values() for value in values])
    return {
        "data": [
            {
                "type": "bar",
                "name": name,
                "x": list(labels),
                "y": [None if value is None else scale(value) for value in values],
                "marker": {"color": SERIES[n % len(SERIES)]},
                "hovertemplate": f"{axis} %{{x}}: %{{y:,.3f}} {scale.unit}",
            }
            for n, (name, values) in enumerate(groups.items())
        ],
        "layout": {
            "barmode": "group",
            "bargap": 0.35 if len(labels) > 2 else 0.6,
            "height": 340,
            "xaxis": {"type": "category", "title": {"text": axis}},
            "yaxis": {"title": {"text": scale.unit}, "rangemode": "tozero"},
        },
    }


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    x: str,
    y: str,
    from_zero: bool = True,
    height: int = 260,
) -> Figure:
    """Curves over one axis.

    Args:
        curves: for each name its places and values.
        from_zero: whether the axis of values starts at zero.
    """
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers" if len(places) <= 30 else "lines",
                "name": name,
                "x": list(places),
                "y": list(values),
                "connectgaps": True,
                "line": {"color": SERIES[n % len(SERIES)], "width": 2},
                "marker": {"size": 5},
                "hovertemplate": f"{x} %{{x}}: %{{y:,.4~g}} {y}",
            }
            for n, (name, (places, values)) in enumerate(curves.items())
        ],
        "layout": {
            "height": height,
            "showlegend": len(curves) > 1,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": x},
                **_whole_numbers([place for places, _ in curves.values() for place in places]),
            },
            "yaxis": {"title": {"text": y}, "rangemode": "tozero" if from_zero else "normal"},
        },
    }


@dataclass(frozen=True)
class Trade:
    """One choice: what it takes in memory and in time."""

    label: str
    step_s: float
    peak_bytes: int


def pareto_front(trades: Sequence[Trade]) -> tuple[int, ...]:
    """Which choices no other one beats, from the fastest to the smallest: none is as good in both and better in one.

    >>> pareto_front([Trade("none", 1.0, 9), Trade("full", 1.3, 3), Trade("worse", 1.4, 4), Trade("some", 1.1, 5)])
    (0, 3, 1)
    """
    front = [
        n
        for n, one in enumerate(trades)
        if not any(
            other.step_s <= one.step_s
            and other.peak_bytes <= one.peak_bytes
            and (other.step_s, other.peak_bytes) != (one.step_s, one.peak_bytes)
            for other in trades
        )
    ]
    return tuple(sorted(front, key=lambda n: (trades[n].step_s, trades[n].peak_bytes)))


def pareto(trades: Sequence[Trade], memory: str = "peak of the heaviest rank") -> Figure:
    """Peak against step time: a point a choice, and a line through those that no other one beats.

    Args:
        memory: what the bytes are.
    """
    scale, front = Scale.of([trade.peak_bytes for trade in trades]), pareto_front(trades)
    places = [(trade.step_s, scale(trade.peak_bytes)) for trade in trades]
    colors = ["$activations" if n in front else "$soft" for n in range(len(trades))]
    hover = f"%{{text}}: %{{y:,.3f}} {scale.unit}, %{{x:,.4~g}} s"
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "Pareto-optimal",
                "x": [places[n][0] for n in front],
                "y": [places[n][1] for n in front],
                "line": {"color": "$activations", "width": 1.5, "dash": "dot"},
                "hoverinfo": "skip",
            },
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": "",
                "x": [place[0] for place in places],
                "y": [place[1] for place in places],
                "text": [trade.label for trade in trades],
                "textposition": ["top center" if n % 2 == 0 else "bottom center" for n in range(len(trades))],
                "marker": {"size": 11, "color": colors, "line": {"color": "$card", "width": 1}},
                "cliponaxis": False,
                "hovertemplate": f"{hover}<extra></extra>",
            },
        ],
        "layout": {
            "height": 400,
            "showlegend": False,
            "hovermode": "closest",
            "xaxis": {"title": {"text": "step time, s"}, **_room([place[0] for place in places], 0.15)},
            "yaxis": {"title": {"text": f"{memory}, {scale.unit}"}, "rangemode": "tozero"},
        },
    }


def _whole_numbers(places: Sequence[float]) -> dict[str, Any]:
    """An axis of what is counted, such as steps, has no marks between: on a short one Plotly would put some there."""
    span = max(places, default=0) - min(places, default=0)
    return {"tickformat": ",d", **({"dtick": 1} if span <= 10 else {})}


def _room(values: Sequence[float], share: float) -> dict[str, Any]:
    """A range of an axis with room for labels on both sides."""
    least, most = min(values), max(values)
    room = max(share * (most - least), 0.05 * most)
    return {"range": [least - room, most + room]}


def _in_order(stacks: Mapping[str, Sequence[int]]) -> list[tuple[str, Sequence[int]]]:
    places = {kind: n for n, kind in enumerate(STACKED)}
    return sorted(stacks.items(), key=lambda item: places.get(item[0], len(places)))


def pattern(name: str) -> dict[str, Any]:
    """What nobody owns is hatched: it stands out without its color too."""
    hatch = {"shape": "/", "size": 6, "solidity": 0.35, "fgcolor": "$card", "fillmode": "overlay"}
    return {"pattern": hatch} if name == "unattributed" else {}


def _totals(labels: Sequence[str], totals: Sequence[int], scale: Scale) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(labels),
        "y": [scale(total) for total in totals],
        "text": [f"{scale(total):,.1f}" if scale(total) >= 10 else f"{scale(total):.3g}" for total in totals],
        "textposition": "top center",
        "cliponaxis": False,
        "showlegend": False,
        "hoverinfo": "skip",
    }


def capacity_line(capacity: int, scale: Scale) -> dict[str, Any]:
    """A line across a chart, and what it is, as parts of a layout."""
    place, text = scale(capacity), f"capacity {scale(capacity):,.1f} {scale.unit}"
    line = {"color": "$bad", "width": 1.5, "dash": "dash"}
    return {
        "shapes": [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": place, "y1": place, "line": line}],
        "annotations": [
            {
                "xref": "paper", "x": 1, "xanchor": "right", "y": place, "yanchor": "bottom", "text": text,
                "showarrow": False, "font": {"color": "$bad"},
            }
        ],
    }  # fmt: skip
