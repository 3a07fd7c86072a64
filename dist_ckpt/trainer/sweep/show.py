"""A sweep's results as a table, a file, and on the console while it runs."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from dist_ckpt.memory.records import in_bytes
from dist_ckpt.report.html.parts import Bytes, Cell, Table
from dist_ckpt.trainer.sweep.outcome import Outcome, Status
from dist_ckpt.trainer.sweep.summary import ResultRow, step_median_s

NO_VALUE: tuple[Cell, ...] = (None, "-")


def results_table(results: Sequence[ResultRow]) -> Table:
    """A row a policy; columns that say nothing about any of them are left out."""
    columns: list[tuple[str, list[Cell]]] = [
        ("policy", [row.label for row in results]),
        ("saved", [Bytes(row.saved_bytes) for row in results]),
        ("peak", [Bytes(row.peak_bytes) for row in results]),
        ("step ms", [_ms(row.step_s) for row in results]),
        ("interquartile range", [_quartiles(row) for row in results]),
        ("time ÷ none", [_ratio(row.slowdown) for row in results]),
        ("FLOPs ÷ none", [_ratio(row.flops_ratio) for row in results]),
        ("samples/s", [row.samples_per_s for row in results]),
        ("samples/s/GiB", [row.samples_per_s_per_gib for row in results]),
        ("loss = none", [_loss(row) for row in results]),
        ("largest micro-batch", [_largest(row) for row in results]),
        ("samples/s there", [row.fit_samples_per_s for row in results]),
        ("outcome", ["-" if row.status is Status.done else str(row.status) for row in results]),
    ]
    told = [(name, cells) for name, cells in columns if not all(_is_empty(cell) for cell in cells)]
    rows = tuple(zip(*(cells for _, cells in told), strict=True))
    return Table("policies", tuple(name for name, _ in told), rows)


def remarks(results: Sequence[ResultRow]) -> tuple[str, ...]:
    """What the table cannot say: why runs failed, what is missing to compare with, what was not recorded."""
    said = [f"{row.label}: {row.status}: {row.reason}" for row in results if row.status is not Status.done]
    done = [row for row in results if row.rounds]
    if done and all(row.slowdown is None for row in done):
        said.append("without a run of none (sweep.ckpt=[none,…], sweep.k=[0,…]) there is nothing to compare with")
    if unknown := [row.label for row in done if row.peak_bytes is None]:
        said.append(f"no peak was recorded for {', '.join(unknown)}")
    if alike := _not_told_apart(done):
        said.append(f"too few updates to compare times: within the spread of none are {', '.join(alike)}")
    return tuple(said)


def _not_told_apart(done: Sequence[ResultRow]) -> list[str]:
    """Policies whose step time differs from that of ``none`` by less than its updates do among themselves."""
    base = next((row for row in done if row.k == 0), None)
    if base is None or base.step_s is None or base.step_low_s is None or base.step_high_s is None:
        return []
    spread = base.step_high_s - base.step_low_s
    others = (row for row in done if row is not base and row.step_s is not None)
    return [row.label for row in others if abs((row.step_s or 0.0) - base.step_s) < spread]


def write_csv(results: Sequence[ResultRow], path: Path) -> None:
    """Every figure of every row, unrounded: bytes and seconds."""
    names = [field.name for field in dataclasses.fields(ResultRow)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in results)


def read_csv(path: Path) -> tuple[ResultRow, ...]:
    """The inverse of :func:`write_csv`."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            ResultRow(**{name: _parsed(name, text) for name, text in line.items()}) for line in csv.DictReader(file)
        )


def _parsed(name: str, text: str) -> Any:
    if name in ("label", "reason"):
        return text
    if name == "status":
        return Status(text)
    named = {"": None, "True": True, "False": False}
    return named[text] if text in named else int(text) if text.lstrip("-").isdecimal() else float(text)


class SweepConsole:
    """Prints how far a sweep is, and its table: a progress bar on a terminal, a line a run elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._done = 0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """Shows a bar inside, if somebody watches."""
        if not self._console.is_terminal:
            yield
            return
        told = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), told, TimeElapsedColumn())
        with Progress(*columns, console=self._console) as self._progress:
            self._task = self._progress.add_task("", total=total)
            yield
        self._progress = None

    def starts(self, what: str, left: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=what, total=self._done + 1 + left)

    def ends(self, what: str, outcome: Outcome, was_stored: bool) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)
        self.say(f"{what}: {_told(outcome)}{' (from before)' * was_stored}")

    def table(self, results: Sequence[ResultRow]) -> None:
        """Prints the results; numbers are never cut short."""
        table = results_table(results)
        shown = RichTable(title=f"{table.caption}, {table.unit or 'MiB'}", box=box.SIMPLE_HEAD, title_justify="left")
        for column, name in enumerate(table.columns):
            widest = max(len(name), *(len(table.shown(row[column])) for row in table.rows))
            shown.add_column(name, justify="left" if column == 0 else "right", min_width=widest)
        for row in table.rows:
            shown.add_row(*map(table.shown, row))
        self._console.print(shown, crop=False)
        for remark in remarks(results):
            self.say(remark)


def _told(outcome: Outcome) -> str:
    if not outcome.is_done:
        return f"{outcome.status}: {outcome.reason}"
    peak = f", peak {in_bytes(outcome.peak_bytes)}" if outcome.peak_bytes is not None else ""
    return f"{1000 * step_median_s(outcome):,.0f} ms{peak}"


def _is_empty(cell: Cell) -> bool:
    return cell.nbytes is None if isinstance(cell, Bytes) else cell in NO_VALUE


def _ms(seconds: float | None) -> Cell:
    return None if seconds is None else 1000 * seconds


def _quartiles(row: ResultRow) -> str:
    if row.step_low_s is None or row.step_high_s is None:
        return "-"
    return f"{1000 * row.step_low_s:,.0f}–{1000 * row.step_high_s:,.0f}"


def _ratio(value: float | None) -> Cell:
    return None if value is None else f"{value:.3f}"


def _loss(row: ResultRow) -> str:
    if row.loss_difference is None:
        return "-"
    return "bitwise" if row.loss_difference == 0 else f"within {row.loss_difference:.1e}"


def _largest(row: ResultRow) -> Cell:
    return f"≥ {row.fit_micro_batch}" if row.fit_is_all else row.fit_micro_batch
