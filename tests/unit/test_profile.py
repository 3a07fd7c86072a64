"""A deep step of anybody's own loop, without a process group."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist_ckpt import MemoryMeter, apply
from dist_ckpt.errors import MeasureError
from dist_ckpt.memory.profile.step_profile import KINDS, StepProfile
from tests.distributed.oracle import COMPILER, counter
from tests.unit.toys import Stack

pytestmark = pytest.mark.usefixtures("alone")

ROWS, SEQ = 16, 8


class Loop:
    """A model and its updates, on rows of its own."""

    def __init__(self, policy: str = "none", rounds: int = 1) -> None:
        torch.manual_seed(0)
        self.model = Stack(depth=3, width=32)
        if policy != "none":
            apply(self.model, policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.meter = MemoryMeter(self.model, self.optimizer)
        self.rounds = rounds
        self.kept: list[int] = []
        self.step()

    def step(self, reads_graph: bool = True, keep: list[Tensor] | None = None) -> None:
        for _ in range(self.rounds):
            loss = self.model(torch.randn(ROWS, SEQ, 4)).square().mean()
            if reads_graph:
                self.kept.append(self.meter.after_forward(loss))
            if keep is not None:
                keep.append(torch.zeros(64, 1024))
            loss.backward()
            del loss
        self.meter.boundary(7)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def profile(self) -> StepProfile:
        with self.meter.profile() as deep:
            self.step()
        return deep.profile


def nbytes(tensors: Iterator[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def elsewhere(profile: StepProfile) -> int:
    """Bytes that other tests of this process have left, which are nobody's here either."""
    return profile.timeline["unattributed"][0]


def check_sums(profile: StepProfile) -> None:
    """What is true of every profile."""
    totals = [sum(profile.timeline[kind][p] for kind in KINDS) for p in range(len(profile.times_s))]
    assert max(totals) == profile.peak_bytes
    assert totals[0] == profile.start_bytes
    assert totals[-1] == profile.end_bytes
    assert min(min(curve) for curve in profile.timeline.values()) == 0
    assert profile.rest_bytes >= 0
    by_kind = {kind: sum(h.nbytes for h in profile.holdings if h.kind == kind) for kind in KINDS}
    assert all(by_kind[kind] <= profile.at_peak[kind] for kind in KINDS)
    assert list(profile.times_s) == sorted(profile.times_s)
    assert profile.phases[0].start_s == 0
    assert profile.phases[-1].end_s == pytest.approx(profile.duration_s)
    assert max(phase.peak_bytes for phase in profile.phases) == profile.peak_bytes
    assert profile.phase in {phase.name for phase in profile.phases if phase.peak_bytes == profile.peak_bytes}


@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_byte_of_a_step_is_explained(policy: str) -> None:
    loop = Loop(policy, rounds=2)
    with loop.meter.profile() as deep:
        loop.step()
    profile, memory = deep.profile, deep.memory
    check_sums(profile)
    stray = elsewhere(profile)
    assert stray < 1000
    assert set(profile.timeline["unattributed"]) == {stray}
    parameters = nbytes(loop.model.parameters())
    assert profile.at_peak["params"] == memory.params == parameters
    assert max(profile.timeline["grads"]) == memory.grads == parameters
    assert set(profile.timeline["optimizer"]) == {memory.optimizer}
    assert profile.start_bytes == profile.end_bytes == memory.params + memory.optimizer + stray
    assert memory.live == memory.params + memory.optimizer + memory.grads + stray
    assert memory.at_peak is not None and memory.at_peak["phase"] == "backward"
    assert (profile.step, profile.stage, profile.device) == (7, None, "cpu")
    assert (max(profile.timeline["recompute"]) > 0) == (policy == "full")


@pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the counter with")
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_step_is_what_is_counted_beneath_torch(policy: str) -> None:
    base = counter().live()
    loop = Loop(policy, rounds=2)
    at_boundary: list[int] = []
    loop.optimizer.register_step_pre_hook(lambda *_: at_boundary.append(counter().live() - base))
    start = counter().live() - base
    counter().restart()
    with loop.meter.profile() as deep:
        loop.step()
    peak, end = counter().peak() - base, counter().live() - base
    profile, memory = deep.profile, deep.memory
    stray = elsewhere(profile)  # from before there was a counter
    assert (profile.start_bytes - stray, profile.end_bytes - stray) == (start, end)
    assert memory.live == at_boundary[-1] + stray
    assert memory.peak == pytest.approx(peak + stray, rel=0.005)


