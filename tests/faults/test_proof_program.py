"""``launch/verify.py`` as its users start it: what it prints, once, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launching import ROOT, TINY, alone, torchrun

VERIFY = ROOT / "launch" / "verify.py"

FAULTY = """
import os, sys
from dist_ckpt.trainer.models.llama import FeedForward
from dist_ckpt.trainer.proving import main

forward, ranks = FeedForward.forward, sys.argv.pop(1)


def repeated(self, x):  # twice, then once
    self.turn = not getattr(self, "turn", False)
    return forward(self, forward(self, x) if self.turn and os.environ["RANK"] in ranks else x)


FeedForward.forward = repeated
main(sys.argv[1:])
"""


def test_a_plan_that_is_proven(tmp_path: Path) -> None:
    finished = torchrun(*TINY, "+ckpt=full", "engine=fsdp2", "model.dropout=0.1", script=VERIFY, cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert finished.output.count("verify: full, 2 regions, 2 recomputes; proven") == 1, finished.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_fault_of_one_rank(tmp_path: Path) -> None:
    """Its recompute fails there, in the middle of a backward whose collectives the other rank has joined."""
    (tmp_path / "driver.py").write_text(FAULTY)
    finished = torchrun("1", *TINY, "+ckpt=full", "engine=fsdp2", script=tmp_path / "driver.py", cwd=tmp_path)
    assert finished.first_code == 1
    assert finished.output.count("NOT proven") == 1, finished.output
    assert "layers.1.feed_forward" in finished.output and "turn was nothing for its forward and True" in finished.output
    finished.assert_quick(60)


@pytest.mark.full
def test_a_fault_of_every_rank(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(FAULTY)
    finished = torchrun("0,1", *TINY, "+ckpt=full", "engine=ddp", script=tmp_path / "driver.py", cwd=tmp_path)
    assert finished.first_code == 1
    assert finished.output.count("NOT proven") == 1, finished.output
    finished.assert_no_traceback_of_ours()


@pytest.mark.full
def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    finished = alone(*TINY, "+ckpt=selective", script=VERIFY, cwd=tmp_path)
    assert finished.code == 0 and "selective" in finished.output, finished.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["+ckpt=ful"], "did you mean 'full'"),
        (["+ckpt=full", "dry_run=true"], "launch/train.py has the dry run"),
        (["+ckpt=full", "train.resume=auto", "run_dir=run"], "about the first update"),
    ],
    ids=["typo", "dry_run", "resume"],
)
def test_mistakes_need_no_torch(tmp_path: Path, arguments: list[str], says: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from dist_ckpt.trainer.proving import main; main(sys.argv[1:])"
    command, environment = [sys.executable, "-c", code, *arguments], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and says in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_nothing_to_prove_is_a_mistake(tmp_path: Path) -> None:
    finished = alone(*TINY, "ckpt=none", script=VERIFY, cwd=tmp_path)
    assert finished.code == 2 and "leaves no region to prove" in finished.errors[0], finished.output


def test_help_says_what_the_program_does(tmp_path: Path) -> None:
    finished = alone("--help", script=VERIFY, cwd=tmp_path)
    assert finished.code == 0
    assert finished.output.startswith("launch/verify.py proves") and "train.micro_batch" in finished.output
