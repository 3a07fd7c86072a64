"""The table and the plot of docs/sweeps.md, from what a sweep has measured.

python launch/sweep.py sweep.k=[0,2,4,6,8] … run_dir=outputs/segments
python benchmarks/sweeps.py outputs/segments/results.csv
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.memory.records import MIB
from dist_ckpt.report.html.figures import Trade, pareto_front
from dist_ckpt.report.html.parts import Bytes, Table
from dist_ckpt.trainer.sweep.show import read_csv, results_table
from dist_ckpt.trainer.sweep.summary import ResultRow

DOCS = Path(__file__).resolve().parents[1] / "docs"


def markdown(table: Table) -> str:
    """A table as the page has it, the unit beside the names of columns of bytes."""
    of_bytes = [any(isinstance(row[n], Bytes) for row in table.rows) for n in range(len(table.columns))]
    names = [f"{name} {table.unit}" if is_so else name for name, is_so in zip(table.columns, of_bytes, strict=True)]
    rows = ([table.shown(cell) for cell in row] for row in table.rows)
    lines = (names, ["---", *["---:"] * (len(names) - 1)], *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(rows: Sequence[ResultRow], path: Path) -> None:
    """Bytes over the length of segments, and the peak against the step time."""
    pyplot.rcParams["svg.hashsalt"] = "sweeps"  # the same file for the same figures
    figure, (curve, trade) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ks = [one.k for one in rows]
    for name, style in (("peak", "s-"), ("saved", "o-")):
        curve.plot(ks, [getattr(one, f"{name}_bytes") / MIB for one in rows], style, label=name)
    curve.set(title="memory over k", xlabel="blocks a segment (0: no policy)", ylabel="MiB", ylim=(0, None), xticks=ks)
    curve.legend()
    measured = [(one.k, one.step_s, one.peak_bytes) for one in rows]
    trades = [Trade(f"k = {k}", 1000 * step_s, nbytes) for k, step_s, nbytes in measured if step_s and nbytes]
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
    rows = sorted(read_csv(results), key=lambda one: one.k or 0)
    draw(rows, DOCS / "sweeps.svg")
    page = DOCS / "sweeps.md"
    table = markdown(results_table(rows))
    text, count = re.subn(r"(?m)^\| policy \|.*\n(?:\|.*\n)*", lambda _: table, page.read_text(encoding="utf-8"))
    assert count == 1, "the page has one such table"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
