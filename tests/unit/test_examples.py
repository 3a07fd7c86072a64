"""The examples run, change at most five lines of a loop (ten where it is measured deeply), and train as without."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankGroups

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ON_TWO_RANKS = ["deepspeed_loop", "deepspeed_pipeline"]
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ON_TWO_RANKS)
QUICK = ["plain_loop", "resnet"]
POLICIES: list[Any] = ["full", "selective", {"mode": "segments", "k": 2}, {"mode": "nested", "k": 2}]


def main_of(name: str) -> Callable[..., list[float]]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def losses_of(rank: int, world: int, name: str, policy: Any) -> list[float]:
    from dist_ckpt.compat.deepspeed import start

    start(torch.device("cpu"))
    torch.manual_seed(rank)
    return main_of(name)(policy)


def check(name: str, policy: Any) -> None:
    main = main_of(name)
    losses = main(policy)
    assert losses == main("none") and len(set(losses)) > 2


def test_each_example_is_there_and_marks_what_it_adds() -> None:
    assert NAMES == [
        "accelerate_loop", "hf_trainer", "lightning_module", "lora", "own_loop_memory", "plain_loop", "resnet",
    ]  # fmt: skip
    for name in (*NAMES, *ON_TWO_RANKS):
        added = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if "# added" in line]
        assert 2 <= len(added) <= (10 if name == "own_loop_memory" else 5), name
        assert any("apply(" in line for line in added) and any("import" in line for line in added)


@pytest.mark.parametrize("name", QUICK)
def test_quick_examples_train_as_without_a_plan(name: str) -> None:
    check(name, "full")


def test_a_loop_of_ones_own_sees_what_its_peak_consists_of(capsys: pytest.CaptureFixture[str], alone: None) -> None:
    main_of("own_loop_memory")("none")
    match = re.search(r"^peak ([\d,]+) bytes: (.*)\n *([\d,]+) bytes of ", capsys.readouterr().out, re.MULTILINE)
    assert match is not None
    peak, held, largest = int(match[1].replace(",", "")), ast.literal_eval(match[2]), int(match[3].replace(",", ""))
    assert held.pop("phase") == "backward" and sum(held.values()) == peak
    parameters = 4 * 6 * (4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 256 + 64 + 4 * 64)  # projections, feed-forward, norms
    assert (held["params"], held["optimizer"] // parameters) == (parameters, 2)
    wide = 4 * 4 * 32 * 256  # what a feed-forward keeps, before and after its activation
    assert held["activations"] > 6 * 2 * wide and held["unattributed"] <= 0.02 * peak
    assert held["recompute"] == 0
    assert wide <= largest < peak / 4


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_examples_train_as_without_a_plan(name: str, policy: Any) -> None:
    check(name, policy)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_examples_on_two_ranks_train_as_without_a_plan(ranks: RankGroups, name: str, policy: Any) -> None:
    losses = ranks(2).run(losses_of, name, policy)
    assert losses == ranks(2).run(losses_of, name, "none") and len(set(losses[0])) > 2


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_examples_run_as_programs(name: str, tmp_path: Path) -> None:
    command, environment = [sys.executable, str(EXAMPLES / f"{name}.py")], {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout and not list(tmp_path.iterdir())
