"""The rank groups that distributed tests stand on: results in order, no hang or orphan whatever happens."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankGroup, RankGroups

WAIT_S = 60.0
"""What a rank sleeps in these tests; every test must be over long before."""


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, int(total)


def _identity(rank: int, world_size: int) -> tuple[int, str, str, int, float]:
    return (
        os.getpid(),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        torch.get_num_threads(),
        float(torch.rand(())),
    )


def _raise_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise KeyError("the reason")
    dist.barrier()


def _exit_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def _hang_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        print("about to wait")
        time.sleep(WAIT_S)


def _system_exit(rank: int, world_size: int) -> None:
    sys.exit(2)


def _print_and_disturb(rank: int, world_size: int, directory: str) -> None:
    print(f"hello from {rank}")
    os.environ["DISTURBED"] = "1"
    os.chdir(directory)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(2)


def _surroundings(rank: int, world_size: int) -> tuple[bool, str, bool, int]:
    handler_is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return "DISTURBED" in os.environ, os.getcwd(), handler_is_default, torch.get_num_threads()


def _subgroup_sum(rank: int, world_size: int) -> int:
    groups = [dist.new_group([0]), dist.new_group(list(range(world_size)))]
    total = torch.tensor([1])
    dist.all_reduce(total, group=groups[1])
    return int(total)


def _tensor(rank: int, world_size: int, value: torch.Tensor) -> torch.Tensor:
    return value + rank


def _start_a_sleeper(rank: int, world_size: int) -> int:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({WAIT_S})"]).pid


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    """Those of ``pids`` that are still alive after ``timeout_s``; returns as soon as none is."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_results_come_in_rank_order_from_the_same_processes(ranks: RankGroups) -> None:
    assert ranks(2).run(_sum_of_ranks, 1) == [(0, 3), (1, 3)]
    first = ranks(2).run(_identity)
    second = ranks(2).run(_identity)
    assert first == second, "the same processes with the same seed"
    assert [identity[1:4] for identity in first] == [("0", "2", 1), ("1", "2", 1)]
    assert ranks(2) is ranks(2)


def test_tensors_travel_both_ways(ranks: RankGroups) -> None:
    results = ranks(2).run(_tensor, torch.arange(3.0))
    assert [result.tolist() for result in results] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_exception_on_one_rank_ends_all_and_names_it(ranks: RankGroups) -> None:
    pids = [identity[0] for identity in ranks(2).run(_identity)]
    start = time.monotonic()
    with pytest.raises(RankError, match="_raise_on failed on rank 1 of 2") as caught:
        ranks(2).run(_raise_on, 1)
    assert time.monotonic() - start < 10
    assert caught.value.failures[1].kind == "raised"
    assert "KeyError: 'the reason'" in caught.value.failures[1].text
    assert caught.value.failures[0].kind == "waiting"
    assert "_raise_on" in caught.value.failures[0].output, "where the other rank stood"
    assert not _wait_until_gone(pids)
    assert ranks(2).run(_sum_of_ranks, 0) == [(0, 1), (1, 1)], "the next run has a fresh group"


def test_exceptions_on_all_ranks_are_all_shown(ranks: RankGroups) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(_system_exit)
    assert {rank: failure.kind for rank, failure in caught.value.failures.items()} == {
        0: "raised",
        1: "raised",
    }
    assert str(caught.value).count("SystemExit: 2") == 2


def test_death_of_one_rank_ends_all(ranks: RankGroups) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(_exit_on, 0)
    assert time.monotonic() - start < 15
    assert caught.value.failures[0].kind == "died"
    assert "exit code 7" in caught.value.failures[0].text
    assert ranks(2).run(_sum_of_ranks, 0) == [(0, 1), (1, 1)]


def test_death_between_two_runs_is_reported(ranks: RankGroups) -> None:
    ranks(2).run(_sum_of_ranks, 0)
    os.kill(ranks(2).pids[1], signal.SIGKILL)
    assert not _wait_until_gone([ranks(2).pids[1]])
    with pytest.raises(RankError) as caught:
        ranks(2).run(_sum_of_ranks, 0)
    assert caught.value.failures[1].kind == "died"
    assert ranks(2).run(_sum_of_ranks, 0) == [(0, 1), (1, 1)]


def test_rank_that_hangs_is_killed_and_shown(ranks: RankGroups) -> None:
    ranks(2).run(_sum_of_ranks, 0)
    start = time.monotonic()
    with pytest.raises(RankError, match="not done after 1 s on rank 1") as caught:
        ranks(2).run(_hang_on, 1, timeout_s=1.0)
    assert time.monotonic() - start < 10
    assert list(caught.value.failures) == [1]
    assert "about to wait" in caught.value.failures[1].output
    assert "in _hang_on" in caught.value.failures[1].output, "the stack it stood in"
    assert ranks(2).run(_sum_of_ranks, 0) == [(0, 1), (1, 1)]


def test_what_a_run_changes_for_the_process_is_put_back(ranks: RankGroups, tmp_path: Path) -> None:
    before = ranks(2).run(_surroundings)
    ranks(2).run(_print_and_disturb, str(tmp_path))
    assert ranks(2).outputs() == ["hello from 0\n", "hello from 1\n"]
    assert ranks(2).run(_surroundings) == before
    assert ranks(2).outputs() == ["", ""]


def test_process_groups_left_behind_do_not_pile_up(ranks: RankGroups) -> None:
    assert ranks(2).run(_subgroup_sum) == [2, 2]
    assert not ranks(2).pids, "the group ends, and its sockets and threads with it"
    assert ranks(2).run(_subgroup_sum) == [2, 2]


def test_function_that_cannot_be_sent_leaves_the_group_alone(ranks: RankGroups) -> None:
    ranks(2).run(_sum_of_ranks, 0)
    pids = ranks(2).pids
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        ranks(2).run(lambda rank, world_size: rank)
    assert ranks(2).pids == pids


def test_close_ends_what_the_ranks_have_started() -> None:
    group = RankGroup(1)
    try:
        sleeper = group.run(_start_a_sleeper)[0]
        members = list(group.pids)
        assert _alive(sleeper)
    finally:
        group.remove()
    assert not _wait_until_gone([sleeper, *members])


def test_no_rank_outlives_a_killed_session(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from tests.ranks import RankGroup\n"
        "from tests.unit.test_ranks import _identity\n"
        "if __name__ == '__main__':\n"
        "    group = RankGroup(2)\n"
        "    print([identity[0] for identity in group.run(_identity)], flush=True)\n"
        f"    time.sleep({WAIT_S})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as session:
        try:
            assert session.stdout is not None
            pids = [int(pid) for pid in session.stdout.readline().strip("[]\n").split(",")]
            assert all(_alive(pid) for pid in pids)
        finally:
            session.kill()
    assert not _wait_until_gone(pids)