def test_activations_are_what_the_graph_keeps() -> None:
    loop = Loop()
    inputs = ROWS * SEQ * 4 * 4  # the model was handed them, so they are no activations, though the graph keeps them
    profile = loop.profile()
    assert max(profile.timeline["activations"]) == loop.kept[-1] - inputs
    forward = next(phase for phase in profile.phases if phase.name == "loss")
    assert forward.at_peak["activations"] == loop.kept[-1] - inputs
    assert profile.timeline["activations"][0] == profile.timeline["activations"][-1] == 0


def test_phases_and_spans_are_in_the_order_of_the_step() -> None:
    profile = Loop("full", rounds=2).profile()
    names = [(phase.name, phase.micro_batch) for phase in profile.phases if phase.name != "other"]
    one = [("forward", 0), ("loss", 0), ("backward", 0)]
    assert names == [*one, *((name, 1) for name, _ in one), ("optimizer", None)]
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for micro_batch in range(2):
        spans = [span for span in profile.spans if span.micro_batch == micro_batch]
        assert [s.module for s in spans if s.work == "forward"] == ["", "embed", *blocks, "head"]
        assert [s.module for s in spans if s.work == "backward"] == ["head", *blocks[::-1], "embed"]
        assert [s.module for s in spans if s.work == "recompute"] == blocks[::-1]
        for span in (s for s in spans if s.work == "recompute"):
            around = next(s for s in spans if s.module == span.module and s.work == "backward")
            assert around.start_s <= span.start_s <= span.end_s <= around.end_s


def test_holdings_say_what_they_are() -> None:
    profile = Loop("full").profile()
    found = {(h.kind, h.module, h.source, h.shape, h.dtype): h.count for h in profile.holdings}
    assert found["params", "blocks.0.mlp.0", "blocks.0.mlp.0.weight", (64, 32), "float32"] == 1
    assert found["optimizer", "blocks.1.mlp.2", "blocks.1.mlp.2.weight", (32, 64), "float32"] == 2
    again = {(h.module, h.source) for h in profile.holdings if h.kind == "recompute"}
    assert ("blocks.0.attention.qkv", "aten::addmm") in again
    assert ("blocks.0", "aten::add") in again, "the block's own sum, outside of its children"


def test_what_nobody_owns_is_named_by_its_holder() -> None:
    loop = Loop()
    hoard: list[Tensor] = []
    with loop.meter.profile() as deep:
        loop.step(keep=hoard)
    check_sums(deep.profile)
    stray = elsewhere(deep.profile)
    assert deep.profile.at_peak["unattributed"] == hoard[0].nbytes + stray
    found = [h for h in deep.profile.holdings if h.kind == "unattributed"]
    assert found[0].shape == (64, 1024)
    assert "'hoard'" in found[0].source and "test_profile.py" in found[0].source
    again = loop.profile()
    assert again.at_peak["unattributed"] == hoard[0].nbytes + stray, "it was there before this step"
    assert "'hoard'" in next(h.source for h in again.holdings if h.kind == "unattributed")


@pytest.mark.full
def test_a_first_step_makes_the_optimizer_state() -> None:
    loop = Loop()
    loop.optimizer.state.clear()
    profile = loop.profile()
    assert profile.timeline["optimizer"][0] == 0
    assert profile.timeline["optimizer"][-1] >= 2 * nbytes(loop.model.parameters())


def test_gradients_that_wait_for_the_step_are_freed_in_it() -> None:
    loop = Loop()
    loop.model(torch.randn(1, SEQ, 4)).sum().backward()
    with loop.meter.profile() as deep:
        loop.optimizer.zero_grad()  # as loops do that begin with it; no event tells of what is freed here
        loop.step()
    grads = deep.profile.timeline["grads"]
    assert grads[0] == nbytes(loop.model.parameters())
    assert next(p for p in deep.profile.phases if p.name == "loss").at_peak["grads"] == 0


def test_without_after_forward_activations_are_what_backward_finds() -> None:
    loop = Loop()
    with loop.meter.profile() as deep:
        loop.step(reads_graph=False)
    check_sums(deep.profile)
    assert deep.memory.activations is None
    kept = max(deep.profile.timeline["activations"])
    assert loop.kept[-1] * 0.9 <= kept <= loop.kept[-1]


