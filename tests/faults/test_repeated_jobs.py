"""Runs end well every time: the interpreter's own end would abort about one in four (see ``leave``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launching import TINY, exit_record, torchrun


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "deepspeed", "deepspeed_pipe"])
def test_ten_short_jobs_end_with_0(tmp_path: Path, engine: str) -> None:
    for number in range(10):
        arguments = [*TINY, f"engine={engine}", "ckpt=full", "train.steps=2", "train.save_every=1"]
        finished = torchrun(*arguments, f"run_dir=run_{number}", cwd=tmp_path)
        assert finished.code == 0, f"job {number}:\n{finished.output}"
        assert exit_record(tmp_path / f"run_{number}")["code"] == 0
