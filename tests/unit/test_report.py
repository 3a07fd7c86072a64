"""The records and the console of a run."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.report.advice import Advice
from dist_ckpt.report.console import Console
from dist_ckpt.report.jsonl import JsonLines, read_json_lines

MIB, GIB = 2**20, 2**30


def test_lines_are_written_through(tmp_path: Path) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    lines = JsonLines(file)
    for step in (1, 2):
        lines.write({"step": step})
        assert read_json_lines(file)[-1] == {"step": step}
    lines.close()


def test_resuming_drops_the_steps_that_come_again_and_a_line_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    kept = [{"step": step, "loss": 1 / step} for step in range(1, 6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 6, "lo')
    lines = JsonLines(file, after_step=3)
    lines.write({"step": 4, "loss": 0.5})
    lines.close()
    assert read_json_lines(file) == [*kept[:3], {"step": 4, "loss": 0.5}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def report(unit: int, count: int = 2, peak: int | None = None, measured: bool = True) -> MemoryReport:
    activations = [(rank + 1) * 1234 * unit if measured else None for rank in range(count)]
    return MemoryReport(
        7,
        tuple(
            RankMemory(
                rank=rank, device="cuda:0" if peak else "cpu", step=7, params=unit, grads=unit, optimizer=2 * unit,
                other=0, activations=activations[rank], peak=peak, live=peak, reserved=peak,
            )
            for rank in range(count)
        ),
    )  # fmt: skip


def spoken(width: int | None = None) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(9, rich=RichConsole(file=text, width=width, highlight=False, soft_wrap=True)), text


def test_a_line_a_step_where_there_is_no_terminal() -> None:
    console, text = spoken()
    console.start(0)
    console.step(7, 3.14159, 0.5, 12345.6, report(MIB))
    console.stop()
    assert text.getvalue() == ("step 7/9  loss 3.1416  grad norm 0.500  12,346 tokens/s  memory 2.414 GiB (rank 1)\n")


@pytest.mark.parametrize("width", [None, 40, 200])
def test_the_table_is_whole_at_any_width(width: int | None) -> None:
    console, text = spoken(width)
    console.table(report(GIB, count=8, peak=1700 * GIB))
    title, _, head, _, *rows = [line.rstrip() for line in text.getvalue().splitlines()]
    assert title.startswith("memory per rank at step 7, GiB (accounted: ")
    shown = ["params", "grads", "optimizer", "activations", "other", "accounted", "unattributed", "peak", "reserved"]
    assert head.split() == ["rank", *shown]
    assert rows[1].split() == [
        "1", "1.000", "1.000", "2.000", "2,468.000", "0.000", "2,472.000", "1,696.000", "1,700.000", "1,700.000",
    ]  # fmt: skip
    assert "…" not in text.getvalue()


def test_what_no_rank_can_say_has_no_column() -> None:
    console, text = spoken()
    console.table(report(MIB))
    assert "GiB" in text.getvalue()
    assert not {"peak", "reserved", "unattributed"} & set(text.getvalue().split())


def test_activations_that_were_not_measured_are_a_dash() -> None:
    console, text = spoken()
    mixed = MemoryReport(7, (report(MIB).ranks[0], report(MIB, measured=False).ranks[1]))
    console.table(mixed)
    assert text.getvalue().splitlines()[-2].split() == ["1", "0.001", "0.001", "0.002", "-", "0.000", "-"]
    console.step(7, 3.0, 0.5, 1.0, report(MIB, measured=False))
    assert text.getvalue().endswith("memory -\n")
    console.step(8, 3.0, 0.5, 1.0, None)
    assert text.getvalue().endswith("1 tokens/s\n")


def test_what_is_left_of_a_device_has_a_column_where_its_size_is_known() -> None:
    console, text = spoken()
    one = report(MIB, count=1, peak=2 * GIB).ranks[0]
    console.table(MemoryReport(7, (dataclasses.replace(one, reserved=3 * GIB, capacity=8 * GIB),)))
    assert text.getvalue().splitlines()[2].split()[-1] == "headroom"
    assert text.getvalue().splitlines()[4].split()[-2:] == ["3.000", "5.000"]
    assert (
        one.headroom is None and dataclasses.replace(one, capacity=8 * GIB, peak=None, reserved=None).headroom is None
    )


def test_peaks_are_shown_by_phase_and_by_the_shares_of_what_fills_them() -> None:
    console, text = spoken()
    first, second = report(MIB, peak=200 * MIB).ranks
    found = {"phase": "backward", **dict.fromkeys(KINDS, 0), "params": 50 * MIB, "activations": 150 * MIB}
    console.peaks(MemoryReport(7, (first, second)))
    assert text.getvalue() == ""
    console.peaks(MemoryReport(7, (dataclasses.replace(first, at_peak=found), second)))
    title, _, head, _, *rows = [line.split() for line in text.getvalue().splitlines()]
    assert " ".join(title) == "at the peak of step 7, MiB and shares"
    assert head == ["rank", "peak", "phase", *KINDS]
    filled = {"params": ["50.000", "25%"], "activations": ["150.000", "75%"]}
    assert rows[0] == ["0", "200.000", "backward", *(cell for kind in KINDS for cell in filled.get(kind, ["0"]))]
    assert rows[1] == ["1", "200.000", *["-"] * (1 + len(KINDS))]


def test_advice_is_printed_below_with_what_it_gains() -> None:
    console, text = spoken()
    console.advise((), report(MIB))
    assert text.getvalue() == ""
    console.advise((Advice("do [this]", 1234 * MIB), Advice("or that", None)), report(MIB))
    title, *lines = text.getvalue().splitlines()
    assert title.endswith("would fall, GiB")
    assert lines == ["      1.205  do [this]", "          -  or that"]


def test_without_advice_it_is_said_what_the_peak_is_made_of() -> None:
    console, text = spoken()
    light, heavy = report(MIB, peak=200 * MIB).ranks
    found = {"phase": "backward", **dict.fromkeys(KINDS, 0), "params": 50 * MIB, "activations": 150 * MIB}
    heavy = dataclasses.replace(heavy, peak=400 * MIB, at_peak={**found, "temporary": 200 * MIB})
    console.advise((), MemoryReport(7, (dataclasses.replace(light, at_peak=found), heavy)))
    assert text.getvalue().endswith("peak of rank 1: temporary 50%, activations 38%, params 12%\n")


def test_memory_of_a_step_means_the_same_in_every_line() -> None:
    console, text = spoken()
    plain = report(MIB)
    deep = MemoryReport(7, tuple(dataclasses.replace(rank, peak=9 * GIB, live=GIB) for rank in plain.ranks))
    for step, one in ((1, plain), (2, deep), (3, report(MIB, peak=9 * GIB))):
        console.step(step, 3.0, 0.5, 1.0, one)
    shown = [line.partition("memory ")[2] for line in text.getvalue().splitlines()]
    assert shown == ["2.414 GiB (rank 1)", "2.414 GiB (rank 1)", "9.000 GiB (rank 0)"]


def test_a_leak_is_said_once_for_all_ranks_that_have_it() -> None:
    console, text = spoken()
    ranks = [dataclasses.replace(rank, leak="it grows" if rank.rank else None) for rank in report(MIB, count=4).ranks]
    for _ in range(2):
        console.leaks(MemoryReport(7, tuple(ranks)))
    assert text.getvalue() == "warning: ranks 1-3: it grows\n"
    console.leaks(MemoryReport(8, (dataclasses.replace(ranks[0], leak="other"), *ranks[1:])))
    assert text.getvalue().endswith("warning: rank 0: other\n")
    console.table(MemoryReport(8, tuple(ranks)))
    assert text.getvalue().endswith("warning: ranks 1-3: it grows\n"), "again at the end"


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Console(1).say("run folder: [red]/tmp/:smile:/x[/red]")
    Console(1, quiet=True).say("not heard")
    assert capsys.readouterr().out == "run folder: [red]/tmp/:smile:/x[/red]\n"
