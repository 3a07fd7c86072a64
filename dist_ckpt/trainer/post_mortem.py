"""What a rank that ran out of memory leaves behind: ``oom/rank_r.json``, and the page that shows it."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import DistCkptError
from dist_ckpt.memory.ledger import owners_of
from dist_ckpt.memory.out_of_memory.failure import out_of_memory_in
from dist_ckpt.memory.out_of_memory.post_mortem import PostMortem, post_mortem
from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.memory.records import MemoryReport, in_bytes
from dist_ckpt.planning import make_plan
from dist_ckpt.policy import policy_from
from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.run_layout import of_rank
from dist_ckpt.trainer.job import Job, Sample, stages_of
from dist_ckpt.trainer.models.source import model_source
from dist_ckpt.trainer.program import print_error
from dist_ckpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from dist_ckpt.cost import StageCost
    from dist_ckpt.memory.out_of_memory.limits import MemoryLimit

_log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long it may take to find out what other policies would cost."""
POLICIES = ("selective", "full", "nested")
"""Those worth a try, from the least recomputed to the most."""
_WITH_ACTIVATIONS = ("forward", "loss", "recompute", "backward")
"""Phases in which a policy has a say in what is alive."""


@dataclass(frozen=True)
class Suggestion:
    """A change that saves activations, and what it should save on this rank, by prediction."""

    change: str
    """As on the command line."""
    saved_bytes: int
    """Activations at the peak with it."""
    freed_bytes: int
    """How much less than now that is."""
    recomputed: float
    """Extra FLOPs, as a fraction of those without a policy."""


def explain(error: BaseException, job: Job, folder: RunFolder, limit: MemoryLimit) -> None:
    """Writes down what filled memory, if that is what an error is about.

    It never raises: the run has ended for another reason, which must not be hidden.
    """
    if out_of_memory_in(error) is None:
        return
    try:
        found = _examine(error, job, limit)
        record = found.to_dict() | {"suggestions": [], "advice": advice(found), **_last_report(folder)}
        path = of_rank(folder.oom, job.place.rank)
        where = _write(path, record)  # now: what follows takes time
        rank = f"rank {job.place.rank}"
        print_error(f"{rank}: {in_a_sentence(found)}", kind="note")
        print_error(f"{rank}: what filled memory is in {where}", kind="note")
        if found.place.phase in _WITH_ACTIVATIONS:
            suggested = suggestions(job, found.stage)
            record["suggestions"] = [dataclasses.asdict(one) for one in suggested]
            _write(path, record)
            if suggested:
                less = ", ".join(f"{in_bytes(one.freed_bytes)} less with {one.change}" for one in suggested)
                print_error(f"{rank}: activations would be {less}", kind="note")
    except BaseException as problem:
        _log.exception("the post-mortem could not be written")
        print_error(f"the post-mortem could not be written: {type(problem).__name__}: {problem}", kind="warning")


def _examine(error: BaseException, job: Job, limit: MemoryLimit) -> PostMortem:
    engine = job.engine
    model = getattr(engine, "model", job.model)
    is_prepared = hasattr(engine, "meter")  # the last thing that preparing an engine does
    return post_mortem(
        error,
        model,
        engine.owners if is_prepared else lambda: owners_of(model, None),
        rank=job.place.rank,
        stage=getattr(engine, "stage", None),
        step=engine.step + 1,
        limit=limit,
    )


def in_a_sentence(found: PostMortem) -> str:
    """What failed where, and what most of the memory was."""
    asked = f"{in_bytes(found.requested_bytes)} failed" if found.requested_bytes is not None else "an allocation failed"
    place = {"optimizer": "the optimizer step", "other": "the engine's own work"}.get(
        found.place.phase, found.place.phase
    )
    module = f" of {found.place.module}" if found.place.module else ""
    kind = max(KINDS, key=lambda one: found.by_kind[one])
    most = ""
    if found.tensor_bytes:
        share = found.by_kind[kind] / found.tensor_bytes
        most = f"; most of the tensors alive were {kind}, {in_bytes(found.by_kind[kind])} ({share:.0%})"
    return f"{asked} in {place}{module}{most}"


