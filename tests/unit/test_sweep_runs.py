"""The runs of a sweep: what is read from their folders, how they are ended, and in what order they come."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from dist_ckpt.errors import PlanError
from dist_ckpt.trainer.exits import ExitCode, record_exit
from dist_ckpt.trainer.sweep import runner as runner_module
from dist_ckpt.trainer.sweep.folder import SweepFolder
from dist_ckpt.trainer.sweep.launch import Terminated, raising_on_sigterm, run
from dist_ckpt.trainer.sweep.options import Sweep, read_sweep
from dist_ckpt.trainer.sweep.outcome import CONSOLE, Outcome, Status, outcome_of, store, stored
from dist_ckpt.trainer.sweep.runner import Prediction, SweepRunner, predict

TORCHRUN_HAS_SEEN = "  rank      : 1 (local_rank: 1)\n  exitcode  : {code} (pid: 7)\n"


def write_run(folder: Path, peaks: Sequence[int | None] = (50, 70), steps: int = 6) -> None:
    """What a run of so many updates leaves behind, a second longer in each."""
    lines = [{"step": n, "loss": 5.0 - n, "step_s": float(n)} for n in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ranks = [{"rank": rank, "activations": 10 + rank, "peak": peak} for rank, peak in enumerate(peaks)]
    (folder / "memory.jsonl").write_text(json.dumps({"step": steps, "ranks": ranks}) + "\n")


def test_the_outcome_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    outcome = outcome_of(tmp_path, 0)
    assert outcome == Outcome(
        Status.done,
        losses=(4.0, 3.0, 2.0, 1.0, 0.0, -1.0),
        step_s=(3.0, 4.0, 5.0),  # two warm up, and the last is the deep one
        saved_bytes=11,
        peak_bytes=70,
    )
    assert stored(tmp_path) is None
    store(tmp_path, outcome)
    assert stored(tmp_path) == outcome
    (tmp_path / "outcome.json").write_text(outcome.to_json()[:-30])
    assert stored(tmp_path) is None, "cut short"


@pytest.mark.parametrize(
    ("code", "rank_code", "status", "reason"),
    [
        (ExitCode.OUT_OF_MEMORY, 3, Status.out_of_memory, "tried to allocate"),
        (ExitCode.MISTAKE, 2, Status.refused, "tried to allocate"),
        (ExitCode.FAULT, 1, Status.failed, "tried to allocate"),
        (ExitCode.FAULT, -9, Status.out_of_memory, "a rank was killed (SIGKILL)"),
        (None, -9, Status.out_of_memory, "a rank was killed (SIGKILL)"),
        (None, -11, Status.failed, "exitcode  : -11"),
    ],
)
def test_how_a_run_has_failed(
    tmp_path: Path, code: ExitCode | None, rank_code: int, status: Status, reason: str
) -> None:
    (tmp_path / CONSOLE).write_text(TORCHRUN_HAS_SEEN.format(code=rank_code))
    if code is not None:
        record_exit(tmp_path, code, "tried to allocate")
    outcome = outcome_of(tmp_path, 1)
    assert outcome.status is status and outcome.reason.startswith(reason)
    store(tmp_path, outcome)
    assert stored(tmp_path) == outcome


FAMILY = """
import os, signal, subprocess, sys, time
from pathlib import Path
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(child.wait(30)))
Path(sys.argv[1] + ".new").write_text(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
"""A launcher like torchrun: its worker has a session of its own and ignores SIGTERM, and it waits for that worker."""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as Python has it: a process of pytest-xdist's ignores it."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interruption_ends_all_that_was_started(
    tmp_path: Path, ctrl_c: None, number: signal.Signals, error: type[BaseException]
) -> None:
    born = tmp_path / "worker"

    def interrupt() -> None:
        while not born.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    start = time.monotonic()
    with raising_on_sigterm(), pytest.raises(error):
        run([sys.executable, "-c", FAMILY, str(born)], tmp_path / CONSOLE, os.open(tmp_path, os.O_RDONLY))
    sender.join()
    worker = int(born.read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - start < 20, "it was not waited for"


def test_a_command_runs_to_its_end(tmp_path: Path) -> None:
    code = run([sys.executable, "-c", "print('hello'); exit(5)"], tmp_path / CONSOLE, os.open(tmp_path, os.O_RDONLY))
    assert (code, (tmp_path / CONSOLE).read_text()) == (5, "hello\n")


class Recorder:
    """Watches, and stands in for torchrun: the policy's name decides what becomes of a run."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.told: list[tuple[str, str, bool]] = []
        self.commands: list[Sequence[str]] = []

    def starts(self, what: str, left: int) -> None:
        self.started.append(f"{what} ({left} left)")

    def ends(self, what: str, outcome: Outcome, was_stored: bool) -> None:
        self.told.append((what, outcome.status.name, was_stored))

    def run(self, command: Sequence[str], console: Path, keep_open: int) -> int:
        self.commands.append(command)
        values = dict(argument.lstrip("+").split("=", 1) for argument in command if "=" in argument)
        assert Path(values["run_dir"].strip('"')) == console.parent
        console.write_text("")
        if values["ckpt"] == "first_n":
            record_exit(console.parent, ExitCode.OUT_OF_MEMORY, "no memory")
            return 1
        deep = values["report.profile_step"] != "null"
        size = int(values["train.micro_batch"])
        write_run(console.parent, [size * (2 if values["ckpt"] == "full" else 10) * 2**20 if deep else None] * 2)
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(runner_module, "run", recorder.run)
    return recorder


def runner(path: Path, recorder: Recorder, *arguments: str) -> SweepRunner:
    sweep: Sweep = read_sweep(["sweep.ckpt=[none,full,first_n]", "sweep.rounds=2", *arguments, f"run_dir={path}"])
    predictions: dict[Any, Prediction] = {cell: Prediction(1.0, most=1000) for cell in sweep.candidates}
    return SweepRunner(sweep, predictions, SweepFolder(path, 0), Path("train.py"), recorder)


def test_rounds_are_interleaved_and_a_failure_is_not_repeated(tmp_path: Path, recorder: Recorder) -> None:
    runner(tmp_path, recorder).run()
    ran = [
        "warm-up, not counted  none",
        "round 1/2  none",
        "round 1/2  full",
        "round 1/2  first_n",
        "round 2/2  full",
        "round 2/2  none",
    ]
    assert [what for what, _, _ in recorder.told] == ran
    assert [status for _, status, _ in recorder.told] == ["done", "done", "done", "out_of_memory", "done", "done"]
    assert [left.rpartition("(")[2] for left in recorder.started] == [f"{n} left)" for n in (6, 5, 4, 3, 1, 0)]
    deep = ["report.profile_step=12" in command for command in recorder.commands]
    assert deep == [False, True, True, True, False, False]
    alike = ("train.steps=12", "report.every=12", "report.html=false", "train.save_every=0")
    assert all(set(alike) <= set(command) for command in recorder.commands)


def test_a_sweep_goes_on_where_it_was(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> int:
        if len(recorder.commands) == 4:
            (arguments[1].parent / "states").mkdir()  # what is half done is done again, from nothing
            raise KeyboardInterrupt
        return recorder.run(*arguments)

    monkeypatch.setattr(runner_module, "run", interrupted)
    first = runner(tmp_path, recorder)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert [row.rounds for row in first.results()] == [1, 1, 0]
    monkeypatch.setattr(runner_module, "run", recorder.run)
    second = runner(tmp_path, recorder, "sweep.k=[3]")
    second.run()
    assert len(recorder.commands) == 4 + 4 and not list(tmp_path.rglob("states"))
    from_before = [what for what, _, was_stored in recorder.told if was_stored]
    assert from_before == ["round 1/2  none", "round 1/2  full", "round 1/2  first_n"]
    assert [(row.label, row.rounds) for row in second.results()] == [
        ("none", 2), ("full", 2), ("first_n", 0), ("segments (k=3)", 2),
    ]  # fmt: skip
    third = runner(tmp_path, recorder, "sweep.k=[5,3]")
    monkeypatch.setattr(runner_module, "run", interrupted)
    recorder.commands[:] = recorder.commands[:4]
    with pytest.raises(KeyboardInterrupt):
        third.run()
    assert {row.label: row.rounds for row in third.results()} == {
        "none": 2, "full": 2, "first_n": 0, "segments (k=3)": 2,
    }, "what was measured before is known before anything new is run"  # fmt: skip


def test_the_largest_micro_batch_is_found_by_runs(tmp_path: Path, recorder: Recorder) -> None:
    one = runner(tmp_path, recorder, "sweep.budget_gib=0.1")
    one.run()
    none, full, failed = one.results()
    assert (none.fit_micro_batch, full.fit_micro_batch, failed.fit_micro_batch) == (10, 51, None)  # of 102.4 MiB
    assert none.fit_samples_per_s == 10 / 4.0 and not none.fit_is_all
    tried = [what for what, _, _ in recorder.told if what.startswith("largest")]
    assert {"largest micro-batch  none  10", "largest micro-batch  none  11"} <= set(tried)
    before = len(recorder.commands)
    again = runner(tmp_path, recorder, "sweep.budget_gib=0.1")
    again.run()
    assert again.results() == one.results() and len(recorder.commands) == before


def test_a_refused_policy_is_a_result_unless_all_are() -> None:
    arguments = ["model.n_layers=2", "model.d_model=32", "train.seq_len=16", "data=synthetic", "nproc=2", "engine=ddp"]
    bad = "{mode: selective, save: convolution}"
    full, refused = predict(read_sweep([f"sweep.ckpt=[full,{bad}]", *arguments]), None).values()
    assert full.flops_ratio is not None and 1.1 < full.flops_ratio < 1.4
    assert full.most > 1000 and full.refusal is None
    assert refused.refusal is not None and "convolution" in refused.refusal and refused.flops_ratio is None
    with pytest.raises(PlanError, match="convolution"):
        predict(read_sweep([f"sweep.ckpt=[{bad}]", *arguments]), None)
