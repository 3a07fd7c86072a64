"""The program that compares policies: every run in processes of its own, and one table of all of them."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt.errors import ConfigError, DistCkptError
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.help import key_lines
from dist_ckpt.trainer.process import leave
from dist_ckpt.trainer.program import begin, find_data, print_error
from dist_ckpt.trainer.sweep.folder import SweepFolder, claimed
from dist_ckpt.trainer.sweep.launch import Terminated, raising_on_sigterm
from dist_ckpt.trainer.sweep.options import Sweep, SweepConfig, SweepOptions, read_sweep
from dist_ckpt.trainer.sweep.runner import SweepRunner, predict

if TYPE_CHECKING:
    from dist_ckpt.trainer.data.corpus import Files

_ABOUT = (
    "launch/sweep.py runs the training program under several policies and compares memory and speed:\n\n"
    "  python launch/sweep.py 'sweep.ckpt=[none,full,selective]' 'sweep.k=[2,4,8]' nproc=2 engine=fsdp2\n\n"
    "It starts the ranks itself. Exit code 0: measured, even if some policies ran out of memory; 1: none of them\n"
    "has run, or Ctrl-C; 2: a mistake; 143: SIGTERM. Its own keys:\n\n"
)


def main(arguments: Sequence[str], train: Path) -> NoReturn:
    """Runs ``launch/sweep.py``; ends the process.

    Args:
        train: the training program.
    """
    keys = [*key_lines(SweepOptions), *key_lines(SweepConfig, "sweep.")]
    place = begin(arguments, _ABOUT + "\n".join(keys) + "\n\nand those of launch/train.py:\n\n")
    try:
        if place.is_launched:
            raise ConfigError("launch/sweep.py starts its ranks itself: write python launch/sweep.py nproc=2 …")
        if missing := [name for name in ("jinja2", "plotly") if find_spec(name) is None]:
            raise ConfigError(f"launch/sweep.py needs {' and '.join(missing)}: pip install 'dist_ckpt[report]'")
        sweep = read_sweep(arguments)
        files = find_data(sweep.config)
        with claimed(sweep) as folder, raising_on_sigterm():
            code = _sweep(sweep, files, folder, train, shlex.join(["python", "launch/sweep.py", *arguments]))
    except DistCkptError as error:
        print_error(str(error))
        code = ExitCode.MISTAKE
    except (KeyboardInterrupt, Terminated) as interruption:
        code = _code_of(interruption)
    leave(code)


def _sweep(sweep: Sweep, files: Files | None, folder: SweepFolder, train: Path, command: str) -> ExitCode:
    from dist_ckpt.trainer.sweep.page import sweep_page
    from dist_ckpt.trainer.sweep.show import SweepConsole, write_csv

    console = SweepConsole()
    console.say(f"sweep folder: {folder.path}")
    runner = SweepRunner(sweep, predict(sweep, files), folder, train, console)
    code = ExitCode.DONE
    try:
        with console.progress(1 + len(sweep.candidates) * sweep.options.rounds):
            runner.run()
    except (KeyboardInterrupt, Terminated) as interruption:
        code = _code_of(interruption)
        console.say(f"interrupted; the same command with run_dir={folder.path} goes on from here")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was measured is to be kept
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    results = runner.results()
    if not results:
        return code
    console.table(results)
    write_csv(results, folder.table)
    folder.page.write_text(sweep_page(results, command, sweep.facts()), encoding="utf-8")
    console.say(f"in {folder.path}: {folder.table.name}, {folder.page.name}, and the folder of each run")
    if code is ExitCode.DONE and not any(row.rounds for row in results):
        return ExitCode.FAULT
    return code


def _code_of(interruption: BaseException) -> ExitCode:
    return ExitCode.TERMINATED if isinstance(interruption, Terminated) else ExitCode.FAULT
