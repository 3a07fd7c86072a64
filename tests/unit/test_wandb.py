"""A run in Weights & Biases, recorded offline by its own process and read back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.report.jsonl import JsonLines
from dist_ckpt.report.wandb import WandbSink, process, sink
from tests.wandb_records import Recorded, recorded, steps, without_account

pytest.importorskip("wandb")

RANKS = 8
STEPS = range(1, 7)


def line(step: int) -> dict[str, float | int]:
    known = {"step": step, "loss": 1 / step, "grad_norm": 0.5, "lr": 1e-3, "tokens": 64}
    return known | {"tokens_per_s": 800.0, "step_s": 0.08} | ({"eval_loss": 2 / step} if step % 2 == 0 else {})


def report(step: int, deep: bool = False) -> MemoryReport:
    at_peak = {"phase": "backward", "params": 2**20, "recompute": 2**21} if deep else None
    sizes = {"params": 2**20, "grads": 2**20, "optimizer": 2**21, "other": 0, "activations": 2**22}
    ranks = [RankMemory(rank=r, device="cpu", step=step, at_peak=at_peak, **sizes) for r in range(RANKS)]
    return MemoryReport(step, tuple(ranks))


def open_sink(folder: Path, said: list[str], *, mode: str = "offline", after_step: int = 0) -> WandbSink:
    return WandbSink(
        folder, mode=mode, project="tests", max_ranks=RANKS, world_size=RANKS, config={"train": {"lr": 1e-3}},
        after_step=after_step, same_run=True, say=said.append,
    )  # fmt: skip


def record(to: WandbSink, numbers: Sequence[int]) -> None:
    for step in numbers:
        to.step(line(step))
        if step % 3 == 0:
            to.memory(report(step, deep=step == 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A run folder and what was said. Its first start is gone after step 4, its second goes on from step 2."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "plan.json").write_text('{"blocks": ["0"]}')
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        without_account(patch, folder / "home")
        first = open_sink(folder, said)
        record(first, STEPS[:4])
        process = first._process
        assert process is not None and process.stdin is not None
        process.stdin.close()  # as when this process is killed
        process.wait(timeout=60)
        second = open_sink(folder, said, after_step=2)
        record(second, STEPS[2:])
        (folder / "report.html").write_text("<title>memory</title>")
        second.finish(0)
    yield folder, said


@pytest.fixture(scope="module")
def starts(run: tuple[Path, list[str]]) -> list[Recorded]:
    return recorded(run[0])


def test_both_starts_are_one_run_in_which_each_step_has_one_row(starts: list[Recorded]) -> None:
    assert len(starts) == 2
    assert len({start.run_id for start in starts}) == 1
    assert [list(start.rows) for start in starts] == [[1, 2, 3, 4], [5, 6]]
    assert [start.exit_code for start in starts] == [1, 0], "one whose trainer is gone has failed"


def test_a_row_has_all_of_its_step(starts: list[Recorded]) -> None:
    rows = {step: row for start in starts for step, row in start.rows.items()}
    for step, row in rows.items():
        assert row["loss_metrics/global_avg_loss"] == 1 / step
        assert row["throughput(tps)"] == 100
        assert ("validation_metrics/loss" in row) == (step % 2 == 0)
        of_ranks = {f"memory/rank_{r}/{n}(GiB)" for r in range(RANKS) for n in ("params", "grads", "optimizer")}
        assert of_ranks & set(row) == (of_ranks if step % 3 == 0 else set())
    assert rows[6]["memory/rank_7/activations(GiB)"] == 2**-8


def test_the_configuration_and_the_plan_are_the_runs(starts: list[Recorded]) -> None:
    for start in starts:
        assert (start.project, start.config["train"], start.config["plan"]) == (
            "tests", {"lr": 1e-3}, {"blocks": ["0"]},
        )  # fmt: skip
    assert set(starts[1].artifacts["run"]) == {"plan.json", "report.html"}


def test_tables_charts_and_the_page_are_in_it(starts: list[Recorded]) -> None:
    peaks = json.loads(starts[0].media("memory/at_peak").read_text())
    assert peaks["columns"] == ["rank", "phase", "params(GiB)", "recompute(GiB)"]
    assert [row[0] for row in peaks["data"]] == list(range(RANKS))
    table = json.loads(starts[1].media("memory/ranks").read_text())
    assert [row[0] for row in table["data"]] == list(range(RANKS))
    pytest.importorskip("plotly")
    for start, key, names in (
        (starts[0], "memory/at_peak_chart", ["params", "recompute"]),
        (starts[1], "memory/ranks_chart", ["params", "grads", "optimizer", "activations", "other"]),
    ):
        chart = json.loads(start.media(key).read_text())
        assert chart["layout"]["barmode"] == "stack"
        assert [bar["name"] for bar in chart["data"]] == names
        assert all(bar["x"] == [str(r) for r in range(RANKS)] for bar in chart["data"])
    assert starts[1].media("report").read_text() == "<title>memory</title>"


def test_it_prints_nothing_and_writes_to_the_run_folder_alone(run: tuple[Path, list[str]]) -> None:
    folder, said = run
    assert said == []
    assert {path.name for path in folder.iterdir()} == {"plan.json", "report.html", "wandb"}, "no home"
    assert not (folder / "wandb" / "tmp").exists()
    assert (folder / "wandb" / "process.log").read_text() == ""


@pytest.mark.full
def test_what_an_earlier_start_did_not_tell_is_caught_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_account(monkeypatch, tmp_path / "home")
    metrics, memory = JsonLines(tmp_path / "metrics.jsonl"), JsonLines(tmp_path / "memory.jsonl")
    for step in STEPS[:3]:
        metrics.write(line(step))
    memory.write(report(3).to_dict())
    said: list[str] = []
    late = open_sink(tmp_path, said, after_step=3)
    record(late, STEPS[3:5])
    late.finish(3)
    (start,) = recorded(tmp_path)
    assert steps([start]) == [1, 2, 3, 4, 5]
    assert "memory/rank_7/params(GiB)" in start.rows[3]
    assert (start.exit_code, start.rows[5]["memory/num_ooms"]) == (3, 1), "out of memory"
    assert said == []


@pytest.mark.full
def test_of_git_the_commit_alone_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_account(monkeypatch, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    token = "ghp_0123456789"
    for command in (
        "init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first",
        f"remote add origin https://{token}:x-oauth-basic@github.com/a/b",
    ):  # fmt: skip
        subprocess.run(["git", *command.split()], check=True)
    to = open_sink(tmp_path / "run", [])
    record(to, STEPS)
    to.finish(0)
    (start,) = recorded(tmp_path / "run")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert start.commit == commit
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert token.encode() not in path.read_bytes(), path


def test_a_missing_package_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    monkeypatch.syspath_prepend(str(tmp_path))
    said: list[str] = []
    to = open_sink(tmp_path / "run", said, mode="online")
    record(to, STEPS)
    to.finish(0)
    record(to, STEPS)
    assert said == ["W&B: not recorded: No module named 'wandb'; pip install 'dist_ckpt[wandb]'"]


def test_a_process_that_fails_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _in_place_of_the_process(monkeypatch, "raise SystemExit(7)")
    said: list[str] = []
    to = open_sink(tmp_path, said)
    started[0].wait(timeout=60)
    record(to, STEPS)
    to.finish(0)
    assert said == ["W&B: its process has failed; wandb/process.log in the run folder says why"]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_process_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    started = _in_place_of_the_process(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(sink, "_PATIENCE_S", 0.1)
    said: list[str] = []
    to = open_sink(tmp_path, said)
    left, run = "nothing was recorded", tmp_path / "wandb" / "offline-run-1-abc"
    if recorded:
        run.mkdir()
        (run / "run-abc.wandb").touch()
        left = f"the rest with: wandb sync {run}"
    to.finish(0)
    assert said == [f"W&B: not finished after 0.1 s; {left}"]
    assert started[0].poll() is not None
    monkeypatch.setattr(sink, "_LIMIT_BYTES", 2**17)
    full = open_sink(tmp_path, said := [])
    record(full, range(1, 2000))
    assert said == ["W&B: takes no records; no more are sent"]
    assert started[1].poll() is not None
    full.finish(0)
    assert len(said) == 1


def test_uploading_ends_before_the_trainer_stops_waiting() -> None:
    now = time.monotonic()
    assert process._end_of({"finish": 3, "until_s": now + 15}) == (3, now + 15 - process._LAST_WORDS_S)
    code, until_s = process._end_of({"line": {"step": 1}})
    assert code == 1 and until_s > now + process._UPLOAD_S, "whose trainer is gone"
    with pytest.raises(process._OutOfTime), process._at_most(-1):
        time.sleep(5)
    assert time.monotonic() < now + 4


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("a file")
    said: list[str] = []
    to = open_sink(tmp_path, said)
    record(to, STEPS)
    to.finish(0)
    assert len(said) == 1 and said[0].startswith("W&B: not recorded: ")


def _in_place_of_the_process(patch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[bytes]]:
    """Python code that is started instead; the processes."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", code], **options))  # type: ignore[call-overload]
        return started[-1]

    patch.setattr(sink.subprocess, "Popen", start)
    return started
