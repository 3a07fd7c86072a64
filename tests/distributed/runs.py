"""Whole runs on a group of ranks: the program's own loop, without the seconds that fresh processes cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.trainer import job as job_module
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.job import Job, train
from dist_ckpt.trainer.memory_limit import limit_memory
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.reporting import RunSinks
from dist_ckpt.trainer.run_folder import RunFolder

TINY = ("model.n_layers=2", "model.d_model=32", "model.d_ff=48", "train.seq_len=32", "train.micro_batch=2")


class StopsAfter:
    """In place of :class:`~dist_ckpt.trainer.process.Termination`: on rank 0 a SIGTERM comes in step ``steps``."""

    def __init__(self, rank: int, steps: int | None) -> None:
        self._steps = steps if rank == 0 else None
        self._asked = 0

    @property
    def asked(self) -> bool:
        """The loop asks before each step."""
        self._asked += 1
        return self._steps is not None and self._asked > self._steps


def run_here(
    rank: int, world: int, run_dir: str, arguments: Sequence[str], steps: int | None = None
) -> tuple[bool, list[dict[str, Any]]]:
    """One run on this rank.

    Args:
        steps: after so many a SIGTERM comes.

    Returns:
        Whether all steps were done, and the lines of ``metrics.jsonl``.
    """
    config = load_config([*TINY, *arguments, f"run_dir={run_dir}"])
    place = Place(rank, world, rank, world)
    folder = RunFolder(Path(run_dir))
    folder.path.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "Termination", lambda: StopsAfter(rank, steps))
        job = Job.build(config, place)
        sinks = RunSinks()
        done = train(job, folder, limit_memory(config, job.device), sinks)
        sinks.finish(ExitCode.DONE if done else ExitCode.TERMINATED)
    torch.distributed.barrier()
    return done, read_json_lines(folder.metrics)


def trajectory(lines: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each step what must not depend on speed."""
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m["tokens"]) for m in lines]
