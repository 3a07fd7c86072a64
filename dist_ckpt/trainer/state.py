"""Where a run keeps its training states: ``states/step_N``, only complete ones, and only the newest few."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from dist_ckpt.errors import ConfigError, StateError, StateWriteError
from dist_ckpt.states.agreement import on_rank_zero, rank_and_world_size, together
from dist_ckpt.states.files import is_complete, read_record, sync_folder

NUMBER = "number"
"""Key, in a state's ``extra``, of its serial number in its folder. Steps do not tell which state is newest: a run that
was resumed from an older one saves smaller steps later."""

_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"


class StateStore:
    """The training states of one run, in one folder. Rank 0 decides and acts; every rank must make every call.

    A state is written under a temporary name and renamed once it is complete; only then are older ones removed. A run
    can be killed at any time without losing its newest complete state.

    Args:
        directory: the folder, created by the first save.
        keep: how many complete states are kept, at least 1.

    Raises:
        ConfigError: ``keep`` is less than 1.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        if keep < 1:
            raise ConfigError(f"train.keep={keep}: at least 1 training state must be kept")
        self.directory = Path(directory)
        self.keep = keep

    def save(self, step: int, save_fn: Callable[[Path, dict[str, int]], None]) -> Path:
        """Saves a state as ``step_{step}``, replacing one of the same step; removes leftovers of a killed run first.

        Args:
            save_fn: ``save_fn(folder, extra)`` writes a state with this ``extra``, and more, into the folder.

        Raises:
            StateWriteError: on every rank; no complete state has been removed.
        """
        try:
            return self._save(step, save_fn)
        except StateError as error:
            raise StateWriteError(str(error)) from error

    def _save(self, step: int, save_fn: Callable[[Path, dict[str, int]], None]) -> Path:
        final = self.directory / f"step_{step}"
        temporary = self.directory / f"{_TEMPORARY}{final.name}"
        number = on_rank_zero(self._make_ready)
        try:
            save_fn(temporary, {NUMBER: number})
        except StateError:
            if rank_and_world_size()[0] == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
            raise
        together(lambda: None)  # all ranks have written
        on_rank_zero(lambda: self._publish(temporary, final))
        return final

    def latest(self) -> Path | None:
        """The newest complete state, or None.

        After a run went back to an older state, that is newer than the states it left behind.

        Raises:
            StateError: the folder cannot be read.
        """

        def newest() -> Path | None:
            self._put_back_replaced()
            complete, (went_back_to, number) = self._complete(), self._went_back()
            since = [path for path in complete if _number(path) > number]
            chosen = [path for path in complete if path.name == went_back_to]
            return next(reversed(since or chosen or complete), None)

        return on_rank_zero(newest)

    def resolve(self, resume: str | Path | None) -> Path | None:
        """The state that a run starts from: the newest for ``auto``, the given one for a path, none for None.

        ``auto`` gives None if there is no complete state yet: the run starts from the beginning.

        Raises:
            StateError: the path is not a complete state; or ``resume`` is None and there are states already, which
                this run would eventually remove.
        """
        if resume == "auto":
            return self.latest()
        return on_rank_zero(lambda: self._fresh() if resume is None else self._given(Path(resume)))

    def _fresh(self) -> None:
        if found := self._complete():
            raise StateError(
                f"{self.directory}: holds {_names(found)} of an earlier run. Continue from the newest with "
                "train.resume=auto, or choose another run_dir"
            )

    def _given(self, path: Path) -> Path:
        if is_complete(path):
            if path.resolve().parent == self.directory.resolve():
                newest = max(map(_number, self._complete()))
                self._marker.write_text(json.dumps([path.name, newest]), encoding="utf-8")
            return path
        near = StateStore(path if path.is_dir() else path.parent, self.keep)._complete() or self._complete()
        valid = f"complete ones: {_names(near)} in {near[0].parent}" if near else "there is none nearby"
        raise StateError(f"train.resume={path}: is not a complete training state; {valid}. Valid: auto, null, a path")

    @property
    def _marker(self) -> Path:
        """Says which state a run went back to, and the number of the newest one then."""
        return self.directory / ".went-back"

    def _went_back(self) -> tuple[str, int]:
        try:
            name, number = json.loads(self._marker.read_text(encoding="utf-8"))
            return str(name), int(number)
        except (OSError, ValueError, TypeError):
            return "", 0

    def _complete(self) -> list[Path]:
        """Complete states, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if _STEP.fullmatch(path.name) and is_complete(path)]
        return sorted(found, key=lambda path: (_number(path), int(path.name.removeprefix("step_"))))

    def _make_ready(self) -> int:
        """Cleans up, and returns the number of the next state."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._put_back_replaced()
        for path in self.directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)
        return max(map(_number, self._complete()), default=0) + 1

    def _put_back_replaced(self) -> None:
        """Undoes a replacement that was interrupted between its two renames."""
        for path in list(self.directory.glob(f"{_REPLACED}step_*")):
            current = self.directory / path.name.removeprefix(_REPLACED)
            if current.exists():
                shutil.rmtree(path)
            else:
                path.rename(current)

    def _publish(self, temporary: Path, final: Path) -> None:
        if not is_complete(temporary):
            raise StateError(f"{temporary}: no complete training state was written")
        replaced = self.directory / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(self.directory)
        if replaced.exists():
            shutil.rmtree(replaced)
        for path in self._complete()[: -self.keep]:
            # Renamed first: a half-removed state must not look complete.
            removed = path.rename(self.directory / f"{_TEMPORARY}removed-{path.name}")
            shutil.rmtree(removed)


def _number(path: Path) -> int:
    """A state's serial number in its folder; 0 for one that was saved without."""
    number = read_record(path)["extra"].get(NUMBER, 0)
    return number if isinstance(number, int) else 0


def _names(states: list[Path]) -> str:
    return ", ".join(path.name for path in states)