def advice(found: PostMortem) -> str:
    """What is to be done, in a sentence or two."""
    if found.place.phase in _WITH_ACTIVATIONS:
        return "Recompute more, or make micro-batches smaller and accumulate more of them."
    what = {
        "setup": "The model and its optimizer do not fit",
        "optimizer": "Parameters, gradients and optimizer states do not fit, with what the update needs besides",
        "evaluation": "Validation keeps no activations: its largest tensors are the logits of a micro-batch",
        "saving": "Saving or loading a training state needs copies",
    }.get(found.place.phase, "No policy changes what is alive here")
    return (
        f"{what}. No policy helps with that: shard over more ranks (engine=fsdp2, or ZeRO 3), offload with DeepSpeed, "
        "or make the model smaller."
    )


def suggestions(job: Job, stage: int | None) -> list[Suggestion]:
    """Policies that would keep less than the run's, and half the micro-batch, as far as there is time to ask.

    Measured as ``plan_cost`` does it, on a model without memory.

    Args:
        stage: of the pipeline, that this rank runs.
    """
    found: list[Suggestion] = []
    with _at_most(PATIENCE_S):
        now = _cost(job, stage)
        for change, other in _alternatives(job):
            cost = _cost(other, stage)
            if cost.saved_bytes < now.saved_bytes:
                extra = cost.micro_batch.recomputed_flops / max(cost.micro_batch.baseline_flops, 1)
                found.append(Suggestion(change, cost.saved_bytes, now.saved_bytes - cost.saved_bytes, extra))
    return sorted(found, key=lambda one: (one.recomputed, -one.freed_bytes))


def _alternatives(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes, as on the command line, and the jobs that they make; those that the engine refuses are left out."""
    config = job.config
    if config.train.micro_batch > 1:
        half = config.train.micro_batch // 2
        accum = config.resolved_grad_accum(job.place.world_size) * config.train.micro_batch // half
        train = dataclasses.replace(config.train, micro_batch=half, grad_accum=accum, global_batch=None)
        smaller = dataclasses.replace(job, config=dataclasses.replace(config, train=train))
        yield f"train.micro_batch={half} train.grad_accum={accum}", smaller
    for mode in POLICIES:
        if mode == config.ckpt.mode:
            continue
        with suppress(DistCkptError):
            source = model_source(config.model, config.train.seed)
            sample, stages = Sample.of(config, source), stages_of(config, source)
            plan = make_plan(sample.model, policy_from({"mode": mode}), sample.batch, sample.loss, stages)
            if not job.engine.refuses(plan):
                yield f"ckpt={mode}", dataclasses.replace(job, plan=plan)


def _cost(job: Job, stage: int | None) -> StageCost:
    source = model_source(job.config.model, job.config.train.seed)  # the job's own has memory, and is sharded
    return dataclasses.replace(job, source=source).costs()[stage or 0]


class _OutOfTime(Exception):
    """Raised wherever the main thread is."""


@contextmanager
def _at_most(patience_s: float) -> Iterator[None]:
    """Ends what runs inside after a time, without an error. Only for the main thread."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, patience_s)
    try:
        yield
    except _OutOfTime:
        _log.info("no more time for predictions")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _write(path: Path, record: Mapping[str, Any]) -> Path:
    """Writes the record and its page, and returns the one to look at: the record, if pages cannot be made here."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if find_spec("jinja2") is None:
        return path
    from dist_ckpt.report.html.out_of_memory import out_of_memory_page  # needs an extra

    page = path.with_suffix(".html")
    page.write_text(out_of_memory_page(record), encoding="utf-8")
    return page


def _last_report(folder: RunFolder) -> dict[str, Any]:
    """Every rank's memory as it was reported last, which may be some steps ago; ``heaviest_rank`` among them."""
    reports = read_json_lines(folder.memory) if folder.memory.exists() else []
    if not reports:
        return {"last_report": None, "heaviest_rank": None}
    return {"last_report": reports[-1], "heaviest_rank": MemoryReport.from_dict(reports[-1]).heaviest.rank}
