"""A rank whose memory is used up, at any point of a step: all ranks end, soon and alike, and it is said what filled it.

Allocations fail for real: from one point on the operating system gives the rank nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.trainer.run_folder import RunFolder
from tests.faults.launching import ROOT, exit_record, torchrun

SCARCE = Path(__file__).with_name("scarce_train.py")
SIZES = (
    "model.n_layers=3", "model.d_model=128", "model.d_ff=256", "train.seq_len=128", "train.micro_batch=4",
    "train.steps=5", "report.every=1", "device=cpu", "run_dir=run",
)  # fmt: skip
"""Large enough for tensors to be put nowhere but into new memory."""
ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": ("engine=ddp",),
    "fsdp1": ("engine=fsdp1",),
    "fsdp2": ("engine=fsdp2",),
    **{
        f"ZeRO {stage}": ("engine=deepspeed", f"engine.config={ROOT}/configs/deepspeed/zero{stage}.json")
        for stage in range(4)
    },
    "pipeline": ("engine=deepspeed_pipe", "engine.stages=2", "train.grad_accum=4"),
}
PHASES = ("setup", "forward", "recompute", "backward", "optimizer", "collective")
LIMIT_S = 30.0
"""From the failed allocation until the last rank has gone."""


def run_out(tmp_path: Path, phase: str, engine: str, ranks: int = 4) -> dict[str, Any]:
    """Uses up the memory of rank 1 in the second step, checks what all ends have in common, and returns the record."""
    codes = tmp_path / "codes"
    codes.mkdir()
    policy = ("ckpt=full",) if phase == "recompute" else ()
    arguments = (phase, "1", "2", str(codes), *SIZES, *ENGINES[engine], *policy)
    finished = torchrun(*arguments, ranks=ranks, cwd=tmp_path, script=SCARCE)
    expected = {str(rank): "3" for rank in range(ranks)}
    assert {path.name: path.read_text() for path in codes.iterdir()} == expected, finished.output
    record = exit_record(tmp_path / "run")
    assert (record["code"], record["name"], record["rank"]) == (3, "out_of_memory", 1)
    assert max(path.stat().st_mtime for path in codes.iterdir()) - record["time"] < LIMIT_S
    assert len(finished.errors) == 1 and finished.errors[0].startswith("out of memory: ")
    assert "rank 1: what filled memory is in run/oom/rank_1.html" in finished.output
    finished.assert_no_traceback_of_ours()
    folder = RunFolder(tmp_path / "run").oom
    assert {path.name for path in folder.iterdir()} == {"rank_1.json", "rank_1.html"}
    found: dict[str, Any] = json.loads((folder / "rank_1.json").read_text())
    assert not found["notes"], found["notes"]
    assert (found["rank"], found["device"]) == (1, "cpu")
    check(phase, engine, found)
    if phase in ("forward", "recompute", "backward") and not found["suggestions"]:
        assert "no more time for predictions" in RunFolder(tmp_path / "run").log(1).read_text()
    return found


def check(phase: str, engine: str, found: dict[str, Any]) -> None:
    """What the post-mortem says of each phase."""
    alive = found["by_kind"]
    # Losses are added up after the boundary, which in a pipeline is a part of the optimizer's instruction.
    around = "optimizer" if engine == "pipeline" else "other"
    assert found["phase"] == (around if phase == "collective" else phase)
    assert alive["params"] > 0 or (phase == "setup" and engine.startswith(("ZeRO", "pipeline")))
    if phase == "collective":
        assert found["collective"] == "all_reduce" and found["requested_bytes"] is None, "gloo does not say it"
        return
    assert found["requested_bytes"] >= 1 << 14
    if phase in ("forward", "recompute", "backward"):
        assert found["module"].startswith(("layers.", "norm", "output")), found["module"]
        assert alive["activations"] > 0
        assert any(name.startswith("layers.") for name in found["by_module"])
        assert all(one["freed_bytes"] > 0 for one in found["suggestions"])
    if phase in ("optimizer", "setup"):
        assert not found["suggestions"] and "No policy helps" in found["advice"]


@pytest.mark.full
def test_all_ranks_end_and_it_is_said_what_filled_memory(tmp_path: Path) -> None:
    found = run_out(tmp_path, "backward", "fsdp2", ranks=2)
    assert found["last_report"]["step"] == 1 and found["heaviest_rank"] in (0, 1)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_under_every_engine(tmp_path: Path, phase: str, engine: str) -> None:
    run_out(tmp_path, phase, engine)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_limit_that_the_run_asks_for(tmp_path: Path, engine: str) -> None:
    """Every rank may run into it at once; each that does says what filled its memory."""
    options = [*SIZES, "train.micro_batch=64", "train.seq_len=512", "train.memory_limit_gib=0.9", f"engine={engine}"]
    finished = torchrun(*options, ranks=2, cwd=tmp_path)
    assert finished.first_code == 3, finished.output
    assert exit_record(tmp_path / "run")["code"] == 3
    found = [json.loads(path.read_text()) for path in RunFolder(tmp_path / "run").oom.glob("*.json")]
    assert found
    for one in found:
        assert one["limit_bytes"] == int(0.9 * 2**30)
        assert one["start_bytes"] < one["held_bytes"] <= one["limit_bytes"]
        assert one["tensor_bytes"] > 0.5 * (one["held_bytes"] - one["start_bytes"]), "most of it is explained"
        assert one["by_kind"]["activations"] > 0.9 * one["tensor_bytes"]


@pytest.mark.full
def test_a_limit_below_what_a_rank_holds_is_a_mistake(tmp_path: Path) -> None:
    finished = torchrun(*SIZES, "train.memory_limit_gib=0.01", ranks=2, cwd=tmp_path)
    assert finished.first_code == 2, finished.output
    (error,) = finished.errors
    assert error.startswith("train.memory_limit_gib=0.01: 0.010 GiB, and a rank holds ")
