"""Which folder a run writes to, and what it never writes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt.errors import ConfigError
from dist_ckpt.trainer import run_folder as module
from dist_ckpt.trainer.config import Config, load_config
from dist_ckpt.trainer.exits import ExitCode, record_exit, recorded_exit
from dist_ckpt.trainer.run_folder import RunFolder, check_run_folder, claim_run_folder, find_run_folder, may_write_to

_lock = module._lock


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_job", lambda: "this job")
    monkeypatch.setattr(module, "_lock", lambda folder: None)  # held for the life of a process: this one plays many
    return tmp_path


def is_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_job", lambda: "another job")


def config(*arguments: str) -> Config:
    return load_config(arguments)


def with_a_run(path: str) -> RunFolder:
    folder = claim_run_folder(config(f"run_dir={path}"), restarted=False)
    folder.metrics.write_text('{"step": 1}\n')
    return folder


def test_a_new_folder_is_named_by_time_engine_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "strftime", lambda form: "20300102-030405")
    asked = config("ckpt=every_k", "engine=ddp")
    names = [str(claim_run_folder(asked, restarted=False).path) for _ in range(3)]
    first = "outputs/20300102-030405-ddp-every_k"
    assert names == [first, f"{first}-2", f"{first}-3"], "jobs of the same second do not meet"


def test_a_restart_finds_its_folder_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim_run_folder(config(), restarted=False)
    is_another_job(monkeypatch)
    claim_run_folder(config(), restarted=False)
    assert find_run_folder(config(), restarted=True) != first
    monkeypatch.setattr(module, "_job", lambda: "this job")
    assert find_run_folder(config(), restarted=True) == first
    assert claim_run_folder(config(), restarted=True) == first
    assert find_run_folder(config(), restarted=False) is None


def test_a_restart_that_had_no_folder_yet_gets_one() -> None:
    assert find_run_folder(config(), restarted=True) is None
    assert claim_run_folder(config(), restarted=True).path.is_dir()


def test_another_run_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_a_run("mine")
    record_exit(folder.path, ExitCode.DONE, "all steps done")
    with pytest.raises(ConfigError, match=r"run_dir=mine: holds a run already.*train.resume=auto"):
        claim_run_folder(config("run_dir=mine"), restarted=False)
    is_another_job(monkeypatch)
    with pytest.raises(ConfigError, match="holds a run already"):  # torchrun starts a refused job anew, too
        claim_run_folder(config("run_dir=mine"), restarted=True)
    assert recorded_exit(folder.path) == (ExitCode.DONE, "all steps done")
    assert folder.job.read_text() == "this job"


def test_a_folder_in_use_is_refused() -> None:
    folder = claim_run_folder(config("run_dir=mine"), restarted=False)
    folder.job.write_text("somehost 4711 99", encoding="utf-8")
    _lock(folder)
    with pytest.raises(ConfigError, match=r"run_dir=mine: is in use by another job \(somehost, process 4711\)"):
        _lock(folder)


def test_a_run_that_was_refused_before_its_first_step_may_be_repeated() -> None:
    folder = claim_run_folder(config("run_dir=mine"), restarted=False)
    folder.config.write_text("train: {}\n", encoding="utf-8")
    folder.metrics.write_text("", encoding="utf-8")
    assert claim_run_folder(config("run_dir=mine"), restarted=False) == folder


def test_the_same_run_goes_on() -> None:
    folder = with_a_run("mine")
    record_exit(folder.path, ExitCode.TERMINATED, "SIGTERM")
    assert claim_run_folder(config("run_dir=mine"), restarted=True) == folder
    assert recorded_exit(folder.path) is None, "of an earlier start"
    assert claim_run_folder(config("run_dir=mine", "train.resume=auto"), restarted=False) == folder


def test_a_run_may_go_back_to_one_of_its_own_states() -> None:
    with_a_run("mine")
    (Path("mine/states/step_5")).mkdir(parents=True)
    resumed = config("run_dir=mine", "train.resume=mine/states/step_5")
    assert may_write_to(RunFolder(Path("mine")), resumed, restarted=False)
    with_a_run("theirs")
    elsewhere = config("run_dir=theirs", "train.resume=mine/states/step_5")
    assert not may_write_to(RunFolder(Path("theirs")), elsewhere, restarted=False)
    fresh = config("run_dir=new", "train.resume=mine/states/step_5")
    assert may_write_to(RunFolder(Path("new")), fresh, restarted=False)


def test_a_folder_that_cannot_be_made_is_a_mistake() -> None:
    Path("file").write_text("")
    for call in (claim_run_folder, check_run_folder):
        for path in ("file", "file/run", "file/run/deep"):
            with pytest.raises(
                ConfigError, match=f"run_dir={path}: cannot be written to: (Not a directory|File exists)"
            ):
                call(config(f"run_dir={path}"), restarted=False)
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_other_ranks_find_what_rank_0_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("mine", "new/deep", "/tmp"):
        check_run_folder(config(f"run_dir={path}"), restarted=False)
    check_run_folder(config(), restarted=False)
    assert not list(Path().iterdir()), "checking writes nothing"
    with_a_run("mine")
    with pytest.raises(ConfigError, match=r"run_dir=mine: holds a run already.*train.resume=auto"):
        check_run_folder(config("run_dir=mine"), restarted=False)
    check_run_folder(config("run_dir=mine"), restarted=True)
    check_run_folder(config("run_dir=mine", "train.resume=auto"), restarted=False)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="run_dir=new: cannot be written to: Permission denied"):
        check_run_folder(config("run_dir=new"), restarted=False)


def test_a_folder_with_nothing_but_a_recorded_mistake_is_free() -> None:
    record_exit(Path("mine"), ExitCode.MISTAKE, "a typing error")
    assert claim_run_folder(config("run_dir=mine"), restarted=False).path == Path("mine")
    assert recorded_exit(Path("mine")) is None


def test_every_start_of_one_job_is_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module._job() == module._job()
    assert len(module._job().split()) == 3
