"""The table and the plot of docs/sweeps.md, from what a sweep has measured.

python launch/sweep.py sweep.k=[0,2,4,6,8] … run_dir=outputs/segments
python benchmarks/sweeps.py outputs/segments/results.csv
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.report.html.figures import Trade, pareto_front

DOCS = Path(__file__).resolve().parents[1] / "docs"
MIB = 2**20
COLUMNS = (
    "k", "saved MiB", "peak MiB", "step ms", "interquartile range", "time ÷ none", "FLOPs ÷ none", "samples/s",
    "samples/s/GiB", "loss = none",
)  # fmt: skip


def row_of(one: dict[str, str]) -> str:
    """A line of the table."""
    low, middle, high = (1000 * float(one[name]) for name in ("step_low_s", "step_s", "step_high_s"))
    cells = (
        one["k"],
        *(f"{int(one[name]) / MIB:.3f}" for name in ("saved_bytes", "peak_bytes")),
        f"{middle:.0f}",
        f"{low:.0f}–{high:.0f}",
        *(f"{float(one[name]):.3f}" for name in ("slowdown", "flops_ratio")),
        f"{float(one['samples_per_s']):.2f}",
        f"{float(one['samples_per_s_per_gib']):.1f}",
        "bitwise" if float(one["loss_difference"]) == 0 else f"within {float(one['loss_difference']):.1e}",
    )
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Bytes over the length of segments, and the peak against the step time."""
    pyplot.rcParams["svg.hashsalt"] = "sweeps"  # the same file for the same figures
    figure, (curve, trade) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ks = [int(one["k"]) for one in rows]
    for name, style in (("peak", "s-"), ("saved", "o-")):
        curve.plot(ks, [int(one[f"{name}_bytes"]) / MIB for one in rows], style, label=name)
    curve.set(title="memory over k", xlabel="blocks a segment (0: no policy)", ylabel="MiB", ylim=(0, None), xticks=ks)
    curve.legend()
    trades = [Trade(f"k = {one['k']}", 1000 * float(one["step_s"]), int(one["peak_bytes"])) for one in rows]
    front = [trades[n] for n in pareto_front(trades)]
    trade.plot([one.step_s for one in front], [one.peak_bytes / MIB for one in front], ":", label="Pareto-optimal")
    trade.plot([one.step_s for one in trades], [one.peak_bytes / MIB for one in trades], "o")
    for one in trades:
        trade.annotate(one.label, (one.step_s, one.peak_bytes / MIB), xytext=(4, 5), textcoords="offset points")
    trade.margins(x=0.15, y=0.1)
    trade.set(title="memory against time", xlabel="step, ms", ylabel="peak MiB", ylim=(0, None))
    trade.legend()
    figure.savefig(path, metadata={"Date": None})


def main(results: Path) -> None:
    """Draws the plot, and puts the table in place of the page's own."""
    with results.open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda one: int(one["k"]))
    draw(rows, DOCS / "sweeps.svg")
    page = DOCS / "sweeps.md"
    table = "\n".join((f"| {' | '.join(COLUMNS)} |", "| ---: " * len(COLUMNS) + "|", *map(row_of, rows)))
    text, count = re.subn(r"(?m)^\| k \|.*\n(?:\|.*\n)*", lambda _: f"{table}\n", page.read_text(encoding="utf-8"))
    assert count == 1, "the page has one such table"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
