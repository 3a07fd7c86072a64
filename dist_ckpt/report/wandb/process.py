"""The process that talks to W&B: a line of JSON for each record comes in, and what the user has to know goes out."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.run_layout import OUT_OF_MEMORY, RunLayout
from dist_ckpt.report.wandb.log import last_step, logs
from dist_ckpt.report.wandb.metrics import (
    PARTS,
    line_metrics,
    memory_metrics,
    peak_table,
    rank_table,
    stacks,
)

if TYPE_CHECKING:
    import wandb

_CONNECT_S, _UPLOAD_S = 12, 25
"""Before a run becomes an offline one; for what is left at its end, if the trainer waits for so long."""
_LAST_WORDS_S = 3.0
"""Of the trainer's patience at the end: to say that uploading has taken the rest of it."""
_KILLED = 1
"""What a run is told to have ended with if nobody says so."""


class _OutOfTime(BaseException):
    """The trainer will not wait for this much longer. No ``Exception``, which W&B would take for one of its own."""


def main() -> None:
    """Runs until the trainer says that the run has ended, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # the trainer ends its run, and then this
    # The trainer's own limit on its memory is not one for this process and W&B's.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    records, messages = _take_over_streams()
    start = json.loads(records.readline())
    sys.argv[:] = start["argv"]  # W&B notes the command
    folder = Path(start["folder"])
    tempfile.tempdir = str(RunLayout(folder).wandb / "tmp")
    os.makedirs(tempfile.tempdir, exist_ok=True)

    def warn(text: str) -> None:
        messages.write(text + "\n")
        messages.flush()

    try:
        _record(start, folder, map(json.loads, records), warn)
    except _OutOfTime:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
        os._exit(0)  # W&B would go on at exit
    except Exception as error:
        traceback.print_exc()
        warn(f"recording has ended: {_first_line(error)}")
    finally:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)


def _take_over_streams() -> tuple[TextIO, TextIO]:
    """Records and messages on descriptors of their own; what W&B and its service print goes to the log with errors."""
    records, messages = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return records, messages


def _record(
    start: Mapping[str, Any], folder: Path, records: Iterable[Mapping[str, Any]], warn: Callable[[str], None]
) -> None:
    try:
        import wandb
    except ImportError as error:
        warn(f"not recorded: {error}; pip install 'dist_ckpt[wandb]'")
        return

    seen = last_step(folder, start["id"])
    run = _open_run(start, folder, warn)
    curves = Curves(run, seen, start["world_size"], start["max_ranks"])
    last: Mapping[str, Any] = {}
    for last in itertools.chain(_earlier(folder, start["after_step"]), records):
        if "finish" in last:
            break
        curves.take(last)
    code, until_s = _end_of(last)
    try:
        with _at_most((until_s - time.monotonic()) / 2):
            curves.end(code, folder)
        with _at_most(until_s - time.monotonic()):
            run.finish(exit_code=code)
    except (TimeoutError, _OutOfTime) as late:
        warn(f"not all was uploaded in time; the rest with: wandb sync {logs(folder, start['id'])[-1].parent}")
        if isinstance(late, _OutOfTime):
            raise
    wandb.teardown(exit_code=code)


def _end_of(last: Mapping[str, Any]) -> tuple[int, float]:
    """The exit code, and until when the trainer waits; if it has gone without a word, nobody does."""
    if "finish" in last:
        return last["finish"], last["until_s"] - _LAST_WORDS_S
    return _KILLED, time.monotonic() + 2 * _UPLOAD_S


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises :class:`_OutOfTime` inside once they have passed: a limit of W&B's own is set when the run is opened."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open_run(start: Mapping[str, Any], folder: Path, warn: Callable[[str], None]) -> wandb.Run:
    """Online if that is asked for and works, else offline."""
    import wandb

    def attempt(mode: Literal["online", "offline"]) -> wandb.Run:
        settings = wandb.Settings(
            mode=mode,
            root_dir=str(folder),
            silent=True,  # nor does it prompt then
            console="off",
            label_disable=True,
            save_code=False,
            disable_code=True,
            git_remote="",  # none: W&B notes its address, in which it leaves a token that stands where a name would
            program=start["argv"][0],
            init_timeout=_CONNECT_S,
            finish_timeout=_UPLOAD_S,
            finish_timeout_raises=True,
            stop_fn=lambda: os.kill(start["trainer"], signal.SIGTERM),  # "stop run" on the web saves and ends the job
            x_stats_pid=start["trainer"],
            x_transaction_log_flush_interval=1.0,
        )
        wandb.setup(settings)  # before init: what init itself says is silent only then (wandb 0.31)
        plan = RunLayout(folder).plan
        return wandb.init(
            settings=settings,
            project=start["project"],
            id=start["id"],
            name=folder.name,
            resume="allow",
            config={**start["config"], "plan": json.loads(plan.read_text()) if plan.exists() else None},
        )

    if start["mode"] == "offline":
        return attempt("offline")
    try:
        return attempt("online")
    except Exception as error:
        traceback.print_exc()
        wandb.teardown()
        run = attempt("offline")
        path = logs(folder, start["id"])[-1].parent
        warn(f"{_first_line(error)}; recorded offline, upload with: wandb sync {path}")
        return run


def _earlier(folder: Path, after_step: int) -> Iterable[Mapping[str, Any]]:
    """The records of earlier starts that count: W&B may lack some, after a kill or if it was not asked for then."""
    lines, reports = (
        [record for record in read_json_lines(path) if record["step"] <= after_step] if path.exists() else []
        for path in (RunLayout(folder).metrics, RunLayout(folder).memory)
    )
    by_step = {report["step"]: report for report in reports}
    for line in lines:
        yield {"line": line}
        if line["step"] in by_step:
            yield {"memory": by_step[line["step"]]}


class Curves:
    """A run's rows in W&B, one a step.

    W&B takes rows in the order of their steps alone. A step that is done again after a restart keeps its first row.

    Args:
        run: open.
        seen: the last step of which W&B has a row.
        world_size: ranks of the job.
        max_ranks: as for :func:`memory_metrics`.
    """

    def __init__(self, run: wandb.Run, seen: int, world_size: int, max_ranks: int) -> None:
        self._run, self._seen = run, max(seen, run.step - 1)
        self._world_size, self._max_ranks = world_size, max_ranks
        self._step, self._row = 0, dict[str, float]()
        self._media: dict[str, Any] = {}
        """Of the same row."""
        self._takes_media = True
        self._report: MemoryReport | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """A line, which begins a row, or a report, which belongs to the line before it."""
        if "line" in record:
            self._commit()
            self._step, self._row = record["line"]["step"], line_metrics(record["line"], self._world_size)
        if "memory" in record:
            self._report = MemoryReport.from_dict(record["memory"])
            if self._step <= self._seen:
                return
            self._row |= memory_metrics(self._report, self._max_ranks)
            if (table := peak_table(self._report)) is not None:
                kinds = [column.removesuffix("(GiB)") for column in table[0][2:]]
                self._media |= _table_and_chart("memory/at_peak", table, kinds)

    def end(self, code: int, folder: Path) -> None:
        """Adds to the last row what there is only once, and leaves the run folder's files as an artifact."""
        import wandb

        if self._step <= self._seen:  # no new row: all steps were done before, or the first has failed
            self._step, self._row = self._seen + 1, {}
        if code == OUT_OF_MEMORY:
            self._row["memory/num_ooms"] = 1
        if self._report is not None:
            self._media |= _table_and_chart("memory/ranks", rank_table(self._report), PARTS)
        run = RunLayout(folder)
        if run.report.exists():
            self._media["report"] = wandb.Html(str(run.report), inject=False)
        self._commit()
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for path in (run.config, run.plan, run.cost, run.metrics, run.memory, run.report):
            if path.exists():
                artifact.add_file(str(path))
        self._with_media(lambda: self._run.log_artifact(artifact))

    def _commit(self) -> None:
        row, media, self._media = self._row, self._media, {}
        if self._step <= self._seen or not (row or media):
            return
        write = functools.partial(self._run.log, step=self._step, commit=True)
        if not (media and self._with_media(lambda: write({**row, **media}))) and row:
            write(row)

    def _with_media(self, send: Callable[[], object]) -> bool:
        """Sends tables or files, for which W&B waits for its server (wandb 0.31): not again after it was not there.

        The row without them, and the end of the run, are to be recorded even if that has taken all of its time.

        Returns:
            Whether that worked.
        """
        if self._takes_media:
            try:
                send()
            except (Exception, _OutOfTime):
                traceback.print_exc()
                self._takes_media = False
        return self._takes_media


def _table_and_chart(key: str, table: tuple[list[str], list[list[Any]]], parts: Iterable[str]) -> dict[str, Any]:
    """A table of ranks and its stacked bars. A stacked chart of W&B's own would need a specification in the account."""
    import wandb

    columns, rows = table
    shown: dict[str, Any] = {key: wandb.Table(columns=[*columns], data=rows)}
    if importlib.util.find_spec("plotly") is not None:
        from plotly import graph_objects  # type: ignore[import-untyped]

        ranks = [str(row[0]) for row in rows]
        bars = [graph_objects.Bar(name=p, x=ranks, y=y) for p, y in stacks(columns, rows, list(parts)).items()]
        layout = {"barmode": "stack", "xaxis": {"title": "rank", "type": "category"}, "yaxis": {"title": "GiB"}}
        shown[f"{key}_chart"] = wandb.Plotly(graph_objects.Figure(bars, layout))
    return shown


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    main()
