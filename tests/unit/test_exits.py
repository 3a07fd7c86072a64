"""Exit codes, and ``exit.json``: the first word counts."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt.engines.base import NonFiniteError
from dist_ckpt.errors import ConfigError, DataError, PlanError, StateError, StateWriteError
from dist_ckpt.memory.out_of_memory.limits import MemoryLimit
from dist_ckpt.planning import apply
from dist_ckpt.trainer import job, main
from dist_ckpt.trainer.exits import ExitCode, code_of, forget_exit, record_exit, recorded_exit, root_mistake
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.run_folder import RunFolder


def test_codes_of_errors() -> None:
    for mistake in (ConfigError, DataError, PlanError, StateError):
        assert code_of(mistake("x")) is ExitCode.MISTAKE
    for fault in (RuntimeError("x"), NonFiniteError("x"), ValueError("x"), KeyboardInterrupt(), AssertionError()):
        assert code_of(fault) is ExitCode.FAULT
    assert code_of(MemoryError()) is ExitCode.OUT_OF_MEMORY
    assert code_of(torch.OutOfMemoryError("x")) is ExitCode.OUT_OF_MEMORY


def test_code_of_torchs_own_allocator_on_the_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert code_of(caught.value) is ExitCode.OUT_OF_MEMORY


def test_the_first_record_stands(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    assert recorded_exit(run) is None
    assert record_exit(run, ExitCode.OUT_OF_MEMORY, "no memory", rank=3)
    assert not record_exit(run, ExitCode.FAULT, "Connection closed by peer", rank=0)
    record = json.loads((run / "exit.json").read_text())
    assert record.pop("time") > 1.7e9
    assert record == {"code": 3, "name": "out_of_memory", "reason": "no memory", "rank": 3}
    assert recorded_exit(run) == (ExitCode.OUT_OF_MEMORY, "no memory")
    forget_exit(run)
    forget_exit(run)
    assert record_exit(run, ExitCode.DONE, "all steps done")
    assert [path.name for path in run.iterdir()] == ["exit.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"code": 7, "reason": ""}', '{"reason": ""}'])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "exit.json").write_text(text)
    assert recorded_exit(tmp_path) is None
    assert recorded_exit(tmp_path, patience_s=0.1) is None


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    real = Path.open
    with monkeypatch.context() as patch:

        def full(path: Path, *args: Any, **kwargs: Any) -> Any:
            real(path, *args, **kwargs).close()
            return open("/dev/full", "w")

        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space left"):
            record_exit(tmp_path, ExitCode.FAULT, "boom")
    assert not list(tmp_path.iterdir())
    assert record_exit(tmp_path, ExitCode.FAULT, "boom")


def test_success_that_cannot_be_recorded_is_still_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name, result in (
        (main, "start_process_group", None), (main, "log_to", None), (main, "record_exit", full_disk),
        (job, "agree_on_folder", RunFolder(tmp_path)), (job, "train", True), (job, "end_process_group", None),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, result if callable(result) else lambda *args, result=result: result)
    built: Any = SimpleNamespace(place=Place(), device=torch.device("cpu"))
    assert main._run(built, RunFolder(tmp_path), MemoryLimit(built.device)) is ExitCode.DONE
    written = capsys.readouterr()
    assert written.err == f"warning: {tmp_path}/exit.json could not be written: No space left on device\n"


def test_a_mistake_inside_compiled_code_is_a_mistake() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    apply(model, {"mode": "selective", "save": ["convolution"]})
    model[0].compile(backend="aot_eager")
    try:
        model(torch.randn(2, 4))
    except Exception as error:
        found = root_mistake(error)
    torch._dynamo.reset()
    assert isinstance(found, PlanError) and code_of(found) is ExitCode.MISTAKE
    assert str(found).startswith("op rules that matched no call") and "\n" not in str(found)
    other = RuntimeError("no mistake")
    assert root_mistake(other) is other


def test_a_state_that_cannot_be_written_is_no_mistake() -> None:
    assert (
        code_of(StateWriteError("disk full")) is ExitCode.FAULT and code_of(StateError("foreign")) is ExitCode.MISTAKE
    )
