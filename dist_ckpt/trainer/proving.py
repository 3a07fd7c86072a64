"""The program that proves a plan: one update without and with it, under the engine that would train with it."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt.errors import ConfigError, DistCkptError
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.process import Place, leave, leave_with_rank_zero, start_process_group
from dist_ckpt.trainer.program import accept, begin, fail, find_data, print_error, read

if TYPE_CHECKING:
    import torch.distributed as dist

    from dist_ckpt.plan import Plan
    from dist_ckpt.trainer.job import Job
    from dist_ckpt.verification import Observation, Verification

PATIENCE_S = 10.0
"""How long a rank whose step has failed waits for the others: those may be in a collective that it never joined."""

_ABOUT = (
    "launch/verify.py proves that a policy changes nothing but memory and recomputation: it runs one update without\n"
    "and with it, under the same engine, with the same seed and batch. Exit code 0: proven; 1: something differs;\n"
    "2: a mistake. It takes the options of launch/train.py:\n\n"
)


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs ``launch/verify.py``; ends the process."""
    place = begin(arguments, _ABOUT)
    try:
        config = read(arguments)
        accept(config, arguments, place)
        _refuse(config)
        files = find_data(config)

        from dist_ckpt.trainer.job import Job

        job = Job.build(_without_checks(config), place, files)
        if not job.plan.regions:
            raise ConfigError("ckpt: this policy leaves no region to prove; name another, such as +ckpt=full")
    except DistCkptError as error:
        message = str(error)
        leave_with_rank_zero(place, ExitCode.MISTAKE, lambda: print_error(message))
    _leave_with_report(job)


def prove(job: Job) -> Verification:
    """What this rank has seen of one update without and with the job's plan; needs the process group.

    Raises:
        Exception: whatever the update raises without the plan.
    """
    from dist_ckpt.plan import Plan
    from dist_ckpt.verification import judge, untouched

    runs = []
    with untouched(job.source.model, job.source.loss_sum) as start_over:
        without = Plan(stages=job.plan.stages)
        for applied in (without, without, job.plan):
            start_over()
            runs.append(_observed(job, applied))
            if applied is not job.plan and (error := runs[-1].error) is not None:
                raise error
    base, again, planned = runs
    return judge(base, again, planned, job.plan, tolerance=0.0)


def _observed(job: Job, applied: Plan) -> Observation:
    """The first update of training, under a fresh engine."""
    import torch

    from dist_ckpt.trainer.data import micro_batches
    from dist_ckpt.trainer.job import build_engine, seed_rank
    from dist_ckpt.trainer.models.source import model_source
    from dist_ckpt.verification import Observer, like_with_a_plan

    config, place = job.config, job.place
    if config.train.compile:
        torch._dynamo.reset()  # code that one run has compiled must not serve the other
    source = model_source(config.model, config.train.seed)
    engine = build_engine(config, place, job.device, source)
    seed_rank(config, place.rank)
    engine.prepare(source.model, applied)
    like_with_a_plan(engine.model, job.plan)
    accum = config.resolved_grad_accum(place.world_size)
    batches = micro_batches(job.train_rows, 0, engine.data_rank, engine.data_ranks, config.train.micro_batch, accum)
    observer = Observer(engine.model, job.plan, source.loss_sum, batches)
    engine.observer = observer

    def step() -> None:
        result = engine.train_step(batches, measure=True)
        observer.seen.numbers = {"the mean loss": result.loss, "the gradient norm": result.grad_norm}

    seen = observer.run(step)
    if engine.memory is not None:
        seen.saved_bytes, seen.stage = engine.memory.activations, engine.memory.stage
    engine.close()
    return seen


def _refuse(config: Config) -> None:
    if config.dry_run:
        raise ConfigError("dry_run=true: a proof runs an update for real; launch/train.py has the dry run")
    if config.train.resume is not None:
        raise ConfigError(f"train.resume={config.train.resume}: a proof is about the first update of a run")


def _without_checks(config: Config) -> Config:
    """A lost gradient is to be reported with its cause, not to stop the update."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, check_gradients=False))


def _leave_with_report(job: Job) -> NoReturn:
    from dist_ckpt.trainer.job import end_process_group

    place = job.place
    logging.captureWarnings(True)  # torch's own go to no console, as in training
    try:
        store = start_process_group(place, job.device.type)
        outcome = _Outcome.of(prove(job), store, place)
        if outcome.is_whole:
            end_process_group()
    except BaseException as error:  # whatever it is: every rank's process ends here
        leave(fail(error, None, place))
    report = outcome.report
    code = ExitCode.DONE if report.ok else ExitCode.MISTAKE if report.is_refused else ExitCode.FAULT
    if outcome.is_whole:
        leave_with_rank_zero(place, code, lambda: print(report, flush=True))
    if outcome.speaks:
        print(report, flush=True)
    leave(code)


@dataclass(frozen=True)
class _Outcome:
    """What the ranks have found together."""

    report: Verification
    is_whole: bool
    """Whether it is one of all ranks, the same on each."""
    speaks: bool = True
    """Whether this rank is the one to print it, where it is not."""

    @staticmethod
    def of(mine: Verification, store: dist.Store, place: Place) -> _Outcome:
        """Without a collective: where one rank's step has failed, others may be in one that it never joins."""
        from dist_ckpt.verification import merge

        if store.check(["report_is_printed"]):  # what has become of this rank's step is but a consequence
            return _Outcome(mine, is_whole=False, speaks=False)
        keys = [f"verification_of_{rank}" for rank in range(place.world_size)]
        store.set(keys[place.rank], pickle.dumps(mine).hex())
        deadline = time.monotonic() + (PATIENCE_S if mine.has_failed else math.inf)
        while not store.check(keys) and time.monotonic() < deadline and not store.check(["report_is_printed"]):
            time.sleep(0.05)
        there = [rank for rank, key in enumerate(keys) if store.check([key])]
        report = merge([pickle.loads(bytes.fromhex(store.get(keys[rank]).decode())) for rank in there])
        if len(there) == len(keys):
            return _Outcome(report, is_whole=True)
        waiting = ", ".join(str(rank) for rank in range(len(keys)) if rank not in there)
        note = f"rank {waiting}: waits for those whose step has failed, and was not compared"
        report = dataclasses.replace(report, notes=(*report.notes, note))
        return _Outcome(report, is_whole=False, speaks=store.add("report_is_printed", 1) == 1)
