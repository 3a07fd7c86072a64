"""The page of a run, written when the run ends, however it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.sinks import Sink

_log = logging.getLogger(__name__)


class HtmlSink(Sink):
    """Writes the page from the files of the run, which other sinks have finished before.

    Args:
        run_dir: of the run.
        out: the page.
        say: shows a line to the user.
    """

    def __init__(self, run_dir: Path, out: Path, say: Callable[[str], None]) -> None:
        self._run_dir, self._out, self._say = run_dir, out, say

    def step(self, line: Mapping[str, float | int]) -> None:
        """Ignored: the page is made from the run's files at the end."""

    def memory(self, report: MemoryReport) -> None:
        """Ignored: the page is made from the run's files at the end."""

    def profile(self, profiles: Sequence[StepProfile]) -> None:
        """Ignored: the page is made from the run's files at the end."""

    def finish(self, exit_code: int) -> None:
        """Writes the page; the run's end is in ``exit.json`` by now."""
        from dist_ckpt.report.html.report import write_report  # plotly takes a second to import

        try:
            write_report([self._run_dir], self._out)
        except Exception as error:  # whatever is wrong with the page, the training is done
            _log.exception("no HTML report")
            self._say(f"warning: {self._out} was not written: {error}")
