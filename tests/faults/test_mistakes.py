"""A user's mistake: one message, exit code 2, in seconds, and no rank that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launching import ROOT, TINY, Finished, alone, exit_record, torchrun

MISTAKES = {
    "a policy's name": (["ckpt=selectve"], "did you mean 'selective'?"),
    "an engine's name": (["engine=fsdp3"], "ddp, deepspeed, deepspeed_pipe, fsdp1, fsdp2"),
    "a value": (["train.micro_batch=0"], "must be at least 1"),
    "an option without its policy": (["ckpt.k=5"], "+ckpt=every_k"),
    "no files": (["data=text", "data.glob='nothing/*.txt'"], "data.glob: 'nothing/*.txt' matches nothing"),
}
"""Arguments, and what the message must say."""

LIMIT_S = 10.0


def check(finished: Finished, says: str) -> None:
    assert finished.code == 1
    assert finished.first_code == 2, finished.output
    assert len(finished.errors) == 1 and says in finished.errors[0], finished.output
    finished.assert_no_traceback_of_ours()
    assert not list(finished.cwd.iterdir()), "a mistake leaves nothing behind"


@pytest.mark.parametrize("name", ["a policy's name", "no files"])
def test_four_ranks_say_it_once(tmp_path: Path, name: str) -> None:
    arguments, says = MISTAKES[name]
    finished = torchrun(*arguments, ranks=4, cwd=tmp_path)
    check(finished, says)
    finished.assert_quick(LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(MISTAKES) - {"a policy's name", "no files"}))
def test_four_ranks_say_every_one_once(tmp_path: Path, name: str) -> None:
    arguments, says = MISTAKES[name]
    finished = torchrun(*arguments, ranks=4, cwd=tmp_path)
    check(finished, says)
    finished.assert_quick(LIMIT_S)


@pytest.mark.full
@pytest.mark.parametrize("late", ["rank", "3 - rank"])
def test_staggered_ranks_say_it_once(tmp_path: Path, late: str) -> None:
    finished = torchrun("engine=fsdp3", ranks=4, cwd=tmp_path, environment=staggered(tmp_path / "site", late))
    assert finished.first_code == 2
    assert len(finished.errors) == 1, finished.output


@pytest.mark.full
def test_a_mistake_that_rank_0_does_not_make_is_said_too(tmp_path: Path) -> None:
    """A machine of its own, say, on which the files are not there."""
    (tmp_path / "driver.py").write_text(
        "import os, sys\n"
        "from dist_ckpt.trainer.main import main\n"
        "main(['run_dir=run'] if os.environ['RANK'] == '0' else ['data=text', 'data.glob=none/*', 'run_dir=run'])\n"
    )
    finished = torchrun(script=tmp_path / "driver.py", ranks=3, cwd=tmp_path)
    assert finished.first_code == 2
    assert len(finished.errors) == 1 and "none/*" in finished.errors[0], finished.output
    finished.assert_quick(30)


@pytest.mark.parametrize("name", MISTAKES)
def test_one_process_says_it_without_torch(tmp_path: Path, name: str) -> None:
    arguments, says = MISTAKES[name]
    code = "import sys; sys.modules['torch'] = None; from dist_ckpt.trainer.main import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "run_dir=run"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and says in done.stderr and done.stderr.count("\n") == 1
    record = exit_record(tmp_path / "run")
    assert (record["code"], record["name"]) == (2, "mistake") and says in record["reason"]


@pytest.mark.full
def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    arguments = [*TINY, "train.steps=2", "run_dir=run"]
    assert alone(*arguments, cwd=tmp_path).code == 0
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = torchrun(*arguments, cwd=tmp_path, max_restarts=1)
    assert again.first_code == 2
    assert len(set(again.errors)) == 1 and "train.resume=auto" in again.errors[0], again.output
    misspelt = alone(*arguments, "train.stepz=3", cwd=tmp_path)
    assert misspelt.code == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    further = alone(*arguments, "train.steps=3", "train.resume=auto", cwd=tmp_path)
    assert further.code == 0, further.output


def staggered(site: Path, delay: str) -> dict[str, str]:
    """An environment in which each rank starts ``delay`` × 1.2 s late; ``delay`` is an expression of ``rank``."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, time\n"
        "if 'RANK' in os.environ:\n"
        "    rank = int(os.environ['RANK'])\n"
        f"    time.sleep(1.2 * ({delay}))\n"
    )
    return {"PYTHONPATH": f"{site}:{ROOT}"}
