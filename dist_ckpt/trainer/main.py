"""The training program: from the command line to an exit code.

Everything that can be a user's mistake is found before there is a process group, alike on every rank, and said once.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dist_ckpt.errors import DistCkptError, PlanError
from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import Config, config_yaml, load_config
from dist_ckpt.trainer.exits import FINAL, ExitCode, code_of, record_exit, recorded_exit
from dist_ckpt.trainer.process import (
    Place,
    Termination,
    leave,
    leave_together,
    log_to,
    start_process_group,
)
from dist_ckpt.trainer.run_folder import RunFolder, refuse_overwriting, run_folder

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs ``launch/train.py``; ends the process."""
    place = Place.of(os.environ)
    if "--help" in arguments or "-h" in arguments:
        from dist_ckpt.trainer.help import help_text

        leave_together(place, ExitCode.DONE, lambda: print(help_text()))
    printing = "--print-config" in arguments
    try:
        config = load_config([a for a in arguments if a != "--print-config"])
        check(config, place.world_size)
    except DistCkptError as error:
        _leave_with_mistake(place, None, error)
    if printing:
        leave_together(place, ExitCode.DONE, lambda: print(config_yaml(config), end=""))
    folder = run_folder(config, place)
    last = recorded_exit(folder.path) if place.restarts else None
    if last is not None and last[0] in FINAL:
        code, reason = last
        leave_together(place, code, lambda: _print_error(f"not restarted, it would end the same way: {reason}"))
    try:
        job = _Job(config, place)
        if not config.dry_run:
            refuse_overwriting(folder, config, place)
    except DistCkptError as error:
        _leave_with_mistake(place, folder, error)
    if config.dry_run:
        leave_together(place, ExitCode.DONE, job.print_dry_run)
    leave(_run(job, folder))


class _Job:
    """What a run needs, all built and checked without a process group."""

    def __init__(self, config: Config, place: Place) -> None:
        import torch

        from dist_ckpt.planning import make_plan
        from dist_ckpt.trainer.data import build_data
        from dist_ckpt.trainer.job import build_engine, build_model, device_type

        self.config, self.place = config, place
        kind = device_type(config)
        self.device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
        self.plan = make_plan(build_model(config), config.ckpt)
        self.engine = build_engine(config, self.device)
        if problems := self.engine.refuses(self.plan):
            raise PlanError("; ".join(problems))
        self.train_rows, self.validation_rows = build_data(
            config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, seed=config.train.seed
        )

    def print_dry_run(self) -> None:
        from dist_ckpt.trainer.job import cost_of

        print(self.plan)
        print(f"cost: {cost_of(self.config, self.plan)}")
        print(f"data: {self.train_rows.description}")


def _run(job: _Job, folder: RunFolder) -> ExitCode:
    """The run itself. Whatever ends it is recorded, and said by the rank that it happened on."""
    place = job.place
    try:
        start_process_group(place, job.device.type)
        folder = _shared(folder)
        log_to(folder.log(place.rank))
        done = _train(job, folder)
        _end_process_group()
    except BaseException as error:  # every rank's process ends here, whatever happened
        code = code_of(error)
        reason = str(error) if code is ExitCode.MISTAKE else "".join(traceback.format_exception(error))
        _log.error("%s", reason)
        if code is ExitCode.MISTAKE:  # as a rule found by every rank alike
            record_exit(folder.path, code, reason, rank=place.rank)
            leave_together(place, code, lambda: _print_error(reason), patience_s=3.0, speak_up=True)
        if not _is_echo(error):
            record_exit(folder.path, code, str(error) or type(error).__name__, rank=place.rank)
            _print_error(f"rank {place.rank}: {reason}")
        return code
    code = ExitCode.DONE if done else ExitCode.TERMINATED
    if place.rank == 0:
        record_exit(folder.path, code, "all steps done" if done else "SIGTERM; the training state was saved")
    return code


def _train(job: _Job, folder: RunFolder) -> bool:
    import torch

    from dist_ckpt.report.console import Console
    from dist_ckpt.trainer.job import build_model
    from dist_ckpt.trainer.loop import Loop

    config, place = job.config, job.place
    console = Console(config.train.steps, quiet=place.rank != 0)
    if place.rank == 0:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(config_yaml(config), encoding="utf-8")
        folder.plan.write_text(job.plan.to_json(), encoding="utf-8")
    console.say(f"run folder: {folder.path}")
    console.say(str(job.plan))
    console.say(f"data: {job.train_rows.description}")
    torch.manual_seed(config.train.seed * 1_000_003 + place.rank)  # dropout: each rank its own stream
    job.engine.prepare(build_model(config), job.plan)
    if config.train.accum_sync == "boundary" and job.engine.accumulation_cost_bytes():
        cost = job.engine.accumulation_cost_bytes() / 2**30
        console.say(
            f"train.accum_sync=boundary keeps {cost:.3f} GiB of unsharded gradients on each rank until the boundary"
        )
    loop = Loop(config, job.engine, job.train_rows, job.validation_rows, folder, console, Termination())
    loop.resume(from_latest=place.restarts > 0)
    done = loop.run()
    if loop.report is not None:
        console.table(loop.report)
    return done


def _shared(folder: RunFolder) -> RunFolder:
    """Rank 0's run folder, on every rank."""
    import torch.distributed as dist

    shared = [folder]
    dist.broadcast_object_list(shared)
    return shared[0]


def _end_process_group() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _is_echo(error: BaseException) -> bool:
    """Whether an error is only another rank's end, seen in a collective."""
    import torch.distributed as dist

    return isinstance(error, (dist.DistNetworkError, dist.DistBackendError)) or "Connection closed by peer" in str(
        error
    )


def _leave_with_mistake(place: Place, folder: RunFolder | None, error: DistCkptError) -> NoReturn:
    # Without restarts the message is enough: a folder for a typing error would only be litter.
    if folder is not None and place.rank == 0 and (place.max_restarts or folder.path.exists()):
        record_exit(folder.path, ExitCode.MISTAKE, str(error))
    leave_together(place, ExitCode.MISTAKE, lambda: _print_error(str(error)))


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
