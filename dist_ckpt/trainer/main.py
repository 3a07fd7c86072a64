"""The training program: from the command line to an exit code.

User mistakes are found on every rank before there is a process group, and printed once; those that can be found without
torch even before torch is imported, so that a typo costs no time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt.errors import DistCkptError, StateWriteError
from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import Config, config_yaml, load_config
from dist_ckpt.trainer.exits import FINAL, ExitCode, code_of, forget_exit, record_exit, recorded_exit, root_mistake
from dist_ckpt.trainer.process import Place, leave, leave_with_rank_zero, log_to, start_process_group
from dist_ckpt.trainer.run_folder import RunFolder, check_run_folder, claim_run_folder, find_run_folder, may_write_to

if TYPE_CHECKING:
    from dist_ckpt.trainer.data.corpus import Files
    from dist_ckpt.trainer.job import Job

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs ``launch/train.py``; ends the process."""
    place = Place.of(os.environ)
    logging.getLogger().addHandler(logging.NullHandler())  # without it, Python sends warnings to the console
    if "--help" in arguments or "-h" in arguments:
        from dist_ckpt.trainer.help import help_text

        leave_with_rank_zero(place, ExitCode.DONE, lambda: print(help_text(), end=""))
    config: Config | None = None
    try:
        config = load_config([a for a in arguments if a != "--print-config"])
        check(config, place.world_size)
        if "--print-config" in arguments:
            text = config_yaml(config)
            leave_with_rank_zero(place, ExitCode.DONE, lambda: print(text, end=""))
        files = _find_files(config)
        if config.dry_run and place.rank != 0:
            leave(ExitCode.DONE)
        if place.rank == 0 and place.restarts:
            _stop_if_final(config)
        # After a restart only rank 0 can tell whether the folder is this job's: it may be on another machine.
        if not config.dry_run and (place.rank == 0 or not place.restarts):
            check_run_folder(config, restarted=place.restarts > 0)

        from dist_ckpt.trainer.job import Job

        job = Job.build(config, place, files)
        if config.dry_run:
            print(job.forecast())
            leave(ExitCode.DONE)
        folder = claim_run_folder(config, restarted=place.restarts > 0) if place.rank == 0 else None
    except DistCkptError as error:
        _leave_with_mistake(place, config, arguments, str(error))
    leave(_run(job, folder))


def _find_files(config: Config) -> Files | None:
    """The files of the data, found before the slow imports; None if it has none."""
    if config.data.kind == "synthetic":
        return None
    from dist_ckpt.trainer.data.files import find_files

    return find_files(config.data)


def _stop_if_final(config: Config) -> None:
    """Ends a restarted job at once if a restart would only repeat what ended it."""
    folder = find_run_folder(config, restarted=True)
    last = recorded_exit(folder.path) if folder is not None else None
    if last is not None and last[0] in FINAL:
        _print_error(f"not restarted, it would end the same way: {last[1]}")
        leave(last[0])


def _run(job: Job, folder: RunFolder | None) -> ExitCode:
    """The run itself. Whatever ends it is recorded, and printed by the rank on which it happened.

    Args:
        folder: on rank 0, which sends it to the others.
    """
    from dist_ckpt.trainer.job import agree_on_folder, end_process_group, train

    place = job.place
    try:
        start_process_group(place, job.device.type)
        folder = agree_on_folder(folder)
        log_to(folder.log(place.rank))
        done = train(job, folder)
        end_process_group()
    except BaseException as error:  # whatever it is: every rank's process ends here
        return _fail(error, folder, place)
    code = ExitCode.DONE if done else ExitCode.TERMINATED
    if place.rank == 0:
        try:
            record_exit(folder.path, code, "all steps done" if done else "SIGTERM; the training state was saved")
        except OSError as problem:  # the run has done what was asked
            _print("warning", _not_recorded(folder, problem))
    return code


def _fail(error: BaseException, folder: RunFolder | None, place: Place) -> ExitCode:
    """Records and prints an error, unless it is only the consequence of another rank's."""
    from dist_ckpt.engines.base import NonFiniteError
    from dist_ckpt.states.agreement import OtherRankFailed

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes twice: from the terminal, then from torchrun
    error = root_mistake(error)
    code = code_of(error)
    details = "".join(traceback.format_exception(error))
    _log.error("%s", details)
    short = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    if folder is not None:
        if isinstance(error, OtherRankFailed):  # the record of that rank says more
            recorded_exit(folder.path, patience_s=5.0)
        try:
            if not record_exit(folder.path, code, short, rank=place.rank):
                first = recorded_exit(folder.path, patience_s=1.0)  # it may be half written
                if first is not None:
                    return first[0]
        except OSError as problem:
            short += f" ({_not_recorded(folder, problem)})"
    where = f" (rank {place.rank}; more in {folder.log(place.rank)})" if folder is not None else ""
    if code is ExitCode.MISTAKE:
        _print_error(short)
    elif code is ExitCode.OUT_OF_MEMORY:
        _print_error(f"out of memory: {short}{where}")
    elif isinstance(error, (NonFiniteError, StateWriteError, KeyboardInterrupt)):
        _print_error(f"{short}{where}")
    else:
        _print_error(f"rank {place.rank}: {details.rstrip()}")
    return code


def _leave_with_mistake(place: Place, config: Config | None, arguments: Sequence[str], message: str) -> NoReturn:
    """Prints a mistake that every rank found, and records it if the user has named a folder for the run."""
    if place.rank == 0:
        run_dir = config.run_dir if config is not None else _run_dir_in(arguments)
        folder = RunFolder(Path(run_dir)) if run_dir else None
        if folder is not None:
            with contextlib.suppress(OSError):  # the message may be about just that
                free = may_write_to(folder, config, place.restarts > 0) if config else not folder.holds_a_run()
                if free:
                    forget_exit(folder.path)
                    record_exit(folder.path, ExitCode.MISTAKE, message, rank=0)
    leave_with_rank_zero(place, ExitCode.MISTAKE, lambda: _print_error(message))


def _run_dir_in(arguments: Sequence[str]) -> str | None:
    """The ``run_dir`` in arguments that are not a valid configuration, if it is plain text."""
    given = [a.partition("=")[2].strip("'\"") for a in arguments if a.lstrip("+").startswith("run_dir=")]
    return given[-1] if given and given[-1] != "null" and "${" not in given[-1] else None


def _not_recorded(folder: RunFolder, problem: OSError) -> str:
    return f"{folder.path / 'exit.json'} could not be written: {problem.strerror}"


def _print_error(text: str) -> None:
    _print("error", text)


def _print(kind: str, text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more; the exit code still counts
        print(f"{kind}: {text}", file=sys.stderr, flush=True)
