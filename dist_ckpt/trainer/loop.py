"""The training loop. It never calls ``backward``: an update is the engine's."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_ckpt.batch import IGNORE_INDEX, Batch
from dist_ckpt.engines import DataParallelEngine, StepResult
from dist_ckpt.memory.meter import gather_report
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.console import Console
from dist_ckpt.report.jsonl import JsonLines
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.data import RowDataset, micro_batch
from dist_ckpt.trainer.process import Termination
from dist_ckpt.trainer.run_folder import RunFolder
from dist_ckpt.trainer.state import StateStore

_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    """Updates done."""
    position: int = 0
    """Global index of the next sample; independent of the number of ranks."""


class Loop:
    """One run on this rank.

    Args:
        engine: prepared.
        train_rows, validation_rows: the data; samples are taken by global index.
    """

    def __init__(
        self,
        config: Config,
        engine: DataParallelEngine,
        train_rows: RowDataset,
        validation_rows: RowDataset,
        folder: RunFolder,
        console: Console,
        termination: Termination,
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
        self.progress = Progress()
        self.report: MemoryReport | None = None
        self._first_step = 0
        self._last: StepResult | None = None
        self._saved_at: int | None = None
        self._started_s = time.perf_counter()

    def resume(self, restarted: bool) -> None:
        """Takes up a saved training state, if one is asked for and there.

        Args:
            restarted: the run goes on from its own newest state, whatever it was started from.
        """
        path = (self.store.latest() if restarted else None) or self.store.resolve(self.config.train.resume)
        if path is None:
            return
        extra = self.engine.load(str(path))
        self.progress = Progress(extra["step"], extra["position"])
        self._saved_at = self.progress.step if path.parent == self.folder.states else None
        self.console.say(f"resumed from {path} at step {self.progress.step}")
        if extra["rng"] is None:
            self.console.say(
                "the state is of another number of ranks: random generators start anew, so dropout differs from a run "
                "that was never stopped"
            )

    def run(self) -> bool:
        """Trains to the last step, or to a SIGTERM.

        Returns:
            Whether all steps were done.
        """
        train, first_step = self.config.train, self.progress.step
        self._first_step = first_step
        writes = self.rank == 0
        metrics = JsonLines(self.folder.metrics, first_step) if writes else None
        memory = JsonLines(self.folder.memory, first_step) if writes else None
        self.console.start(first_step)
        try:
            while self.progress.step < train.steps and not self._asked_to_stop():
                line = self._step()
                if metrics is not None and memory is not None:
                    metrics.write(line)
                    if self.report is not None and self.report.step == self.progress.step:
                        memory.write(self.report.to_dict())
                if train.save_every and self.progress.step % train.save_every == 0:
                    self.save()
        finally:
            self.console.stop()
            for file in (metrics, memory):
                if file is not None:
                    file.close()
        done = self.progress.step >= train.steps
        if (train.save_every or not done) and self._saved_at != self.progress.step:
            self.save()
        return done

    def summary(self) -> str:
        """What happened, in one line."""
        step, steps = self.progress.step, self.config.train.steps
        if step < steps:
            what = f"stopped by SIGTERM after step {step} of {steps}, training state saved"
        elif self._last is None:
            what = f"nothing to do: step {step} of {steps} was reached before"
        else:
            what = f"done: steps {self._first_step + 1} to {step}"
        loss = f", last loss {self._last.loss:.4f}" if self._last is not None else ""
        return f"{what}{loss}, {time.perf_counter() - self._started_s:.1f} s, in {self.folder.path}"

    def save(self) -> None:
        """Saves the training state of this step; all ranks call it."""
        extra = {"position": self.progress.position}
        path = self.store.save(self.progress.step, lambda temporary: self.engine.save(str(temporary), extra))
        self._saved_at = self.progress.step
        _log.info("saved the training state to %s", path)

    def _step(self) -> dict[str, float | int]:
        config, progress = self.config, self.progress
        start = time.perf_counter()
        measure = (progress.step + 1) % config.report.every == 0 or progress.step + 1 == config.train.steps
        result = self.engine.train_step(self._micro_batches(), measure=measure)
        seconds = time.perf_counter() - start
        self._last = result
        progress.step += 1
        progress.position += config.train.micro_batch * self.world_size * self.grad_accum
        if measure:
            assert self.engine.memory is not None
            self.report = gather_report(self.engine.memory)
        line: dict[str, float | int] = {
            "step": progress.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds,
            "step_s": seconds,
        }
        self.console.step(progress.step, result.loss, result.grad_norm, line["tokens_per_s"], self.report)
        if config.train.eval_every and progress.step % config.train.eval_every == 0:
            line["eval_loss"] = self.engine.eval_loss(self._validation_batches())
            self.console.say(f"step {progress.step}/{config.train.steps}  validation loss {line['eval_loss']:.4f}")
        _log.info("%s", line)
        return line

    def _micro_batches(self) -> list[Batch]:
        size = self.config.train.micro_batch
        starts = (self.progress.position + m * size * self.world_size for m in range(self.grad_accum))
        return [micro_batch(self.train_rows, start, self.rank, size) for start in starts]

    def _validation_batches(self) -> list[Batch]:
        """This rank's validation rows; as many micro-batches on each rank, for the ranks evaluate together."""
        size = self.config.train.micro_batch
        starts = (m * size * self.world_size for m in range(self.config.train.eval_batches))
        return [
            self._without_repeats(micro_batch(self.validation_rows, start, self.rank, size), start) for start in starts
        ]

    def _without_repeats(self, batch: Batch, start: int) -> Batch:
        """The batch without targets in rows beyond the last one, where the rows begin again."""
        first = start + self.rank * self.config.train.micro_batch
        labels = batch["labels"].clone()
        labels[max(self.validation_rows.num_rows - first, 0) :] = IGNORE_INDEX
        return {**batch, "labels": labels}

    def _asked_to_stop(self) -> bool:
        """Whether any rank got a SIGTERM: all ranks stop after the same step."""
        asked = torch.tensor(float(self.termination.asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)
