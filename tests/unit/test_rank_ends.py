"""What a rank does at the end of a run that has failed, its own part in it or not."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt.memory.out_of_memory.limits import MemoryLimit
from dist_ckpt.trainer import post_mortem, watch
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.exits import ExitCode, record_exit
from dist_ckpt.trainer.job import Job
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.run_folder import RunFolder

CPU = torch.device("cpu")
SMALL = ("model.n_layers=2", "model.d_model=32", "model.d_ff=48", "train.seq_len=32", "data=synthetic", "engine=ddp")


class Left:
    """Stands in for leaving the process."""

    def __init__(self) -> None:
        self.codes: list[ExitCode] = []
        self._gone = threading.Event()

    def __call__(self, code: ExitCode) -> None:
        self.codes.append(code)
        self._gone.set()

    def wait(self) -> ExitCode:
        assert self._gone.wait(30)
        return self.codes[0]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    before, stands_in = signal.getsignal(signal.SIGTERM), Left()
    monkeypatch.setattr(watch, "leave", stands_in)
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)
    yield stands_in
    signal.signal(signal.SIGTERM, before)


def test_a_rank_that_goes_on_is_ended_once_the_run_has_failed(tmp_path: Path, left: Left) -> None:
    with watch.failures_watched(tmp_path, patience_s=0.1):
        record_exit(tmp_path, ExitCode.OUT_OF_MEMORY, "no memory", rank=1)
        assert left.wait() is ExitCode.OUT_OF_MEMORY


@pytest.mark.parametrize("code", [None, ExitCode.DONE, ExitCode.TERMINATED])
def test_a_run_that_has_not_failed_goes_on(tmp_path: Path, left: Left, code: ExitCode | None) -> None:
    if code is not None:
        record_exit(tmp_path, code, "all steps done")
    with watch.failures_watched(tmp_path, patience_s=0.0):
        time.sleep(0.2)
    assert not left.codes


def test_a_rank_with_more_to_write_has_its_time(tmp_path: Path, left: Left) -> None:
    record_exit(tmp_path, ExitCode.FAULT, "boom", rank=0)
    with watch.failures_watched(tmp_path, patience_s=60.0):
        time.sleep(0.2)
    assert not left.codes


def test_a_sigterm_is_heard_where_python_is_not_asked(tmp_path: Path, left: Left) -> None:
    """As in a call into C that does not come back: here, Python's own way to deal with the signal does nothing."""
    record_exit(tmp_path, ExitCode.OUT_OF_MEMORY, "no memory", rank=1)
    with watch.failures_watched(tmp_path, patience_s=60.0, grace_s=0.0):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.wait() is ExitCode.OUT_OF_MEMORY


def test_a_sigterm_before_training_ends_a_rank_with_the_code_of_the_run(tmp_path: Path, left: Left) -> None:
    record_exit(tmp_path, ExitCode.MISTAKE, "no such file", rank=1)
    with watch.failures_watched(tmp_path, patience_s=60.0, grace_s=60.0):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # type: ignore[operator, misc]
    assert left.codes == [ExitCode.MISTAKE]


def out_of_memory() -> BaseException:
    try:
        torch.empty(1 << 50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("that much memory")


def explained(tmp_path: Path, error: BaseException) -> RunFolder:
    folder = RunFolder(tmp_path)
    limit = MemoryLimit(CPU)
    limit.lift()
    post_mortem.explain(error, Job.build(load_config([*SMALL, "train.micro_batch=2"]), Place()), folder, limit)
    return folder


def test_what_filled_memory_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = explained(tmp_path, out_of_memory())
    found = json.loads((folder.oom / "rank_0.json").read_text())
    assert (found["rank"], found["requested_bytes"], found["last_report"]) == (0, 1 << 50, None)
    assert "ran out of memory" in (folder.oom / "rank_0.html").read_text()
    sentence, page = capsys.readouterr().err.splitlines()
    assert sentence.startswith("note: rank 0: 1,048,576.000 GiB failed in the engine's own work")
    assert page == f"note: rank 0: what filled memory is in {folder.oom}/rank_0.html"


def test_other_errors_leave_no_post_mortem(tmp_path: Path) -> None:
    assert not explained(tmp_path, RuntimeError("boom")).oom.exists()


def test_a_post_mortem_that_fails_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError("again")

    monkeypatch.setattr(post_mortem, "post_mortem", broken)
    explained(tmp_path, out_of_memory())
    assert capsys.readouterr().err == "warning: the post-mortem could not be written: MemoryError: again\n"


@pytest.mark.full
def test_what_to_try_is_predicted_as_plan_cost_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_mortem, "PATIENCE_S", 300.0)
    monkeypatch.setattr(post_mortem, "POLICIES", ("selective", "full"))
    job = Job.build(load_config([*SMALL, "train.micro_batch=4", "ckpt=selective"]), Place())
    found = {one.change: one for one in post_mortem.suggestions(job, None)}
    now = job.costs()[0].saved_bytes
    assert "ckpt=selective" not in found, "what the run has already"
    full = Job.build(load_config([*SMALL, "train.micro_batch=4", "ckpt=full"]), Place()).costs()[0]
    assert (found["ckpt=full"].saved_bytes, found["ckpt=full"].freed_bytes) == (
        full.saved_bytes,
        now - full.saved_bytes,
    )
    half = Job.build(load_config([*SMALL, "train.micro_batch=2", "ckpt=selective"]), Place()).costs()[0]
    assert found["train.micro_batch=2 train.grad_accum=2"].saved_bytes == half.saved_bytes


def test_predictions_end_when_there_is_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.build(load_config([*SMALL, "train.micro_batch=4"]), Place())
    monkeypatch.setattr(post_mortem, "PATIENCE_S", 0.001)
    assert post_mortem.suggestions(job, None) == []
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
