"""The training loop. It never calls ``backward``: the engine performs each update as a whole."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt.batch import IGNORE_INDEX, Batch
from dist_ckpt.engines import Engine, StepResult
from dist_ckpt.errors import StateError
from dist_ckpt.memory.leaks import LeakWatch
from dist_ckpt.memory.meter import gather_report
from dist_ckpt.memory.out_of_memory.limits import MemoryLimit
from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.console import Console
from dist_ckpt.report.sinks import Sink
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.data import RowDataset, micro_batch, micro_batches
from dist_ckpt.trainer.process import Termination
from dist_ckpt.trainer.run_folder import RunFolder
from dist_ckpt.trainer.state import StateStore

_log = logging.getLogger(__name__)


_HYPER_PARAMETERS = (
    "lr", "min_lr_ratio", "warmup_steps", "steps", "weight_decay", "beta1", "beta2", "optimizer_eps", "clip",
)  # fmt: skip
"""Options of ``train`` that a resumed run may change; changes are printed."""


class Loop:
    """One run on this rank.

    Args:
        engine: prepared.
        train_rows, validation_rows: the data; samples are taken by global index.
        limit: on this rank's memory, to be lifted as soon as an update fails.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        train_rows: RowDataset,
        validation_rows: RowDataset,
        folder: RunFolder,
        console: Console,
        termination: Termination,
        limit: MemoryLimit,
    ) -> None:
        self.config = config
        self.engine = engine
        self.train_rows = train_rows
        self.validation_rows = validation_rows
        self.folder = folder
        self.console = console
        self.termination = termination
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.grad_accum = config.resolved_grad_accum(self.world_size)
        self.store = StateStore(folder.states, config.train.keep)
        self.position = 0
        """Global index of the next sample; independent of the number of ranks."""
        self.report: MemoryReport | None = None
        """The last one."""
        self.deep_report: MemoryReport | None = None
        """The one of the deep step, once it is done."""
        self.profiles: tuple[StepProfile, ...] = ()
        """On rank 0: what the deep step has found, a profile a rank."""
        self._leaks = LeakWatch(engine.owners, engine.device)
        self._first_step = 0
        self._limit = limit
        self._last: StepResult | None = None
        self._saved_at: int | None = None
        self._started_s = time.perf_counter()

    @property
    def step(self) -> int:
        """Updates done."""
        return self.engine.step

    def resume(self, restarted: bool) -> None:
        """Loads a training state, if one is asked for and exists.

        Args:
            restarted: the run continues from its own newest state, whatever it was started from.

        Raises:
            StateError: on every rank: the state is damaged, does not fit, or was saved with other data.
        """
        path = (self.store.latest() if restarted else None) or self.store.resolve(self.config.train.resume)
        if path is None:
            return
        extra = self.engine.load(str(path))
        self.position = self._position(path, extra)
        self._saved_at = self.step if path.parent == self.folder.states else None
        self.console.say(f"resumed from {path} at step {self.step}")
        before = extra.get("options", {})
        if changed := differences(before, {k: v for k, v in self._options().items() if k in before}):
            self.console.say(f"changed since the state was saved: {', '.join(changed)}")
        if not extra["rng"]:
            self.console.say(
                "the state was saved by another number of ranks: random generators start over, so dropout differs from "
                "that of an uninterrupted run"
            )

    def run(self, sinks: Sequence[Sink] = ()) -> bool:
        """Trains until the last step, or until a SIGTERM.

        Args:
            sinks: what takes the records; none on other ranks than 0.

        Returns:
            Whether all steps were done.
        """
        train = self.config.train
        self._first_step = self.step
        self.console.start(self.step)
        try:
            while self.step < train.steps and not self._asked_to_stop():
                line = self._step()
                for sink in sinks:
                    sink.step(line)
                    if self.report is not None and self.report.step == self.step:
                        sink.memory(self.report)
                    if self.deep_report is not None and self.deep_report.step == self.step:
                        sink.profile(self.profiles)
                if train.save_every and self.step % train.save_every == 0:
                    self.save()
        finally:
            self.console.stop()
        done = self.step >= train.steps
        if (train.save_every or not done) and self._saved_at != self.step:
            self.save()
        return done

    def summary(self) -> str:
        """The outcome, in one line."""
        step, steps = self.step, self.config.train.steps
        if step < steps:
            what = f"stopped by SIGTERM after step {step} of {steps}, training state saved"
        elif self._last is None:
            what = f"nothing to do: step {step} of {steps} was reached before"
        else:
            what = f"done: steps {self._first_step + 1} to {step}"
        loss = f", last loss {self._last.loss:.4f}" if self._last is not None else ""
        return f"{what}{loss}, {time.perf_counter() - self._started_s:.1f} s of training, in {self.folder.path}"

    def save(self) -> None:
        """Saves the training state of this step; all ranks call it."""
        extra = {
            "position": self.position,
            "data": dict(self.train_rows.fingerprint),
            "options": self._options(),
        }
        path = self.store.save(self.step, lambda folder, number: self.engine.save(str(folder), {**extra, **number}))
        self._saved_at = self.step
        _log.info("saved the training state to %s", path)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            **{f"train.{name}": getattr(config.train, name) for name in _HYPER_PARAMETERS},
            "train.precision": str(config.train.precision),
            "engine": str(config.engine.name),
            "ckpt": config.ckpt.mode,
            "rows per update": config.resolved_global_batch(self.world_size),
        }

    def _position(self, path: Path, extra: Mapping[str, Any]) -> int:
        """The position in the data, which means the same rows here as where it was saved."""
        position, data = extra.get("position"), extra.get("data")
        if not isinstance(position, int) or not isinstance(data, dict):
            raise StateError(f"{path}: holds no position in the data; it was not saved by this program")
        if differing := differences(data, self.train_rows.fingerprint):
            raise StateError(
                f"{path}: was saved by a run with other data, in which its position {position} means other rows "
                f"(state → this run: {', '.join(differing)})"
            )
        return position

    def _step(self) -> dict[str, float | int]:
        config, number = self.config, self.step + 1
        start = time.perf_counter()
        deep = number == config.report.profile_step
        measure = deep or number % config.report.every == 0 or number == config.train.steps
        size = config.train.micro_batch
        rank, ranks = self.engine.data_rank, self.engine.data_ranks
        batches = micro_batches(self.train_rows, self.position, rank, ranks, size, self.grad_accum)
        result = self._deep_step(batches) if deep else self.engine.train_step(batches, measure=measure)
        seconds = time.perf_counter() - start
        self._last = result
        self.position += size * ranks * self.grad_accum
        if measure:
            assert self.engine.memory is not None
            leak = self._leaks.look(number)
            memory = dataclasses.replace(self.engine.memory, leak=None if leak is None else str(leak))
            self.report = gather_report(memory)
            self.deep_report = self.report if deep else self.deep_report
            self.console.leaks(self.report)
        line: dict[str, float | int] = {
            "step": number,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds,
            "step_s": seconds,
        }
        reported = self.report if measure else None
        self.console.step(number, result.loss, result.grad_norm, line["tokens_per_s"], reported)
        if config.train.eval_every and number % config.train.eval_every == 0:
            line["eval_loss"] = self.engine.eval_loss(self._validation_batches())
            self.console.say(f"step {number}/{config.train.steps}  validation loss {line['eval_loss']:.4f}")
        _log.info("%s", line)
        return line

    def _deep_step(self, batches: Sequence[Batch]) -> StepResult:
        """An update of which every allocation is recorded; each rank's memory then says what its peak consists of."""
        history = self.folder.profiles / f"rank_{self.rank}.pickle"
        with self.engine.meter.profile(batches, history) as deep, self._limit:  # the profiler needs memory to stop
            result = self.engine.train_step(batches, measure=True)
        self.engine.memory = deep.memory
        profiles: list[StepProfile | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(deep.profile, profiles)
        self.profiles = tuple(profile for profile in profiles or () if profile is not None)
        return result

    def _validation_batches(self) -> Iterator[Batch]:
        """This rank's validation rows, at most all of them once; all ranks yield the same number of micro-batches."""
        size = self.config.train.micro_batch
        at_once = size * self.engine.data_ranks
        for number in range(min(self.config.train.eval_batches, -(-self.validation_rows.num_rows // at_once))):
            start = number * at_once
            yield self._without_repeats(micro_batch(self.validation_rows, start, self.engine.data_rank, size), start)

    def _without_repeats(self, batch: Batch, start: int) -> Batch:
        """The batch without targets in rows past the last one, where the dataset starts again."""
        first = start + self.engine.data_rank * self.config.train.micro_batch
        labels = batch["labels"].clone()
        labels[max(self.validation_rows.num_rows - first, 0) :] = IGNORE_INDEX
        return {**batch, "labels": labels}

    def _asked_to_stop(self) -> bool:
        """Whether any rank has received a SIGTERM: all ranks stop after the same step."""
        asked = torch.tensor(float(self.termination.asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between two flat mappings, an entry a key.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None})
    ['b 2 → 3']
    """
    return [f"{key} {one.get(key)} → {other.get(key)}" for key in {**one, **other} if one.get(key) != other.get(key)]
