"""``launch/sweep.py`` as its users start it: real runs, interruptions, and mistakes before any of them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.faults.launching import ROOT, TINY, Finished, run

SWEEP = ROOT / "launch" / "sweep.py"
OPTIONS = (*TINY, "data=synthetic", "train.steps=4", "sweep.rounds=1")


def swept(*arguments: str, cwd: Path) -> Finished:
    return run([sys.executable, str(SWEEP), *OPTIONS, *arguments], cwd, timeout_s=400)  # it is several runs


def results(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return {row["label"]: row for row in csv.DictReader(file)}


def test_a_mistake_costs_no_run(tmp_path: Path) -> None:
    finished = swept("sweep.ckpt=[none,ful]", cwd=tmp_path)
    assert finished.code == 2 and len(finished.errors) == 1
    assert finished.errors[0].startswith("sweep.ckpt[1]: ckpt: no mode 'ful'; did you mean 'full'")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "deepspeed", "deepspeed_pipe"])
def test_every_engine_is_compared(tmp_path: Path, engine: str) -> None:
    finished = swept("sweep.ckpt=[none,full]", "nproc=2", f"engine={engine}", "run_dir=mine", cwd=tmp_path)
    assert finished.code == 0, finished.output
    none, full = results(tmp_path / "mine").values()
    assert none["status"] == full["status"] == "done"
    assert int(full["saved_bytes"]) < int(none["saved_bytes"]) and int(full["peak_bytes"]) < int(none["peak_bytes"])
    assert float(none["flops_ratio"]) == 1.0 < float(full["flops_ratio"]) < 1.4
    assert float(full["loss_difference"]) == 0.0
    memory = json.loads((tmp_path / "mine/runs/full/round_1/memory.jsonl").read_text().splitlines()[-1])
    assert int(full["peak_bytes"]) == max(rank["peak"] for rank in memory["ranks"])
    assert "bitwise" in finished.output and (tmp_path / "mine/report.html").stat().st_size > 10**6


@pytest.mark.full
def test_a_policy_that_runs_out_of_memory_is_a_result(tmp_path: Path) -> None:
    big = ("model.n_layers=12", "train.micro_batch=64", "train.seq_len=256", "model.attention=eager")
    limit = "train.memory_limit_gib=1.2"
    finished = swept("sweep.ckpt=[none,full]", *big, limit, "run_dir=mine", cwd=tmp_path)
    assert finished.code == 0, finished.output
    none, full = results(tmp_path / "mine").values()
    assert (none["status"], full["status"]) == ("out of memory", "done"), finished.output
    assert "none: out of memory: " in finished.output and full["peak_bytes"]


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_an_interrupted_sweep_ends_its_ranks_and_goes_on(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The second run is interrupted when its ranks are at work; the first is kept, in the file as well."""
    options = ("train.steps=40", "nproc=2", "run_dir=mine")
    first = swept(*options, "sweep.k=[0]", cwd=tmp_path)
    assert first.code == 0, first.output
    process = subprocess.Popen(
        [sys.executable, str(SWEEP), *OPTIONS, *options, "sweep.k=[0,1]"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    console = tmp_path / "mine/runs/segments-k=1/round_1/console.log"
    deadline = time.monotonic() + 60
    while not (console.exists() and "plan: " in console.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3, "torchrun and two ranks"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert "interrupted; the same command with run_dir=mine goes on from here" in output
    assert list(results(tmp_path / "mine")) == ["none"] and "Traceback" not in output
    again = swept(*options, "sweep.k=[0,1]", cwd=tmp_path)
    assert again.code == 0, again.output
    assert again.output.count("(from before)") == 1
    assert [row["status"] for row in results(tmp_path / "mine").values()] == ["done", "done"]
