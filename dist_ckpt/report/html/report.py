"""A run's page, or one that compares several runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dist_ckpt.errors import ReportError, counted
from dist_ckpt.report.html import compare, sections
from dist_ckpt.report.html.page import render
from dist_ckpt.report.html.parts import Part, Section
from dist_ckpt.report.run_data import RunData, read_run

_OF_A_RUN: tuple[tuple[str, str, Callable[[RunData], tuple[Part, ...]]], ...] = (
    ("oom", "Out of memory", sections.out_of_memory),
    ("glance", "At a glance", sections.glance),
    ("memory", "Memory per rank", sections.memory_per_rank),
    ("step", "The deep step", sections.the_deep_step),
    ("stages", "Pipeline stages", sections.stages),
    ("predicted", "Predicted and measured", sections.predicted),
    ("training", "Training", sections.training),
    ("over", "Memory over the run", sections.over_the_run),
    ("plan", "Plan", sections.the_plan),
    ("options", "Configuration", sections.configuration),
    ("words", "How to read it", sections.how_to_read),
    ("missing", "Not in this page", sections.missing),
)

_OF_SEVERAL: tuple[tuple[str, str, Callable[[Sequence[RunData]], tuple[Part, ...]]], ...] = (
    ("runs", "Runs", compare.overview),
    ("memory", "Memory", compare.memory),
    ("step", "The deep step", compare.deep_steps),
    ("loss", "Loss", compare.losses),
    ("differences", "Differences", compare.differences),
)


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Writes the page of a run, or one that compares several.

    Args:
        run_dirs: folders of runs, at least one.
        out: the file; replaced as a whole, once the page is complete.

    Raises:
        ReportError: a folder holds no run, or what cannot be read; the file cannot be written.
    """
    runs = [read_run(path) for path in run_dirs]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    unfinished = out.with_name(f".{out.name}.new")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        raise ReportError(f"{out}: cannot be written to: {error.strerror}") from error


def run_page(run: RunData) -> str:
    """One run's page."""
    made = [Section(anchor, title, parts) for anchor, title, make in _OF_A_RUN if (parts := make(run))]
    model = run.option("model.kind") or ""
    title = " · ".join(filter(None, (run.label, model)))
    lead = [_outcome(run), str(run.path)]
    return render("sections.html.j2", title=title, lead=lead, sections=made)


def comparison_page(runs: Sequence[RunData]) -> str:
    """A page that compares runs."""
    made = [Section(anchor, title, parts) for anchor, title, make in _OF_SEVERAL if (parts := make(runs))]
    lead = [f"{', '.join(compare.names_of(runs))}. Each run's own page: python launch/report.py FOLDER"]
    return render("sections.html.j2", title=f"{len(runs)} runs", lead=lead, sections=made)


def _outcome(run: RunData) -> str:
    """How far the run has come, and how it ended."""
    done = int(run.steps[-1]["step"]) if run.steps else 0
    wanted = run.option("train.steps")
    words = [f"{done} of {wanted} steps" if wanted else counted(done, "step")]
    if run.world_size:
        words.append(f"on {counted(run.world_size, 'rank')}")
    if run.exit is None:
        words.append("(no end recorded)")
    elif run.exit.get("code"):
        reason = run.exit.get("reason")
        words.append(f"ended with exit code {run.exit['code']}{f': {reason}' if reason else ''}")
    else:
        words.append("done")
    return ", ".join(words).replace(", (", " (").replace(", on ", " on ") + "."
