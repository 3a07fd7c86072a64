"""The run folder: where it is, and what lies where in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt.errors import ConfigError
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.process import Place


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

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank_{rank}.log"


def run_folder(config: Config, place: Place) -> RunFolder:
    """The folder that a run writes to. What it gives on rank 0 counts; nothing is created.

    A default name carries the time at which the job was started, not this process: when torchrun restarts its workers
    they find the folder again, with the states and the reason of the last exit.
    """
    if config.run_dir is not None:
        return RunFolder(Path(config.run_dir))
    started = _start_time(os.getppid()) if place.under_torchrun else time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    job = os.getppid() if place.under_torchrun else os.getpid()
    return RunFolder(Path("outputs") / f"{stamp}-{config.engine.name}-{config.ckpt.mode}-{job}")


def refuse_overwriting(folder: RunFolder, config: Config, place: Place) -> None:
    """A folder that holds another run is not written over.

    Raises:
        ConfigError: it does, and this run neither resumes from it nor is a restart of it.
    """
    if folder.metrics.exists() and config.train.resume is None and place.restarts == 0:
        raise ConfigError(
            f"run_dir={folder.path}: holds a run already. Continue it with train.resume=auto, or choose another folder"
        )


def _start_time(pid: int) -> float:
    """When a process was started, in seconds since the epoch; now, where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
