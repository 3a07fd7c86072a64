"""How a run ends: whatever happens to one rank ends all of them, with one code and its reason in ``exit.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.trainer.run_folder import RunFolder
from tests.faults.launching import FAULTY, TINY, Finished, alone, exit_record, faulty, metrics, torchrun, trajectory
from tests.faults.test_mistakes import staggered

OPTIONS = (*TINY, "model.dropout=0.1", "ckpt=selective", "train.steps=12", "train.eval_every=4", "report.every=5")
ENGINES = ("ddp", "fsdp1", "fsdp2", "deepspeed", "deepspeed_pipe")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finished, Path]]:
    """A run of 12 steps whose ranks start at different times, and its folder."""
    cwd = tmp_path_factory.mktemp("uninterrupted")
    environment = staggered(tmp_path_factory.mktemp("late") / "site", "rank")
    finished = torchrun(*OPTIONS, "train.save_every=5", cwd=cwd, environment=environment)
    assert finished.code == 0, finished.output
    folders = list((cwd / "outputs").iterdir())
    assert len(folders) == 1, folders
    yield finished, folders[0]


def test_a_run_fills_its_folder(uninterrupted: tuple[Finished, Path]) -> None:
    _, run = uninterrupted
    assert run.name.endswith("-fsdp2-selective")
    assert {path.name for path in run.iterdir()} == {
        ".job", "config.yaml", "plan.json", "metrics.jsonl", "memory.jsonl", "exit.json", "states", "logs",
    }  # fmt: skip
    assert exit_record(run)["code"] == 0
    assert {path.name for path in (run / "states").iterdir()} == {"step_10", "step_12"}
    assert {path.name for path in (run / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    lines = metrics(run)
    assert [m["step"] for m in lines] == list(range(1, 13))
    keys = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s"}
    assert all(set(m) - {"eval_loss"} == keys for m in lines)
    assert [m["step"] for m in lines if "eval_loss" in m] == [4, 8, 12]
    memory = [json.loads(line) for line in RunFolder(run).memory.read_text().splitlines()]
    assert [m["step"] for m in memory] == [5, 10, 12], "every fifth step, and the last"
    assert all([rank["rank"] for rank in m["ranks"]] == [0, 1] for m in memory)


def test_rank_0_alone_speaks(uninterrupted: tuple[Finished, Path]) -> None:
    finished, run = uninterrupted
    lines = finished.output.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 12 + 3
    updates = [line for line in steps if "validation" not in line]
    for part in ("loss", "grad norm", "tokens/s", "memory", "MiB (rank "):
        assert part in updates[-1]
    reported = [record["step"] for record in read_json_lines(RunFolder(run).memory)]
    assert [step for step, line in enumerate(updates, start=1) if "memory" in line] == reported == [5, 10, 12]
    assert "plan: selective, 2 regions" in finished.output
    assert "memory per rank at step 12, MiB" in finished.output
    assert f"done: steps 1 to 12, last loss {metrics(run)[-1]['loss']:.4f}, " in lines[-1]
    assert lines[-1].endswith(f" s of training, in {run.relative_to(finished.cwd)}")


def test_sigterm_to_one_worker_ends_all_and_the_run_can_go_on(
    uninterrupted: tuple[Finished, Path], tmp_path: Path
) -> None:
    arguments = [*OPTIONS, "run_dir=run"]
    stopped = torchrun(*faulty("sigterm", rank=1, step=7), *arguments, cwd=tmp_path, script=FAULTY)
    run = tmp_path / "run"
    assert stopped.first_code == 143
    assert set(stopped.worker_codes.values()) == {143}
    assert "stopped by SIGTERM after step 7 of 12" in stopped.output
    stopped.assert_no_traceback_of_ours()
    assert (exit_record(run)["code"], exit_record(run)["name"]) == (143, "terminated")
    assert not stopped.errors
    assert [path.name for path in (run / "states").iterdir()] == ["step_7"]
    resumed = torchrun(*arguments, "train.resume=auto", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert exit_record(run)["code"] == 0
    assert trajectory(run) == trajectory(uninterrupted[1])


def test_a_killed_rank_is_started_again_where_it_was(uninterrupted: tuple[Finished, Path], tmp_path: Path) -> None:
    arguments = [*faulty("sigkill", rank=1, step=3), *OPTIONS, "train.save_every=1"]
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY, max_restarts=1)
    assert finished.code == 0, finished.output
    (run,) = (tmp_path / "outputs").iterdir()
    assert "states/step_2 at step 2" in finished.output
    assert exit_record(run)["code"] == 0
    assert trajectory(run) == trajectory(uninterrupted[1])


def test_out_of_memory_on_one_rank_ends_all_for_good(tmp_path: Path) -> None:
    arguments = [*faulty("cpu_allocation", rank=1, step=3), *TINY, "run_dir=run"]
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY, max_restarts=1)
    finished.assert_quick(30)
    assert finished.first_code == 3
    record = exit_record(tmp_path / "run")
    assert (record["code"], record["name"], record["rank"]) == (3, "out_of_memory", 1)
    first, second = finished.errors
    assert first.startswith("out of memory: ") and "rank_1.log" in first
    assert second == f"not restarted, it would end the same way: {record['reason']}"
    finished.assert_no_traceback_of_ours()
    assert "alloc_cpu" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    found = json.loads((RunFolder(tmp_path / "run").oom / "rank_1.json").read_text())
    assert (found["requested_bytes"], found["phase"], found["step"]) == (1 << 50, "forward", 3)
    assert found["module"].startswith("layers.")


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("fault", ["out_of_memory", "memory_error"])
@pytest.mark.parametrize("engine", ENGINES)
def test_out_of_memory_under_every_engine(tmp_path: Path, engine: str, fault: str, step: int) -> None:
    arguments = [*faulty(fault, rank=1, step=step), *TINY, f"engine={engine}", "ckpt=full", "run_dir=run"]
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY)
    finished.assert_quick(30)
    assert finished.first_code == 3, finished.output
    assert len(finished.errors) == 1
    record = exit_record(tmp_path / "run")
    assert (record["code"], record["rank"]) == (3, 1)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_rank_ends_all(tmp_path: Path, rank: int, engine: str) -> None:
    arguments = [*faulty("boom", rank=rank, step=2), *TINY, f"engine={engine}", "run_dir=run"]
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY)
    finished.assert_quick(30)
    assert finished.first_code == 1
    assert len(finished.errors) == 1 and finished.errors[0].startswith(f"rank {rank}: Traceback"), finished.output
    assert "RuntimeError: boom" in finished.output and "Connection" not in finished.output
    record = exit_record(tmp_path / "run")
    assert (record["code"], record["name"], record["reason"], record["rank"]) == (1, "fault", "boom", rank)


@pytest.mark.full
@pytest.mark.parametrize(("engine", "ranks"), [("fsdp2", 3), ("deepspeed", 2), ("deepspeed_pipe", 2)])
def test_a_loss_that_is_not_finite_on_one_rank_ends_all(tmp_path: Path, engine: str, ranks: int) -> None:
    options = [*TINY, f"engine={engine}", "train.save_every=1", "run_dir=run"]
    finished = torchrun(*faulty("nan", rank=1, step=3), *options, ranks=ranks, cwd=tmp_path, script=FAULTY)
    finished.assert_quick(30)
    assert finished.first_code == 1
    assert len(finished.errors) == 1 and "step 3: loss nan" in finished.errors[0], finished.output
    finished.assert_no_traceback_of_ours()
    assert exit_record(tmp_path / "run")["code"] == 1
    assert {path.name for path in (tmp_path / "run" / "states").iterdir()} == {"step_1", "step_2"}


@pytest.mark.full
def test_bad_data_on_one_rank_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A token beyond the vocabulary where neither the start nor the middle nor the end of a file is looked at."""
    tokens = bytearray(b"\x01\x00" * 60_000)
    tokens[2 * 20_000 : 2 * 20_000 + 2] = b"\xff\xff"
    (tmp_path / "tokens.bin").write_bytes(tokens)
    data = ["data=tokens", "data.glob=tokens.bin", "data.validation_fraction=0", "train.seq_len=128"]
    options = [*TINY, *data, "train.steps=400", "report.every=100", "run_dir=run"]
    finished = torchrun(*options, cwd=tmp_path, max_restarts=1)
    finished.assert_quick(40)
    assert finished.first_code == 2, finished.output
    said, again = finished.errors
    assert "tokens.bin has token id 65535 at offset 20000" in said
    assert again == f"not restarted, it would end the same way: {said}"
    finished.assert_no_traceback_of_ours()
    assert exit_record(tmp_path / "run")["reason"] == said
    assert len(metrics(tmp_path / "run")) > 1


