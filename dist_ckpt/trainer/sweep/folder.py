"""The sweep's folder: what was measured, so that an interrupted sweep goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt.errors import ConfigError
from dist_ckpt.trainer.run_folder import OUTPUTS
from dist_ckpt.trainer.sweep.options import Sweep


@dataclass(frozen=True)
class SweepFolder:
    """Paths inside one sweep's folder."""

    path: Path
    lock: int
    """A descriptor of the lock, for the runs to inherit: one that has outlived its sweep still has the folder."""

    @property
    def table(self) -> Path:
        return self.path / "results.csv"

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    def run(self, candidate: str, name: str) -> Path:
        """The run folder of one run of a policy."""
        return self.path / "runs" / candidate / name


@contextmanager
def claimed(sweep: Sweep) -> Iterator[SweepFolder]:
    """The folder that ``run_dir`` names, new or with an earlier part of this sweep, or a new one; locked inside.

    Raises:
        ConfigError: it holds something else, or a sweep of other runs; it is in use; or it cannot be written to.
    """
    folder = _opened(sweep)
    try:
        yield folder
    finally:
        os.close(folder.lock)


def cleared(path: Path) -> Path:
    """An empty folder, in place of what a run that was not measured to its end has left."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def _opened(sweep: Sweep) -> SweepFolder:
    asked = sweep.config.run_dir
    path = Path(asked) if asked is not None else OUTPUTS / f"{time.strftime('%Y%m%d-%H%M%S')}-sweep"
    identity, facts = path / "sweep.json", _facts(sweep)
    try:
        if path.exists() and any(path.iterdir()) and not identity.exists():
            raise ConfigError(f"run_dir={path}: holds something else; name a new folder, or that of a sweep")
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        _take(lock, path)
        if identity.exists():
            _check_same(path, json.loads(identity.read_text(encoding="utf-8")), facts)
        else:
            identity.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir={path}: cannot be written to: {error.strerror}") from error
    return SweepFolder(path, lock)


def _facts(sweep: Sweep) -> dict[str, str]:
    """What every figure of a sweep has in common, the machine included: times of two machines are not comparable."""
    machine = {"machine": platform.node(), "cores": str(os.cpu_count()), "torch": importlib.metadata.version("torch")}
    return {**machine, **sweep.facts()}


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run_dir={path}: is in use by another sweep, or by a run that one has left behind; choose another folder"
        ) from None
    except OSError:  # a file system without locks
        return


def _check_same(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = [f"{key} {before.get(key)} → {now.get(key)}" for key in keys]
    if changed:
        raise ConfigError(
            f"run_dir={path}: holds a sweep of other runs ({', '.join(changed)}). It may go on with more "
            "policies, more rounds or another budget; for anything else choose another folder"
        )
