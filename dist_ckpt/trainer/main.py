"""The training program: from the command line to an exit code.

User mistakes are found on every rank before there is a process group, and printed once; those that can be found without
torch even before torch is imported, so that a typo costs no time.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt.errors import DistCkptError
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.exits import FINAL, ExitCode, forget_exit, record_exit, recorded_exit
from dist_ckpt.trainer.process import Place, leave, leave_with_rank_zero, log_to, start_process_group
from dist_ckpt.trainer.program import accept, begin, fail, find_data, not_recorded, print_error, read
from dist_ckpt.trainer.run_folder import RunFolder, check_run_folder, claim_run_folder, find_run_folder, may_write_to
from dist_ckpt.trainer.watch import failures_watched

if TYPE_CHECKING:
    from dist_ckpt.memory.out_of_memory.limits import MemoryLimit
    from dist_ckpt.trainer.job import Job
    from dist_ckpt.trainer.reporting import RunSinks


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs ``launch/train.py``; ends the process."""
    place = begin(arguments)
    config: Config | None = None
    try:
        config = read(arguments)
        accept(config, arguments, place)
        files = find_data(config)
        if config.dry_run and place.rank != 0:
            leave(ExitCode.DONE)
        if place.rank == 0 and place.restarts:
            _stop_if_final(config)
        # After a restart only rank 0 can tell whether the folder is this job's: it may be on another machine.
        if not config.dry_run and (place.rank == 0 or not place.restarts):
            check_run_folder(config, restarted=place.restarts > 0)

        from dist_ckpt.trainer.job import Job
        from dist_ckpt.trainer.memory_limit import limit_memory

        job = Job.build(config, place, files)
        if config.dry_run:
            print(job.forecast())
            leave(ExitCode.DONE)
        limit = limit_memory(config, job.device)
        folder = claim_run_folder(config, restarted=place.restarts > 0) if place.rank == 0 else None
    except DistCkptError as error:
        _leave_with_mistake(place, config, arguments, str(error))
    leave(_run(job, folder, limit))


def _stop_if_final(config: Config) -> None:
    """Ends a restarted job at once if a restart would only repeat what ended it."""
    folder = find_run_folder(config, restarted=True)
    last = recorded_exit(folder.path) if folder is not None else None
    if last is not None and last[0] in FINAL:
        print_error(f"not restarted, it would end the same way: {last[1]}")
        leave(last[0])


def _run(job: Job, folder: RunFolder | None, limit: MemoryLimit) -> ExitCode:
    """The run itself, and what is left to write when it has ended, however it has.

    Args:
        folder: on rank 0, which sends it to the others.
        limit: on this rank's memory.
    """
    from dist_ckpt.trainer.reporting import RunSinks

    sinks = RunSinks()
    code = _train(job, folder, limit, sinks)
    sinks.finish(code)
    return code


def _train(job: Job, folder: RunFolder | None, limit: MemoryLimit, sinks: RunSinks) -> ExitCode:
    """Trains. Whatever ends the run is recorded, and printed by the rank on which it happened."""
    from dist_ckpt.trainer.job import agree_on_folder, end_process_group, train
    from dist_ckpt.trainer.post_mortem import explain

    place = job.place
    with ExitStack() as stack:
        try:
            with limit:
                start_process_group(place, job.device.type)
                folder = agree_on_folder(folder)
                log_to(folder.log(place.rank))
                stack.enter_context(failures_watched(folder.path))
                done = train(job, folder, limit, sinks)
                end_process_group()
        except BaseException as error:  # whatever it is: every rank's process ends here
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when a rank that has less to write has gone
            code = fail(error, folder, place)
            if folder is not None:
                explain(error, job, folder, limit)
            return code
    code = ExitCode.DONE if done else ExitCode.TERMINATED
    if place.rank == 0:
        try:
            record_exit(folder.path, code, "all steps done" if done else "SIGTERM; the training state was saved")
        except OSError as problem:  # the run has done what was asked
            print_error(not_recorded(folder, problem), kind="warning")
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
    leave_with_rank_zero(place, ExitCode.MISTAKE, lambda: print_error(message))


def _run_dir_in(arguments: Sequence[str]) -> str | None:
    """The ``run_dir`` in arguments that are not a valid configuration, if it is plain text."""
    given = [a.partition("=")[2].strip("'\"") for a in arguments if a.lstrip("+").startswith("run_dir=")]
    return given[-1] if given and given[-1] != "null" and "${" not in given[-1] else None