@pytest.mark.full
def test_a_fault_is_tried_again_from_the_newest_state(tmp_path: Path) -> None:
    """Each start fails in its third step, and finds the state of the second."""
    arguments = [*faulty("boom", rank=0, step=3, starts="all"), *TINY, "train.steps=5", "train.save_every=2"]
    finished = torchrun(*arguments, "run_dir=run", cwd=tmp_path, script=FAULTY, max_restarts=2)
    assert finished.code == 0, finished.output
    assert len(finished.errors) == 2
    assert re.findall(r"states/step_(\d+) at step \1", finished.output) == ["2", "4"]
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert exit_record(tmp_path / "run")["code"] == 0


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_torchrun(uninterrupted: tuple[Finished, Path], tmp_path: Path, rank: int) -> None:
    arguments = [*OPTIONS, "run_dir=run"]
    stopped = torchrun(*faulty("sigterm_to_torchrun", rank=rank, step=4), *arguments, cwd=tmp_path, script=FAULTY)
    run = tmp_path / "run"
    assert stopped.code != 0
    assert exit_record(run)["code"] == 143, stopped.output
    resumed = torchrun(*arguments, "train.resume=auto", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert trajectory(run) == trajectory(uninterrupted[1])


@pytest.mark.full
def test_a_finished_run_has_nothing_left_to_do(uninterrupted: tuple[Finished, Path]) -> None:
    finished, run = uninterrupted
    before = trajectory(run)
    again = torchrun(*OPTIONS, f"run_dir={run}", "train.resume=auto", cwd=finished.cwd)
    assert again.code == 0, again.output
    assert "nothing to do: step 12 of 12" in again.output.splitlines()[-1]
    assert trajectory(run) == before


@pytest.mark.full
def test_one_process_without_torchrun(tmp_path: Path) -> None:
    finished = alone(*TINY, "train.steps=3", "ckpt=full", "train.save_every=2", cwd=tmp_path)
    assert finished.code == 0, finished.output
    (run,) = (tmp_path / "outputs").iterdir()
    assert exit_record(run)["code"] == 0
    assert [m["step"] for m in metrics(run)] == [1, 2, 3]
    assert "memory per rank at step 3" in finished.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("sigterm", 143, []),
        ("cpu_allocation", 3, ["out of memory: "]),
        ("mistake", 2, ["data: corpus/7.txt"]),
        ("sigint", 1, ["interrupted (rank 0; "]),
        ("boom", 1, ["rank 0: Traceback"]),
    ],
)
def test_codes_of_one_process_without_torchrun(tmp_path: Path, fault: str, code: int, says: list[str]) -> None:
    arguments = [*faulty(fault, rank=0, step=2), *TINY, "train.steps=9", "run_dir=run"]
    finished = alone(*arguments, cwd=tmp_path, script=FAULTY)
    assert finished.code == code, finished.output
    assert exit_record(tmp_path / "run")["code"] == code
    assert [error[: len(start)] for error, start in zip(finished.errors, says, strict=True)] == says
