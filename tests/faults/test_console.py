"""What a person sees who starts the program by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.launching import TINY, alone, metrics, torchrun


def test_a_terminal_shows_a_bar_and_then_the_table(tmp_path: Path) -> None:
    finished = alone(*TINY, "train.steps=5", "train.eval_every=2", "run_dir=run", cwd=tmp_path, terminal=True)
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", finished.output)
    assert "━" in text and "5/5" in text
    assert "step 1/5  loss" not in text, "no line a step besides the bar"
    assert "step 2/5  validation loss" in text
    table = text.partition("memory per rank at step 5, MiB")[2]
    assert re.search(r"rank +params +grads +optimizer +activations +other +accounted", table)
    assert text.rstrip().splitlines()[-1].startswith("done: steps 1 to 5, last loss ")
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_dry_run_says_what_would_be(tmp_path: Path) -> None:
    finished = alone("dry_run=true", "world_size=64", "ckpt=full", "train.global_batch=512", cwd=tmp_path)
    assert finished.code == 0, finished.output
    run, *rest = finished.output.splitlines()
    assert "fsdp2 on 64 ranks, 512 rows of 128 tokens an update" in run
    assert any(line.startswith("plan: full, 4 regions") for line in rest)
    assert any(line.startswith("cost: saved ") for line in rest)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama_7b", "llama_70b", "gpt2_xl"])
def test_a_dry_run_of_a_large_model_needs_no_large_machine(tmp_path: Path, model: str) -> None:
    options = [f"model={model}", "dry_run=true", "world_size=64", "ckpt=selective", "train.seq_len=1024"]
    finished = alone(*options, cwd=tmp_path)
    assert finished.code == 0, finished.output
    finished.assert_quick(60)
    assert finished.peak_rss_bytes < 4 * 2**30
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_one_rank_prints(tmp_path: Path, flag: str) -> None:
    finished = alone(flag, cwd=tmp_path)
    assert finished.code == 0
    assert "micro_batch" in finished.output
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--help", "--print-config", "dry_run=true"])
def test_of_four_ranks_one_prints(tmp_path: Path, flag: str) -> None:
    finished = torchrun(flag, ranks=4, cwd=tmp_path)
    assert finished.code == 0
    expected = {"--help": "Usage:", "--print-config": "train:", "dry_run=true": "plan: none"}[flag]
    assert len(re.findall(f"^{re.escape(expected)}", finished.output, flags=re.MULTILINE)) == 1
    finished.assert_quick(10)
