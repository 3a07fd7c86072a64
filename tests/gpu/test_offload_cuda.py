"""Offloading on a real device: right values, memory that is really free, copies that really overlap.

Skipped where there is no GPU. What can be shown without one, on a double that is as late as it may be, is in
``tests/unit/test_transfer.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.cost import plan_cost
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.planning import apply, make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.wrap.offload import Offloader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")

CONFIG = ModelConfig(n_layers=4, d_model=256, d_ff=1024, dropout=0.1)
BATCH, SEQ = 8, 512
POLICIES: list[Any] = [
    "offload",
    {"mode": "full", "inputs": "offload"},
    {"mode": "segments", "k": 2, "inputs": "offload"},
    {"mode": "selective", "inputs": "offload"},
    {"mode": "selective", "save": [], "offload": ["matmul"]},
]


def model_with(policy: Any) -> Transformer:
    model = Transformer(CONFIG).cuda()
    init_parameters(model, 0, CONFIG.n_layers)
    apply(model, policy)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("input_ids", "labels")
    return {n: torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ), generator=generator).cuda() for n in names}


def step(model: nn.Module, backwards: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch())
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def same_order_of_arithmetic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_are_bitwise_those_without(policy: Any) -> None:
    expected, model = step(model_with("none")), model_with(policy)
    for _ in range(5):  # memory is reused from step to step, so a wait that is missing shows sooner or later
        found = step(model)
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("ahead_bytes", [0, 2**20, 2**26])
def test_any_look_ahead_is_right_with_and_without_a_kept_graph(ahead_bytes: int) -> None:
    plain = model_with("none")
    expected = step(plain, backwards=2)
    offloader = Offloader(0, ahead_bytes)
    forward = plain.forward

    def offloaded(**given: Tensor) -> Tensor:
        with offloader.hooks(plain):
            return forward(**given)

    plain.forward = offloaded  # type: ignore[method-assign]
    found = step(plain, backwards=2)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_copies_lie_in_pinned_memory_and_the_device_holds_the_rest() -> None:
    """The allocator's own figure after forward is lower by what is offloaded, but for what is still on its way."""
    torch.cuda.synchronize()
    live = {}
    for policy in ("none", "offload"):
        model, given = model_with(policy), batch()
        step(model)
        model.zero_grad()
        meter = MemoryMeter(model)
        before = torch.cuda.memory_allocated()
        loss = model(**given)
        kept = meter.after_forward(loss)
        for module in model.modules():
            offloader = module.__dict__.get("_dist_ckpt_offloader")
            if offloader is not None:
                torch.cuda.synchronize()
                offloader.settle()
        live[policy] = (torch.cuda.memory_allocated() - before, kept, saved_bytes([loss], model.parameters()))
        loss.backward()
        memory = meter.boundary(1)
        assert (memory.offloaded or 0) == live[policy][2].offloaded
        del loss, model, meter
    (all_live, all_kept, _), (some_live, some_kept, saved) = live["none"], live["offload"]
    assert saved.offloaded > 0.7 * all_kept and some_kept == saved.on_device
    assert abs((all_live - some_live) - saved.offloaded) < 0.02 * all_live
    packed = Offloader(0).put(torch.ones(2**20, device="cuda"))
    assert packed.held.is_pinned() and packed.held.device.type == "cpu"


def test_the_peak_is_lower() -> None:
    peaks = {}
    for policy in ("none", "offload"):
        model = model_with(policy)
        step(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model)
        peaks[policy] = torch.cuda.max_memory_allocated() - before
        del model
    assert peaks["offload"] < peaks["none"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_plan_costs_what_it_says(policy: Any) -> None:
    model = Transformer(CONFIG).cuda()
    init_parameters(model, 0, CONFIG.n_layers)
    plan = make_plan(model, policy)
    cost = plan_cost(model, plan, batch())
    model = model_with(policy)
    found = saved_bytes([model(**batch())], [*model.parameters(), *model.buffers()])
    assert (cost.saved_bytes, cost.offloaded_bytes) == (found.total, found.offloaded)


def test_nothing_stays_on_the_device_after_steps() -> None:
    model = model_with("offload")
    step(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        step(model)
    loss = model(**batch())
    del loss
    torch.cuda.synchronize()
    for module in model.modules():
        if (offloader := module.__dict__.get("_dist_ckpt_offloader")) is not None:
            offloader.settle()
    assert torch.cuda.memory_allocated() == before


def test_an_edit_that_races_with_a_copy_is_found_or_harmless() -> None:
    for _ in range(20):
        offloader = Offloader(0)
        source = torch.full((2**24,), 3.0, device="cuda")
        packed = offloader.put(source)
        source.mul_(2)
        try:
            assert bool((packed.get() == 3.0).all())
        except RuntimeError as error:
            assert "on its way to host memory" in str(error)


def test_backward_on_another_stream_is_right() -> None:
    side = torch.cuda.Stream()
    x = torch.randn(2**20, device="cuda", requires_grad=True)
    offloader = Offloader(0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), offloader.hooks():
        y = (x.sin().exp() * x).sum()
    torch.cuda.current_stream().wait_stream(side)
    y.backward()
    (expected,) = torch.autograd.grad((x.sin().exp() * x).sum(), x)
    assert torch.equal(x.grad, expected)


def test_tensors_on_the_host_stay_there() -> None:
    module = nn.Linear(4, 4).cuda()
    table = torch.ones(1000, requires_grad=True)
    with Offloader(0).hooks(module):
        loss = (table * table).sum()
    (handle,) = {type(h.data).__name__ for h in (loss.grad_fn.next_functions[0][0]._raw_saved_self,)}
    assert handle == "Watched"
