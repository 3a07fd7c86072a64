"""Which states a run keeps, which it takes up, and that a kill at any moment loses none that was complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from dist_ckpt.errors import ConfigError, StateError, StateWriteError
from dist_ckpt.states.training_state import load_training_state, save_training_state
from dist_ckpt.trainer.state import StateStore


def _write(path: Path, extra: dict[str, int]) -> None:
    model = nn.Linear(1, 1)
    save_training_state(path, model, SGD(model.parameters(), lr=1.0), extra)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path / "states", keep=2)


def test_last_few_are_kept(store: StateStore) -> None:
    assert store.latest() is None and store.resolve("auto") is None and store.resolve(None) is None
    for step in (2, 9, 10, 11):
        assert store.save(step, _write) == store.directory / f"step_{step}"
    assert _names(store.directory) == ["step_10", "step_11"], "by number, not by name"
    assert store.latest() == store.directory / "step_11"


def test_states_are_whole_wherever_they_are_moved(store: StateStore, tmp_path: Path) -> None:
    path = store.save(1, _write)
    moved = shutil.move(path, tmp_path / "elsewhere")
    model = nn.Linear(1, 1)
    assert load_training_state(moved, model, SGD(model.parameters(), lr=3.0))["rng"]


def test_older_states_go_only_when_the_new_one_is_there(store: StateStore) -> None:
    store.save(1, _write)
    store.save(2, _write)

    def fail(path: Path, extra: dict[str, int]) -> None:
        assert path == store.directory / ".tmp-step_3", "written under a name that none takes for a state"
        _write(path, extra)
        raise StateError("the disk is full")

    with pytest.raises(StateWriteError, match="disk is full"):
        store.save(3, fail)
    assert _names(store.directory) == ["step_1", "step_2"], "what was written goes too: it may be in the way"
    with pytest.raises(StateError, match="no complete training state was written"):
        store.save(3, lambda path, extra: path.mkdir())
    assert store.latest() == store.directory / "step_2"


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", [2, 3], ids=["replaced", "new"])
def test_kill_at_any_moment_keeps_a_complete_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep: int
) -> None:
    """Stops a save before each rename and each removal in turn; the next run still finds a state and goes on."""
    left = 0

    def stopping(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise _Killed
            left -= 1
            return change(*args, **kwargs)

        return call

    for allowed in range(100):
        store = StateStore(tmp_path / str(allowed), keep)
        store.save(1, _write)
        store.save(2, _write)
        left, killed = allowed, False
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (os, "unlink"), (os, "rmdir")):
                patch.setattr(owner, name, stopping(getattr(owner, name)))
            try:
                store.save(step, _write)
            except _Killed:
                killed = True
        again = StateStore(store.directory, keep)
        found = again.resolve("auto")
        assert found is not None and found.name in ("step_2", f"step_{step}")
        model = nn.Linear(1, 1)
        load_training_state(found, model, SGD(model.parameters(), lr=1.0))
        again.save(7, _write)
        assert len(_names(store.directory)) == keep and again.latest() == store.directory / "step_7"
        if not killed:
            assert allowed > 2
            return
    pytest.fail("the save never came to its end")


def test_leftovers_of_a_killed_run_are_removed(store: StateStore) -> None:
    store.save(1, _write)
    for name in (".tmp-step_2", ".tmp-removed-step_0", ".old-step_1"):
        shutil.copytree(store.directory / "step_1", store.directory / name)
    store.save(2, _write)
    assert _names(store.directory) == ["step_1", "step_2"]


def test_replacement_that_was_cut_off_is_undone_by_the_next_save(store: StateStore) -> None:
    path = store.save(1, _write)
    path.rename(path.with_name(".old-step_1"))
    store.save(2, _write)
    assert _names(store.directory) == ["step_1", "step_2"]


def test_incomplete_states_are_skipped(store: StateStore) -> None:
    store.save(1, _write)
    store.save(2, _write)
    (store.directory / "step_2" / "manifest.json").unlink()
    (store.directory / "step_3").mkdir()
    (store.directory / "step_x").mkdir()
    (store.directory / "notes.txt").write_text("mine")
    assert store.resolve("auto") == store.directory / "step_1"
    store.save(4, _write)
    assert {"step_1", "step_4", "step_x", "notes.txt"} <= set(_names(store.directory))


def test_newest_is_what_was_saved_last(store: StateStore) -> None:
    """A run resumed from an older state saves smaller steps; those are the ones to go on from."""
    for step in (10, 20, 15):
        store.save(step, _write)
    assert store.latest() == store.directory / "step_15"
    assert _names(store.directory) == ["step_15", "step_20"]
    store.save(20, _write)
    assert store.latest() == store.directory / "step_20"
    (store.directory / "step_15" / "state.json").write_text("{")
    with pytest.raises(StateError, match=r"step_15/state.json: is damaged"):
        store.latest()


def test_a_run_that_went_back_leaves_the_newer_states_behind(store: StateStore) -> None:
    """Also when it is stopped before its own first save: the other branch must not be mixed in."""
    store.save(2, _write)
    store.save(4, _write)
    assert store.resolve(store.directory / "step_2") == store.directory / "step_2"
    assert StateStore(store.directory, keep=2).resolve("auto") == store.directory / "step_2"
    store.save(3, _write)
    assert store.resolve("auto") == store.directory / "step_3"


def test_given_path(store: StateStore, tmp_path: Path) -> None:
    path = store.save(4, _write)
    other = StateStore(tmp_path / "another", keep=1)
    assert other.resolve(path) == path and other.resolve(str(path)) == path
    for wrong in (path.parent, path.parent / "step_5"):
        with pytest.raises(StateError) as caught:
            other.resolve(wrong)
        assert f"train.resume={wrong}: is not a complete training state; complete ones: step_4" in str(caught.value)
    with pytest.raises(StateError, match=r"there is none nearby. Valid: auto, null, a path"):
        other.resolve(tmp_path / "nowhere" / "step_1")


def test_fresh_run_does_not_mix_with_an_earlier_one(store: StateStore) -> None:
    store.save(4, _write)
    with pytest.raises(StateError, match=r"holds step_4 of an earlier run.*train.resume=auto"):
        store.resolve(None)


def test_keep_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.keep=0: at least 1"):
        StateStore(tmp_path, keep=0)


def test_same_step_is_replaced(store: StateStore) -> None:
    store.save(4, _write)
    first = (store.directory / "step_4" / "manifest.json").read_bytes()
    store.save(4, _write)
    assert (store.directory / "step_4" / "manifest.json").read_bytes() != first
    assert _names(store.directory) == ["step_4"]
