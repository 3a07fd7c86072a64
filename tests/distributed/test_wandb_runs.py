"""The training program's own loop with Weights & Biases, read back: what W&B has is what the run folder has."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.wandb.metrics import GIB
from tests.distributed.runs import run_here
from tests.ranks import RankGroups
from tests.wandb_records import assert_as_in_the_folder, recorded

pytest.importorskip("wandb")

ARGUMENTS = ("train.steps=5", "train.eval_every=2", "report.every=2", "report.wandb=offline")


def test_a_run_on_two_ranks_is_one_run(ranks: RankGroups, tmp_path: Path) -> None:
    ranks(2).run(run_here, str(tmp_path), [*ARGUMENTS, "report.wandb_project=tests"])
    (start,) = recorded(tmp_path)
    assert_as_in_the_folder(tmp_path, [start])
    assert (start.exit_code, start.project) == (0, "tests")
    assert start.config["train"]["steps"] == 5
    assert start.config["plan"]["policy"]["mode"] == "none"
    assert {"config.yaml", "plan.json", "cost.json", "memory.jsonl"} <= set(start.artifacts["run"])


@pytest.mark.full
def test_eight_ranks_and_a_resumed_run_are_one_run(ranks: RankGroups, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, "report.profile_step=2"]
    ranks(8).run(run_here, str(tmp_path), arguments, 3)  # a SIGTERM after step 3
    ranks(8).run(run_here, str(tmp_path), [*arguments, "train.resume=auto"])
    starts = recorded(tmp_path)
    assert_as_in_the_folder(tmp_path, starts)
    assert [list(start.rows) for start in starts] == [[1, 2, 3], [4, 5]]
    assert [start.exit_code for start in starts] == [143, 0]
    deep = starts[0].rows[2]
    assert all(deep[f"memory/rank_{rank}/peak(GiB)"] > 0 for rank in range(8))


@pytest.mark.full
def test_many_ranks_have_their_extremes(ranks: RankGroups, tmp_path: Path) -> None:
    ranks(2).run(run_here, str(tmp_path), [*ARGUMENTS, "report.wandb_max_ranks=1"])
    (start,) = recorded(tmp_path)
    assert not any("rank_" in name for row in start.rows.values() for name in row)
    both = [rank["params"] / GIB for rank in read_json_lines(tmp_path / "memory.jsonl")[-1]["ranks"]]
    found = [start.rows[5][f"memory/{which}/params(GiB)"] for which in ("max", "min", "mean")]
    assert found == [max(both), min(both), sum(both) / 2]


@pytest.mark.full
def test_going_back_to_an_older_state_is_another_run(ranks: RankGroups, tmp_path: Path) -> None:
    """The steps after it are done again with other options: a curve with both would be neither's."""
    ranks(2).run(run_here, str(tmp_path), [*ARGUMENTS, "train.save_every=2", "train.keep=3"])
    (first,) = recorded(tmp_path)
    back = f"train.resume={tmp_path / 'states' / 'step_2'}"
    ranks(2).run(run_here, str(tmp_path), [*ARGUMENTS, "train.save_every=2", "train.lr=1e-2", back])
    (found,) = (tmp_path / "wandb").glob(f"offline-run-*-{first.run_id}")
    assert (tmp_path / "wandb" / "run_id").read_text().strip() != first.run_id
    for path in found.rglob("*"):
        path.unlink() if path.is_file() else None
    found.rename(tmp_path / "earlier")
    assert_as_in_the_folder(tmp_path, recorded(tmp_path))
