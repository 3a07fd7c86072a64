"""The console: a progress bar on a terminal, otherwise one line per step; at the end tables of all ranks and advice."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.memory.records import ACCOUNTED, MemoryReport, RankMemory, byte_unit, format_bytes, in_bytes
from dist_ckpt.report.advice import Advice
from dist_ckpt.report.advice.view import ranks_named


class Console:
    """Prints the progress and results of a run.

    Args:
        total_steps: the length of the bar.
        quiet: prints nothing, for ranks other than 0.
    """

    def __init__(self, total_steps: int, quiet: bool = False, rich: RichConsole | None = None) -> None:
        self._console = rich or RichConsole(highlight=False, emoji=False, soft_wrap=True, quiet=quiet)
        self._total = total_steps
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._told: set[str] = set()
        """Leaks that have been said."""
        self._memory = ""
        """As it was reported last, for the bar."""

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def start(self, done: int) -> None:
        """Starts the bar if the console is a terminal."""
        if self._console.is_terminal and not self._console.quiet:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._progress.add_task("", total=self._total, completed=done)
            self._progress.start()

    def step(self, step: int, loss: float, grad_norm: float, tokens_per_s: float, memory: MemoryReport | None) -> None:
        """Shows one step, as a line or beside the bar.

        Args:
            memory: as reported at this very step. The bar goes on showing it, where it takes one place.
        """
        text = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        reported = f"  memory {_heaviest(memory)}" if memory is not None else ""
        self._memory = reported or self._memory
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text + self._memory)
        else:
            self.say(f"step {step}/{self._total}  {text}{reported}")

    def leaks(self, report: MemoryReport) -> None:
        """Says what grows from report to report, once."""
        ranks_of: dict[str, list[int]] = {}
        for rank in report.ranks:
            if rank.leak is not None and rank.leak not in self._told:
                ranks_of.setdefault(rank.leak, []).append(rank.rank)
        for leak, ranks in ranks_of.items():
            self.say(f"warning: {ranks_named(ranks)}: {leak}")
        self._told.update(ranks_of)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, report: MemoryReport) -> None:
        """Prints the memory of all ranks, without columns that are empty on every rank."""
        self._console.print(memory_table(report), crop=False)
        self._told.clear()  # whoever reads the end may not have read what was said on the way
        self.leaks(report)

    def peaks(self, report: MemoryReport) -> None:
        """Prints what fills memory at the peak of each rank, where a deep step has found it."""
        if any(rank.at_peak is not None for rank in report.ranks):
            self._console.print(peak_table(report), crop=False)

    def advise(self, found: Sequence[Advice], report: MemoryReport) -> None:
        """Prints what to try next; where nothing is, at least what the peak in a report is mostly made of."""
        if not found:
            self._nothing_to_try(report)
            return
        unit = byte_unit([one.gain_bytes for one in found])
        self.say(f"what to try next, and by about how much the peak would fall, {unit}")
        for one in found:
            self.say(f"  {format_bytes(one.gain_bytes, unit):>9}  {one.text}")

    def _nothing_to_try(self, report: MemoryReport) -> None:
        deep = [rank for rank in report.ranks if rank.at_peak is not None and rank.peak]
        if not deep:
            return
        heaviest = max(deep, key=lambda rank: rank.peak or 0)
        at_peak, peak = heaviest.at_peak or {}, heaviest.peak or 1
        most = sorted(KINDS, key=lambda kind: at_peak[kind], reverse=True)[:3]
        shares = ", ".join(f"{kind} {at_peak[kind] / peak:.0%}" for kind in most if at_peak[kind])
        where = f" of rank {heaviest.rank}" if len(report.ranks) > 1 else ""
        self.say(f"nothing stands out that could be tried next; the most at the peak{where}: {shares}")


def memory_table(report: MemoryReport) -> Table:
    """The memory of each rank by category, in GiB or MiB."""
    owned = (*ACCOUNTED[:-1], "offloaded", ACCOUNTED[-1])
    shown = [
        c
        for c in (*owned, "accounted", "unattributed", "peak", "reserved", "non_torch", "headroom")
        if any(getattr(r, c) is not None for r in report.ranks)
    ]
    unit = byte_unit([getattr(r, c) for r in report.ranks for c in shown])
    rows = [[format_bytes(getattr(r, c), unit) for c in shown] for r in report.ranks]
    note = " (accounted: a sum of maxima, not a peak)"
    return _table(f"memory per rank at step {report.step}, {unit}{note}", report, shown, rows)


def peak_table(report: MemoryReport) -> Table:
    """The peak of each rank in GiB or MiB, its phase, and of each kind of memory how much that is and which share.

    The columns are always the same, so that the tables of two runs can be laid side by side.
    """
    unit = byte_unit([rank.peak for rank in report.ranks])
    rows = []
    for rank in report.ranks:
        found, peak = rank.at_peak, rank.peak
        cells = ["-"] * len(KINDS)
        if found is not None and peak:
            cells = [f"{format_bytes(found[k], unit)} {found[k] / peak:.0%}" if found[k] else "0" for k in KINDS]
        rows.append([format_bytes(peak, unit), found["phase"] if found is not None else "-", *cells])
    title = f"at the peak of step {report.step}, {unit} and shares"
    return _table(title, report, ["peak", "phase", *KINDS], rows)


def _table(title: str, report: MemoryReport, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A row a rank, after the columns that say which it is."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    places = ("rank", "stage") if any(r.stage is not None for r in report.ranks) else ("rank",)
    whole = [[*(str(getattr(r, p)) for p in places), *row] for r, row in zip(report.ranks, rows, strict=True)]
    for name, *cells in zip((*places, *columns), *whole, strict=True):
        # rich assumes that a pipe is 80 columns wide, and would truncate numbers to fit.
        table.add_column(name, justify="right", min_width=max(map(len, (name, *cells))))
    for row in whole:
        table.add_row(*row)
    return table


def _heaviest(report: MemoryReport) -> str:
    """Of every report of a run the same figure: the peak of a deep step alone, as on the CPU, is not shown here."""

    def shown(rank: RankMemory) -> int | None:
        return rank.peak if rank.reserved is not None else rank.accounted

    rank = max(report.ranks, key=lambda one: shown(one) or 0)
    if shown(rank) is None:
        return "-"
    stage = f", stage {rank.stage}" if rank.stage is not None else ""
    where = f" (rank {rank.rank}{stage})" if len(report.ranks) > 1 else ""
    return f"{in_bytes(shown(rank))}{where}"
