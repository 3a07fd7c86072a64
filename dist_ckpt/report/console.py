"""The console: a progress bar on a terminal, otherwise one line per step, and a table of all ranks at the end."""

from __future__ import annotations

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from dist_ckpt.memory.records import MemoryReport, RankMemory, byte_unit, format_bytes


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
        """Shows one step, as a line or beside the bar, with the last known memory."""
        text = f"loss {loss:.4f}  grad norm {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        if memory is not None:
            text += f"  memory {_heaviest(memory)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self._total}  {text}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def table(self, report: MemoryReport) -> None:
        """Prints the memory of all ranks, without columns that are empty on every rank."""
        self._console.print(memory_table(report), crop=False)


def memory_table(report: MemoryReport) -> Table:
    """The memory of each rank by category, in GiB or MiB."""
    owned = ("params", "grads", "optimizer", "activations", "offloaded", "other")
    shown = [
        c
        for c in (*owned, "accounted", "unattributed", "peak", "reserved")
        if any(getattr(r, c) is not None for r in report.ranks)
    ]
    unit = byte_unit([getattr(r, c) for r in report.ranks for c in shown])
    table = Table(title=f"memory per rank at step {report.step}, {unit}", box=box.SIMPLE_HEAD, title_justify="left")
    places = ("rank", "stage") if any(r.stage is not None for r in report.ranks) else ("rank",)
    rows = [
        [*(str(getattr(r, p)) for p in places), *(format_bytes(getattr(r, c), unit) for c in shown)]
        for r in report.ranks
    ]
    for name, *cells in zip((*places, *shown), *rows, strict=True):
        # rich assumes that a pipe is 80 columns wide, and would truncate numbers to fit.
        table.add_column(name, justify="right", min_width=max(map(len, (name, *cells))))
    for row in rows:
        table.add_row(*row)
    return table


def _heaviest(report: MemoryReport) -> str:
    rank: RankMemory = report.heaviest
    count = rank.peak if rank.peak is not None else rank.accounted
    if count is None:
        return "-"
    unit = byte_unit([count])
    stage = f", stage {rank.stage}" if rank.stage is not None else ""
    where = f" (rank {rank.rank}{stage})" if len(report.ranks) > 1 else ""
    return f"{format_bytes(count, unit)} {unit}{where}"
