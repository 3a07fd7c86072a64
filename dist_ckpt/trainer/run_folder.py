"""The run folder: which one it is, and what lies where in it. Rank 0 chooses it and tells the others."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt.errors import ConfigError
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.exits import forget_exit

OUTPUTS = Path("outputs")
"""Where runs without ``run_dir`` have their folders."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        return self.path / "memory.jsonl"

    @property
    def states(self) -> Path:
        return self.path / "states"

    @property
    def job(self) -> Path:
        """Names the job that writes here, so that its restarts find the folder again."""
        return self.path / ".job"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank_{rank}.log"

    def holds_a_run(self) -> bool:
        return any(path.exists() for path in (self.config, self.metrics, self.states))


def find_run_folder(config: Config, restarted: bool) -> RunFolder | None:
    """The folder that this run has been given, or that it had before its restart; None for a new one."""
    if config.run_dir is not None:
        return RunFolder(Path(config.run_dir))
    return next((found for found in map(RunFolder, OUTPUTS.glob("*")) if _is_ours(found)), None) if restarted else None


def may_write_to(folder: RunFolder, config: Config, restarted: bool) -> bool:
    """Whether the folder is free, or holds the run that is to go on: another run is not written over."""
    resume = config.train.resume
    if resume == "auto" or not folder.holds_a_run():
        return True
    if resume is not None and Path(resume).resolve().parent == folder.states.resolve():
        return True
    return restarted and _is_ours(folder)


def claim_run_folder(config: Config, restarted: bool) -> RunFolder:
    """Makes the run's folder, or takes it up again. Rank 0 alone calls this.

    Raises:
        ConfigError: the folder holds another run, or cannot be written to.
    """
    folder = find_run_folder(config, restarted)
    if folder is not None and not may_write_to(folder, config, restarted):
        raise ConfigError(
            f"run_dir={folder.path}: holds a run already. Continue it with train.resume=auto, or choose another folder"
        )
    where = OUTPUTS if folder is None else folder.path
    try:
        folder = folder or _new_folder(config)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.job.write_text(_job(), encoding="utf-8")
        forget_exit(folder.path)
    except OSError as error:
        raise ConfigError(f"run_dir={where}: cannot be written to: {error.strerror}") from error
    return folder


def _new_folder(config: Config) -> RunFolder:
    """``outputs/<time>-<engine>-<ckpt>``, with a number where another job has started in the same second."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.engine.name}-{config.ckpt.mode}"
    OUTPUTS.mkdir(exist_ok=True)
    number = 1
    while True:
        path = OUTPUTS / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return RunFolder(path)
        except FileExistsError:
            number += 1


def _is_ours(folder: RunFolder) -> bool:
    try:
        return folder.job.read_text(encoding="utf-8") == _job()
    except OSError:
        return False


def _job() -> str:
    """What every start of one job has in common: torchrun's process, which starts the workers anew."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{socket.gethostname()} {parent} {started}".rstrip()
