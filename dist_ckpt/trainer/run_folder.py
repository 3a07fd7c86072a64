"""The run folder: how it is chosen, and the paths inside it. Rank 0 chooses it and tells the others."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt.errors import ConfigError
from dist_ckpt.report.run_layout import RunLayout
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.exits import forget_exit

OUTPUTS = Path("outputs")
"""Holds the folders of runs without ``run_dir``."""


@dataclass(frozen=True)
class RunFolder(RunLayout):
    """A run's folder as the trainer has it: with what nobody else looks at."""

    @property
    def states(self) -> Path:
        return self.path / "states"

    @property
    def job(self) -> Path:
        """Identifies the job that writes here, so that its restarts find the folder again."""
        return self.path / ".job"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank_{rank}.log"

    def holds_a_run(self) -> bool:
        """Whether a run has got as far as a step here; one that was refused earlier may be corrected and repeated."""
        stepped = self.metrics.exists() and self.metrics.stat().st_size > 0
        return stepped or any(self.states.glob("step_*"))


def find_run_folder(config: Config, restarted: bool) -> RunFolder | None:
    """The folder that ``run_dir`` names, or that this job had before its restart; None if it needs a new one."""
    if config.run_dir is not None:
        return RunFolder(Path(config.run_dir))
    return next((found for found in map(RunFolder, OUTPUTS.glob("*")) if _is_ours(found)), None) if restarted else None


def may_write_to(folder: RunFolder, config: Config, restarted: bool) -> bool:
    """Whether the folder is free, or holds the run that is to be continued: no other run is overwritten."""
    resume = config.train.resume
    if resume == "auto" or not folder.holds_a_run():
        return True
    if resume is not None and Path(resume).resolve().parent == folder.states.resolve():
        return True
    return restarted and _is_ours(folder)


def check_run_folder(config: Config, restarted: bool) -> None:
    """Finds on any rank, without writing, whether :func:`claim_run_folder` would fail on rank 0.

    Raises:
        ConfigError: as there.
    """
    folder = find_run_folder(config, restarted)
    where = OUTPUTS if folder is None else folder.path
    try:
        if folder is not None:
            _check_free(folder, config, restarted)
        existing = next(path for path in (where, *where.absolute().parents) if path.exists())
        os.listdir(existing)  # an OSError unless it is a folder
    except OSError as error:
        raise _not_writable(where, error) from error
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _not_writable(where, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def claim_run_folder(config: Config, restarted: bool) -> RunFolder:
    """Creates the run's folder, or takes over the existing one, and locks it. Only rank 0 calls this.

    Raises:
        ConfigError: the folder holds another run, is in use by one, or cannot be written to.
    """
    folder = find_run_folder(config, restarted)
    where = OUTPUTS if folder is None else folder.path
    try:
        if folder is not None:
            _check_free(folder, config, restarted)
        folder = folder or _new_folder(config)
        folder.path.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        folder.job.write_text(_job(), encoding="utf-8")
        forget_exit(folder.path)
    except OSError as error:
        raise _not_writable(where, error) from error
    return folder


def _lock(folder: RunFolder) -> None:
    """Keeps other jobs out for as long as this process lives: the descriptor is never closed on purpose."""
    descriptor = os.open(folder.job, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        user = folder.job.read_text(encoding="utf-8").split()[:2]
        raise ConfigError(
            f"run_dir={folder.path}: is in use by another job{f' ({user[0]}, process {user[1]})' if user[1:] else ''}; "
            "choose another folder"
        ) from None
    except OSError:
        os.close(descriptor)  # a file system without locks


def _check_free(folder: RunFolder, config: Config, restarted: bool) -> None:
    if not may_write_to(folder, config, restarted):
        raise ConfigError(
            f"run_dir={folder.path}: holds a run already. Continue it with train.resume=auto, or choose another folder"
        )


def _not_writable(where: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run_dir={where}: cannot be written to: {error.strerror}")


def _new_folder(config: Config) -> RunFolder:
    """``outputs/<time>-<engine>-<ckpt>``, numbered if another job has started in the same second."""
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
    """What all starts of one job have in common: the process of torchrun, which restarts the workers."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return f"{socket.gethostname()} {parent} {started}".rstrip()
