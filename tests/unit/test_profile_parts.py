"""What a deep step is put together from, on records made by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from dist_ckpt.compat.profiler import Change, Op, TensorInput, Trace
from dist_ckpt.memory.profile.allocations import Allocation, Gone, Sighting, follow
from dist_ckpt.memory.profile.attribution import ENGINE, Attribution
from dist_ckpt.memory.profile.lifetimes import end_unreported
from dist_ckpt.memory.profile.phases import stretches
from dist_ckpt.memory.profile.recording import reconciled
from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Phase, StepProfile, merge_holdings
from dist_ckpt.memory.profile.timeline import Timeline
from dist_ckpt.memory.records import RankMemory

AT_PEAK = dict.fromkeys(KINDS, 1)


def sighting(mark: int, address: int, nbytes: int, kind: str = "grads") -> Sighting:
    return Sighting(mark, address, nbytes, kind, "weight", (nbytes,), "uint8")  # type: ignore[arg-type]


def lives(allocations: list[Allocation]) -> list[tuple[int, int, int | None, int | None]]:
    return [(one.address, one.nbytes, one.start, one.end) for one in allocations]


def test_allocations_live_from_their_event_to_the_next_of_their_address() -> None:
    changes = [Change(10, 100, 8, -1), Change(20, 100, -8, -1), Change(30, 100, 16, -1)]
    assert lives(follow(changes, [], {}, [])) == [(100, 8, 10, 20), (100, 16, 30, None)]


def test_what_was_there_before_is_known_from_marks() -> None:
    seen = [sighting(0, 100, 8), sighting(1, 200, 4), sighting(0, 300, 2)]
    found = follow([Change(15, 104, 8, -1), Change(25, 300, -2, -1)], seen, {0: 0, 1: 10, 2: 12}, [Gone(100, 0, 2, 2)])
    assert sorted(lives(found), key=lambda one: one[0]) == [
        (100, 8, None, 12),  # gone at a mark
        (104, 8, 15, None),
        (200, 4, None, None),  # met later, and without an event
        (300, 2, None, 25),
    ]


def test_a_free_of_what_was_never_seen_tells_that_it_was_there() -> None:
    assert lives(follow([Change(5, 100, -8, -1)], [], {}, [])) == [(100, 8, None, 5)]


def test_an_unreported_free_is_at_the_last_use() -> None:
    ops = [
        Op("FSDP::all_gather (layers.0)", 10, 20, -1),
        Op("aten::copy_", 30, 40, -1, inputs=(TensorInput(100, (8,), "uint8"),)),
        Op("aten::copy_", 60, 70, -1, inputs=(TensorInput(100, (8,), "uint8"),)),
    ]
    reused = follow([Change(12, 100, 8, 0), Change(50, 100, 8, -1)], [], {}, [])
    assert [one.end for one in reused] == [50, None]
    end_unreported(reused, ops, {}, lambda one: False)
    assert [one.end for one in reused] == [40, None], "before its address was used again, and not of others"
    never = follow([Change(12, 100, 8, 0)], [], {}, [])
    end_unreported(never, ops, {}, lambda one: True)
    assert [one.end for one in never] == [70]


def test_kinds_follow_owners_then_the_place() -> None:
    node = f"{ENGINE}MmBackward0"
    ops = (
        Op("module:layers.0", 0, 10, -1),
        Op("aten::mm", 1, 2, 0, sequence=5),
        Op(node, 20, 40, -1, sequence=5),
        Op("MmBackward0", 21, 39, 2, sequence=5),
        Op("aten::relu", 22, 23, 3, sequence=9),
        Op("aten::mm", 30, 31, 3),
        Op("FSDP::all_gather_copy_out (layers.1)", 50, 60, -1),
        Op(node, 62, 70, -1, sequence=5),
        Op("aten::mul", 63, 64, 7, sequence=9),
    )
    made = {op: Allocation(op, 1, ops[op].start, op, ops[op].end + 1) for op in (1, 4, 5, 6, 8)}
    kinds = Attribution(Trace(ops, ()))
    assert [kinds.kind(made[op]) for op in made] == ["temporary", "recompute", "temporary", "unsharded", "temporary"]
    assert [kinds.module(made[op]) for op in made] == ["layers.0", "layers.0", "layers.0", "layers.1", "layers.0"]
    assert [op for op in range(len(ops)) if kinds.is_redone(op)] == [4], "a hook of a node runs nothing again"
    made[5].seen.append(sighting(3, 5, 1))
    assert kinds.kind(made[5]) == "grads"
    made[6].seen += [sighting(3, 6, 1, "params"), sighting(3, 6, 1, "unsharded")]
    assert kinds.kind(made[6]) == "unsharded", "what sharding has put in a parameter's place"
    made[6].seen.append(sighting(4, 6, 1, "params"))
    assert kinds.kind(made[6]) == "params"
    assert kinds.kind(Allocation(7, 1, 5, 1)) == "unattributed", "it outlives the step"
    assert Attribution(Trace(ops, ()), turns=[3]).kind(Allocation(1, 1, 1, 1, 30)) == "activations"


def test_thinning_keeps_the_highest_moment() -> None:
    blocks = [(Allocation(n, 1 + (n == 777) * 50, n, end=n + 1), KINDS[n % 3]) for n in range(5000)]
    whole = Timeline.of(blocks, 0, 5000)
    thin = whole.thinned(100)
    assert len(thin.times) <= 100
    assert (thin.times[0], thin.times[-1]) == (0, 5000)
    assert thin.times[thin.peak(0, 5001)] == 777
    assert sum(thin.by_kind[thin.peak(0, 5001)]) == 51
    assert whole.total_at(777) == 51


def test_a_pipelines_phases_have_no_gaps_and_count_micro_batches() -> None:
    ops = [
        *(Op("module:layers.0", at, at + 5, -1) for at in (10, 30)),
        *(Op(f"{ENGINE}AddBackward0", at, at + 5, -1) for at in (50, 70)),
        Op("module:layers.0", 95, 99, -1),  # after the boundary
    ]
    found = stretches(ops, 0, 100, [17, 37], [57, 77], 90)
    assert [(one.name, one.micro_batch) for one in found if one.name != "other"] == [
        ("forward", 0),
        ("loss", 0),
        ("forward", 1),
        ("loss", 1),
        ("backward", 0),
        ("backward", 1),
        ("optimizer", None),
    ]
    assert [one.start for one in found][1:] == [one.end for one in found][:-1]
    assert (found[0].start, found[-1].end) == (0, 100)


def test_holdings_that_are_alike_are_one() -> None:
    one = Holding("grads", "a", "aten::mm", (2,), "float32", 8, 1)
    other = Holding("grads", "b", "aten::mm", (2,), "float32", 12, 1)
    assert merge_holdings([one, other, one]) == (Holding("grads", "a", "aten::mm", (2,), "float32", 16, 2), other)


def test_an_allocators_own_figures_stay_and_what_the_trace_lacks_is_unattributed() -> None:
    at_peak = dict.fromkeys(KINDS, 0) | {"params": 600, "unattributed": 100}
    profile = StepProfile(
        rank=0, stage=None, device="cuda:0", step=3, duration_s=1.0, start_bytes=600, boundary_bytes=640, end_bytes=600,
        peak_bytes=700, peak_s=0.5, phase="backward", at_peak=at_peak, holdings=(), rest_bytes=700, phases=(), spans=(),
        times_s=(), timeline={},
    )  # fmt: skip
    found = RankMemory(0, "cuda:0", 3, params=600, grads=0, optimizer=0, other=0, activations=0, live=650, peak=9000)
    told = reconciled(found, profile, peak=730)
    assert (told.live, told.peak, told.unattributed) == (650, 730, 50)
    assert told.at_peak == {"phase": "backward", **at_peak, "unattributed": 130}
    on_cpu = reconciled(replace(found, live=None, peak=None), profile, peak=None)
    assert (on_cpu.live, on_cpu.peak, on_cpu.at_peak) == (640, 700, {"phase": "backward", **at_peak})


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_bytes": 11, "rest_bytes": 11},
        {"rest_bytes": 9},
        {"phases": (Phase("forward", 0, 0.0, 1.0, 9, AT_PEAK),)},
        {"phases": (Phase("forward", 0, 0.0, 1.0, 10, AT_PEAK), Phase("backward", 0, 1.5, 2.0, 10, AT_PEAK))},
    ],
)
def test_what_does_not_add_up_is_no_profile(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "rank": 0, "stage": None, "device": "cpu", "step": 1, "duration_s": 2.0, "start_bytes": 0, "boundary_bytes": 0,
        "end_bytes": 0, "peak_bytes": 10, "peak_s": 1.0, "phase": "forward", "at_peak": AT_PEAK, "holdings": (),
        "rest_bytes": 10, "phases": (), "spans": (), "times_s": (), "timeline": {},
    }  # fmt: skip
    data = StepProfile(**right).to_dict()
    with pytest.raises(ValueError, match="contradict"):
        StepProfile.from_dict(data | {"rest_bytes": 9})
    with pytest.raises(AssertionError):
        StepProfile(**right | wrong)


def test_recording_writes_nothing_on_stderr_but_keeps_what_others_write() -> None:
    code = (
        "import os, torch\n"
        "from dist_ckpt.compat import profiler\n"
        "recorder = profiler.Recorder(); os.write(2, b'mine\\n'); recorder.stop()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stderr == "mine\n"
