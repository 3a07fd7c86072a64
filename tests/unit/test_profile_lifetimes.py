"""Memory whose end no event tells: what is replaced, what graphs keep, and what other threads free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import MemoryMeter
from dist_ckpt.errors import MeasureError
from dist_ckpt.memory.profile.step_profile import StepProfile

pytestmark = pytest.mark.usefixtures("alone")

MIB = 2**20
SIDE = 512
"""A weight of so many rows and columns has 1 MiB."""


class OutOfPlace(torch.optim.Optimizer):
    """Makes its state and the parameters anew at each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        state = self.state[p]
        for name in ("m", "v"):
            state[name] = 0.9 * state.get(name, torch.zeros_like(p)) + 0.1 * p.grad
        p.data = p.data - 1e-3 * state["m"]


class Renewed(nn.Module):
    """A buffer that is assigned anew in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("mean", torch.zeros(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9
        result: Tensor = self.linear(x)
        return result


def profiled(
    model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None, extra: Callable[[], object] = tuple
) -> StepProfile:
    """The second of two steps, both of which are recorded."""
    meter = MemoryMeter(model, optimizer)
    for step in range(2):
        with meter.profile() as deep:
            loss = model(x).square().mean()
            meter.after_forward(loss)
            loss.backward()
            del loss
            extra()
            meter.boundary(step)
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
    return deep.profile


def test_what_takes_the_place_of_a_state_ends_it() -> None:
    model = nn.Linear(SIDE, SIDE, bias=False)
    profile = profiled(model, torch.randn(1, SIDE), OutOfPlace(model.parameters(), {}))
    assert profile.start_bytes == profile.end_bytes
    state = [nbytes / MIB for nbytes in profile.timeline["optimizer"]]
    assert (state[0], max(state), state[-1]) == (2, 3, 2), "the old one is there until the new one is"
    assert max(profile.timeline["params"]) == 2 * MIB and profile.timeline["params"][-1] == MIB


def test_what_takes_the_place_of_a_buffer_ends_it() -> None:
    profile = profiled(Renewed(), torch.randn(1, 4))
    buffers = [nbytes / MIB for nbytes in profile.timeline["buffers"]]
    assert (buffers[0], max(buffers), buffers[-1]) == (1, 2, 1)


def test_the_state_of_lbfgs_is_counted_once() -> None:
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
    meter, x = MemoryMeter(model, optimizer), torch.randn(8, SIDE)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    ends = []
    for step in range(3):
        with meter.profile() as deep:
            loss = model(x).square().mean()
            meter.after_forward(loss)
            loss.backward()
            meter.boundary(step)
            del loss
            optimizer.step(closure)
        ends.append((deep.profile.start_bytes, deep.profile.end_bytes))
    assert ends[1][0] == ends[0][1] and ends[2][0] == ends[1][1], "what is there after one is there before the next"


def test_what_graphs_from_before_keep_is_there_and_named() -> None:
    model, x = nn.Linear(4, 4), torch.randn(1, 4)
    before = profiled(model, x)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    validation_losses: list[Tensor] = []
    validation_losses.append((weight * 2).tanh().sum())  # tanh keeps its result, of which no tensor is left
    after = profiled(model, x)
    kept = weight.nbytes + MIB
    assert after.start_bytes - before.start_bytes == pytest.approx(kept, abs=100)
    sources = {h.source for h in after.holdings if h.shape == (SIDE, SIDE)}
    assert any("the graph of list 'validation_losses'" in source for source in sources), sources


@pytest.mark.parametrize("keep", [False, True])
def test_what_another_thread_frees_is_gone(keep: bool) -> None:
    kept: list[Tensor] = []

    def extra() -> None:
        for _ in range(3):
            box = [torch.ones(SIDE, SIDE)]
            if keep:
                kept.extend(box)
            freeing = threading.Thread(target=box.clear)
            freeing.start()
            freeing.join()

    profile = profiled(nn.Linear(4, 4), torch.randn(1, 4), extra=extra)
    assert profile.end_bytes - profile.start_bytes == 3 * MIB * keep
    assert profile.peak_bytes - profile.start_bytes == pytest.approx(3 * MIB if keep else MIB, abs=2000)


def test_gradients_of_others_are_there_though_no_object_stands_for_them() -> None:
    other = nn.Linear(SIDE, SIDE, bias=False)
    other(torch.randn(1, SIDE)).sum().backward()
    before = profiled(nn.Linear(4, 4), torch.randn(1, 4))
    found = [h for h in before.holdings if h.kind == "unattributed" and h.shape == (SIDE, SIDE)]
    assert sum(h.count for h in found) == 2, "its weight and its gradient"
    assert {h.source.split(" in ")[0] for h in found} == {
        "Linear.weight of variable 'other'",
        "gradient of Linear.weight of variable 'other'",
    }


class Step:
    """A step, and a meter that records it."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.meter = MemoryMeter(self.model)

    def __call__(self) -> None:
        loss = self.model(torch.randn(1, 4)).sum()
        self.meter.after_forward(loss)
        loss.backward()
        self.meter.boundary(0)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_threads_that_record_at_once_take_turns() -> None:
    both = threading.Barrier(2)
    ends: list[str] = []

    def record() -> None:
        step = Step()
        both.wait()
        try:
            with step.meter.profile():
                both.wait(30)  # neither has ended when the other one begins
                step()
        except MeasureError as error:
            ends.append(str(error))
            both.wait(30)
        else:
            ends.append("recorded")

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(end.split(",")[0] for end in ends) == ["a profiler is running already", "recorded"]


def test_calls_of_other_threads_are_none_of_the_step() -> None:
    step = Step()
    with step.meter.profile() as deep:
        in_thread(lambda: step.model(torch.randn(1, 4)))
        step()
    assert [span.work for span in deep.profile.spans if span.module == ""] == ["forward"]


def test_a_step_that_is_not_recorded_is_said_to_be_so() -> None:
    step = Step()
    with pytest.raises(MeasureError, match="ran in another thread; enter"), step.meter.profile():
        in_thread(step)
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with pytest.raises(MeasureError, match="another profiler was started"), step.meter.profile(), other:
        step()


def test_a_block_is_one_update() -> None:
    step = Step()
    with pytest.raises(MeasureError, match="boundary\\(\\) was called twice"), step.meter.profile():
        step()
        step()
