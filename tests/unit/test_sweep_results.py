"""What a sweep says of its runs: rows, the table, the file and the page."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dist_ckpt.trainer.sweep.fit import Fit
from dist_ckpt.trainer.sweep.outcome import Outcome, Status
from dist_ckpt.trainer.sweep.page import sweep_page
from dist_ckpt.trainer.sweep.show import SweepConsole, read_csv, remarks, results_table, write_csv
from dist_ckpt.trainer.sweep.summary import Measured, ResultRow, summarize

MIB = 2**20


def done(*step_s: float, peak: int | None = None, losses: Sequence[float] = (4.0, 2.0)) -> Outcome:
    saved = None if peak is None else peak // 2
    return Outcome(Status.done, losses=tuple(losses), step_s=step_s, saved_bytes=saved, peak_bytes=peak)


def measured(label: str, k: int | None, *rounds: Outcome, **more: Any) -> Measured:
    base: dict[str, Any] = {"flops_ratio": 1.25, "samples": 8, "trials": {}, "trial_samples": {}}
    return Measured(label, k, rounds=dict(enumerate(rounds, 1)), **{**base, **more})


NONE = measured("none", 0, done(0.1, 0.2, 0.3, peak=512 * MIB), done(0.4), flops_ratio=1.0)
FULL = measured("full", None, done(0.3, 0.3, 0.3, peak=64 * MIB), done(0.8))
SEGMENTS = measured(
    "segments (k=2)", 2, done(0.2, 0.6, peak=128 * MIB, losses=(4.0, 2.0 + 2e-6)), done(0.6),
    trials={4: done(0.2, peak=MIB), 6: done(0.4, peak=2 * MIB), 7: done(0.4, peak=3 * MIB)},
    trial_samples={4: 8, 6: 12, 7: 14}, fit=Fit(6),
)  # fmt: skip
OUT = measured("every_k (k=2)", None, Outcome(Status.out_of_memory, "tried to allocate 9 GiB"))
NOT_RUN = measured("selective", None)


def test_figures_of_a_line() -> None:
    none, full, segments, out = summarize([NONE, FULL, SEGMENTS, OUT, NOT_RUN])
    assert none == ResultRow(
        label="none", k=0, status=Status.done, reason="", rounds=2, saved_bytes=256 * MIB, peak_bytes=512 * MIB,
        step_s=0.25, step_low_s=pytest.approx(0.175), step_high_s=pytest.approx(0.325), slowdown=1.0, flops_ratio=1.0,
        samples_per_s=32.0, samples_per_s_per_gib=64.0, loss_difference=0.0,
    )  # fmt: skip
    assert full.slowdown == pytest.approx((0.3 / 0.2 + 0.8 / 0.4) / 2), "ratios within a round, not of the medians"
    assert (full.loss_difference, full.flops_ratio) == (0.0, 1.25)
    assert segments.loss_difference == pytest.approx(1e-6, rel=1e-5)
    assert (segments.fit_micro_batch, segments.fit_samples_per_s) == (6, 12 / 0.4)
    assert (out.status, out.reason, out.rounds, out.step_s) == (
        Status.out_of_memory,
        "tried to allocate 9 GiB",
        0,
        None,
    )


def test_without_none_nothing_is_compared() -> None:
    for others in ([FULL], [measured("none", 0, OUT.rounds[1]), FULL]):
        row = summarize(others)[-1]
        assert (row.slowdown, row.loss_difference) == (None, None) and row.step_s is not None
        assert any("nothing to compare with" in remark for remark in remarks(summarize(others)))


def test_a_round_that_failed_later_is_said_beside_what_was_measured() -> None:
    row = summarize([measured("full", None, done(0.3, peak=MIB), Outcome(Status.failed, "boom"))])[0]
    assert (row.rounds, row.step_s, row.status, row.reason) == (1, 0.3, Status.failed, "boom")
    assert "full: failed: boom" in remarks([row])


def test_a_single_timed_update_is_its_own_spread() -> None:
    row = summarize([measured("none", 0, done(0.3))])[0]
    assert (row.step_low_s, row.step_s, row.step_high_s) == (0.3, 0.3, 0.3)
    assert "no peak was recorded for none" in remarks([row])


def test_a_loss_of_zero_is_compared_too() -> None:
    none, other = measured("none", 0, done(1.0, losses=(0.0,))), measured("full", None, done(1.0, losses=(0.0,)))
    assert [row.loss_difference for row in summarize([none, other])] == [0.0, 0.0]
    off = measured("full", None, done(1.0, losses=(1e-9,)))
    assert summarize([none, off])[1].loss_difference == 1.0


def test_the_table_says_what_the_lines_say() -> None:
    results = summarize([NONE, FULL, SEGMENTS, OUT])
    table = results_table(results)
    cells = {row[0]: dict(zip(table.columns, map(table.shown, row), strict=True)) for row in table.rows}
    assert cells["segments (k=2)"] == {
        "policy": "segments (k=2)", "saved": "64.000", "peak": "128.000", "step ms": "600.0",
        "interquartile range": "400–600", "time ÷ none": "1.750",
        "FLOPs ÷ none": "1.250", "samples/s": "13.33", "samples/s/GiB": "106.7",
        "loss = none": "within 1.0e-06", "largest micro-batch": "6", "samples/s there": "30.00", "outcome": "-",
    }  # fmt: skip
    assert cells["none"]["loss = none"] == "bitwise" and cells["none"]["largest micro-batch"] == "-"
    assert cells["every_k (k=2)"]["outcome"] == "out of memory" and cells["every_k (k=2)"]["peak"] == "-"
    plain = results_table(summarize([NONE, FULL])).columns
    assert not {"largest micro-batch", "samples/s there", "outcome"} & set(plain)
    everything = dataclasses.replace(results[2], fit_is_all=True)
    assert "≥ 6" in map(table.shown, results_table([everything]).rows[0])


def test_the_console_shows_whole_numbers_and_reasons() -> None:
    output = io.StringIO()
    console = SweepConsole(Console(file=output, width=60, highlight=False, soft_wrap=True))
    with console.progress(2):
        console.starts("round 1/1  none", 1)
        console.ends("round 1/1  none", NONE.rounds[1], was_stored=True)
        console.ends("round 1/1  every_k (k=2)", OUT.rounds[1], was_stored=False)
    console.table(summarize([NONE, SEGMENTS, OUT]))
    shown = output.getvalue()
    assert "round 1/1  none: 200 ms, peak 512.000 MiB (from before)\n" in shown
    assert shown.count("every_k (k=2): out of memory: tried to allocate 9 GiB") == 2
    assert re.search(r"segments \(k=2\) +64.000 +128.000 +600.0 +400–600 +1.750", shown), shown


def test_a_bar_on_a_terminal() -> None:
    output = io.StringIO()
    console = SweepConsole(Console(file=output, width=100, force_terminal=True))
    with console.progress(5):
        console.starts("round 1/1  none", 1)
        console.ends("round 1/1  none", NONE.rounds[1], was_stored=False)
    assert "1/2" in output.getvalue() and "round 1/1  none" in output.getvalue()


def test_the_file_has_every_figure_unrounded(tmp_path: Path) -> None:
    results = summarize([NONE, FULL, SEGMENTS, OUT])
    write_csv(results, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [row.label for row in results]
    for written, row in zip(rows, results, strict=True):
        expected = {key: "" if value is None else str(value) for key, value in dataclasses.asdict(row).items()}
        assert written == expected
    assert read_csv(tmp_path / "results.csv") == results


def test_the_page_has_both_charts_and_what_the_table_has() -> None:
    results = summarize([NONE, FULL, SEGMENTS, OUT])
    page = sweep_page(results, "python launch/sweep.py 'sweep.ckpt=[none]' run_dir=<x>", {"train.steps": "12"})
    assert page.count("data-chart role") == 2
    assert "run_dir=&lt;x&gt;" in page and "tried to allocate 9 GiB" in page and "train.steps" in page
    assert f'data-bytes="{128 * MIB}"' in page
    assert '"tickvals":[0,2]' in page and "Without a point: every_k (k=2)." in page
    alone = sweep_page(summarize([OUT]), "x", {})
    assert "data-chart role" not in alone and "tried to allocate" in alone


def test_the_console_needs_no_templates() -> None:
    code = "import sys; sys.modules['jinja2'] = None; import dist_ckpt.trainer.sweep.show"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_times_that_do_not_differ_are_not_compared() -> None:
    """Half of none's updates lie between 0.9 and 1.1 s."""
    none = measured("none", 0, *[done(0.8, 0.9, 1.0, 1.1, 1.2, peak=4 * MIB)] * 3)
    near, far = (measured(f"{s}", None, *[done(s, peak=MIB)] * 3) for s in (0.85, 1.3))
    assert "too few updates to compare times: within the spread of none are 0.85" in remarks(
        summarize([none, near, far])
    )
    assert not any("too few" in remark for remark in remarks(summarize([none, far])))
    assert "<dt>fastest</dt>" in sweep_page(summarize([none, near, far]), "c", {})
    once = measured("full", None, done(0.3, peak=MIB))
    assert "<dt>fastest</dt>" not in sweep_page(summarize([none, once]), "c", {})
