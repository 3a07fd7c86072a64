"""Makes the page of a run, or one that compares several, from run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dist_ckpt.errors import DistCkptError, ReportError
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.run_folder import RunFolder

DESCRIPTION = "Writes what a run has recorded as one HTML page that needs nothing else; of several runs, a comparison."
COMPARISON = Path("comparison.html")


def main(arguments: Sequence[str]) -> ExitCode:
    """The program; returns its exit code: ``DONE``, or ``MISTAKE`` after one message."""
    parser = argparse.ArgumentParser(prog="report.py", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (run_dir)")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"the file to write; by default report.html in the run's folder, or {COMPARISON} of several",
    )
    try:
        options = parser.parse_args(arguments)
        out = options.out or (RunFolder(options.runs[0]).report if len(options.runs) == 1 else COMPARISON)
        _write(options.runs, out)
    except SystemExit as stop:  # argparse has written its message, or the help
        return ExitCode.MISTAKE if stop.code else ExitCode.DONE
    except DistCkptError as mistake:
        sys.stderr.write(f"error: {mistake}\n")
        return ExitCode.MISTAKE
    sys.stdout.write(f"{out}: {out.stat().st_size / 2**20:.1f} MiB\n")
    return ExitCode.DONE


def _write(runs: Sequence[Path], out: Path) -> None:
    try:
        from dist_ckpt.report.html.report import write_report
    except ImportError as error:
        raise ReportError(f"{error}: pip install 'dist_ckpt[train,report]'") from error
    write_report(runs, out)