@pytest.mark.full
def test_a_second_backward_of_one_graph() -> None:
    loop = Loop()
    with loop.meter.profile() as deep:
        loss = loop.model(torch.randn(ROWS, SEQ, 4)).square().mean()
        loop.meter.after_forward(loss)
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        loop.meter.boundary(1)
    check_sums(deep.profile)
    assert [p.name for p in deep.profile.phases if p.name == "backward"] == ["backward"] * 2
    assert set(deep.profile.timeline["unattributed"]) == {elsewhere(deep.profile)}


def test_profiles_of_equal_steps_are_equal_and_keep_nothing(no_collector: None) -> None:
    loop = Loop("full")
    batch = torch.randn(ROWS, SEQ, 4)
    alive = weakref.ref(batch)
    with loop.meter.profile(batch) as deep:
        loop.step()
    del batch
    assert alive() is None
    first, second, third = deep.profile, loop.profile(), loop.profile()
    assert third.at_peak == second.at_peak
    assert third.holdings == second.holdings
    assert StepProfile.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_a_step_that_raises_leaves_everything_as_it_was() -> None:
    loop = Loop()
    call = nn.Module.__call__
    with pytest.raises(RuntimeError, match="mine"), loop.meter.profile() as deep:
        loop.model(torch.randn(ROWS, SEQ, 4))
        raise RuntimeError("mine")
    assert nn.Module.__call__ is call
    assert not torch.autograd._profiler_enabled()
    with pytest.raises(MeasureError, match="has failed"):
        deep.profile  # noqa: B018
    check_sums(loop.profile())


def test_mistakes_are_named() -> None:
    loop = Loop()
    with pytest.raises(MeasureError, match="no boundary: call MemoryMeter"), loop.meter.profile():
        loop.model(torch.randn(ROWS, SEQ, 4)).sum().backward()
    with pytest.raises(MeasureError, match="within its own"), loop.meter.profile(), loop.meter.profile():
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        with pytest.raises(MeasureError, match="profiler is running already"), loop.meter.profile():
            pass
        loop.step()
    assert any(event.key == "aten::gelu" for event in mine.key_averages()), "the user's own goes on"
    check_sums(loop.profile())


def test_a_profiler_that_warms_up_is_left_alone() -> None:
    loop = Loop()
    plan = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    seen: list[str] = []

    def ready(profiler: torch.profiler.profile) -> None:
        seen.extend(event.key for event in profiler.key_averages())

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=plan, on_trace_ready=ready) as mine:
        with pytest.raises(MeasureError, match="profiler is running already"):
            loop.profile()
        mine.step()
        loop.step()
        mine.step()
    assert "aten::gelu" in seen
    check_sums(loop.profile())


@pytest.mark.full
def test_two_meters_take_turns() -> None:
    one, other = Loop(), Loop()
    with one.meter.profile() as deep:
        with pytest.raises(MeasureError, match="profiler is running already"), other.meter.profile():
            pass
        one.step()
    check_sums(deep.profile)
    check_sums(other.profile())


@pytest.mark.full
def test_torchs_reentrant_checkpoint_is_a_recompute() -> None:
    loop = Loop()
    for block in loop.model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=True)
    profile = loop.profile()
    check_sums(profile)
    assert max(profile.timeline["recompute"]) > 0
    assert [s.module for s in profile.spans if s.work == "recompute"] == ["blocks.2", "blocks.1", "blocks.0"]


@pytest.mark.full
def test_compiled_blocks_are_not_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    loop = Loop("full")
    for block in loop.model.blocks:
        block.compile(backend="aot_eager")
    profile = loop.profile()  # compiles
    loop.step()
    torch._logging.set_logs(recompiles=True)
    try:
        with caplog.at_level(logging.DEBUG):
            again = loop.profile()
            loop.step()
    finally:
        torch._logging.set_logs()
        torch._dynamo.reset()
    assert not [r for r in caplog.records if "ecompil" in r.getMessage()]
    check_sums(profile)
    check_sums(again)
    assert set(again.timeline["unattributed"]) == {elsewhere(again)}
    assert [s.module for s in again.spans if s.work == "forward"][2:5] == ["blocks.0", "blocks.1", "blocks.2"]
