"""What a forward reads and edits besides its inputs is the same in the recompute, and edited once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.errors import EngineError, PlanError
from dist_ckpt.guards.forward_state import COPY_LIMIT_BYTES
from dist_ckpt.plan import Plan, Region
from dist_ckpt.planning import apply, make_plan
from dist_ckpt.wrap.apply import apply_plan
from tests.unit.toys import Stack


class ConvBlock(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Counts(nn.Module):
    """Edits a buffer that its output depends on, in place or by a new tensor."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return torch.sigmoid(self.fc(x) * self.calls)


class Routes(nn.Module):
    """Picks by a bias that others move after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(6, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(self.experts(x))
        return scores.gather(-1, (scores + self.bias).argmax(-1, keepdim=True)).exp()


def recomputed(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    apply_plan(twin, Plan(regions=(Region(("",)),)))
    return twin


def grads(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "selective",
        {"mode": "selective_attention", "modules": ["norm"]},
        {"mode": "segments", "k": 2},
        {"mode": "nested", "k": 2, "inner": ["block", "norm"]},
        {"mode": "nested", "k": 3, "inner": "norm"},
    ],
    ids=str,
)
def test_batch_norm_statistics_are_updated_once(policy: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(ConvBlock() for _ in range(3)), nn.Flatten(), nn.Linear(4 * 25, 2))
    model = copy.deepcopy(plain)
    plan = apply(model, policy)
    assert any("norm are as its forward found them" in repair for repair in plan.repairs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (plain, model)]
    for _ in range(20):
        x = torch.randn(4, 4, 5, 5)
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        assert same(grads(model), grads(plain))
        assert same(list(model.buffers()), list(plain.buffers()))
    assert int(model[0].norm.num_batches_tracked) == 20


@pytest.mark.parametrize("in_place", [True, False])
def test_a_counter_counts_once_and_the_gradient_is_that_of_its_forward(in_place: bool) -> None:
    plain = Counts(in_place)
    model = recomputed(plain)
    for step in range(3):
        x = torch.randn(2, 6)
        for m in (plain, model):
            m.zero_grad()
            m(x).sum().backward()
        assert same(grads(model), grads(plain)) and float(model.calls) == float(plain.calls) == step + 1


def test_a_buffer_that_moves_between_forward_and_backward_does_not_reroute() -> None:
    torch.manual_seed(0)
    plain = Routes()
    model = recomputed(plain)
    x = torch.randn(32, 6)
    for m in (plain, model):
        loss = m(x).sum()
        m.bias += torch.tensor([5.0, -5.0, 0.0, 0.0])
        loss.backward()
    assert same(grads(model), grads(plain)) and torch.equal(model.bias, plain.bias)


def test_two_micro_batches_in_flight_keep_their_own_state() -> None:
    plain = Counts(in_place=False)  # an edit in place would disturb the first graph, recomputed or not
    model = recomputed(plain)
    xs = torch.randn(2, 6), torch.randn(3, 6)
    for m in (plain, model):
        losses = [m(x).sum() for x in xs]
        losses[0].backward()
        losses[1].backward()
    assert same(grads(model), grads(plain)) and float(model.calls) == 2


def test_a_second_backward_sees_the_same_state() -> None:
    model = recomputed(Counts())
    loss = model(torch.randn(2, 6)).sum()
    loss.backward(retain_graph=True)
    once = [g.clone() for g in grads(model)]
    model.zero_grad()
    loss.backward()
    assert same(grads(model), once) and float(model.calls) == 1


def test_nested_regions_update_once() -> None:
    plain = nn.Sequential(nn.Sequential(ConvBlock(), ConvBlock()))
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("0",), inner=(Region(("0.0",)), Region(("0.1",)))),)))
    for _ in range(2):
        x = torch.randn(2, 4, 5, 5)
        for m in (plain, model):
            m.zero_grad()
            m(x).square().sum().backward()
        assert same(grads(model), grads(plain)) and same(list(model.buffers()), list(plain.buffers()))


class Large(nn.Module):
    def __init__(self, edits: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(COPY_LIMIT_BYTES // 4 + 1))
        self.edits = edits

    def forward(self, x: Tensor) -> Tensor:
        if self.edits:
            self.table[0] += 1
        return (self.fc(x) * self.table[:4]).exp()


def test_large_buffers_are_checked_instead_of_copied() -> None:
    with pytest.raises(PlanError, match=r"edits its buffer 'table' of 1\.0 MiB"):
        recomputed(Large(edits=True))(torch.randn(2, 4))
    model = recomputed(Large(edits=False))
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    loss = model(torch.randn(2, 4)).sum()
    model.table.mul_(2)
    with pytest.raises(RuntimeError, match="between its forward and its backward its buffer 'table' was changed"):
        loss.backward()


def test_switching_to_eval_before_backward_is_an_error() -> None:
    model = recomputed(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()))
    loss = model(torch.randn(2, 4)).sum()
    model.eval()
    with pytest.raises(RuntimeError, match=r"train\(\) or eval\(\) was called"):
        loss.backward()


def test_blocks_with_buffers_are_not_compiled() -> None:
    model = nn.Sequential(nn.Sequential(Counts(), nn.Tanh()), nn.Sequential(Counts(), nn.Tanh()))
    engine = ENGINES["ddp"](TrainingOptions(compile=True), torch.device("cpu"), lambda m, b: m(**b))
    with pytest.raises(EngineError, match=r"train\.compile: 0: .*has buffers"):
        engine.prepare(model, make_plan(model, "full"))


@pytest.mark.parametrize("policy", ["full", "selective", {"mode": "segments", "k": 2}])
def test_a_parameter_that_is_edited_before_backward_is_an_error_as_without_a_policy(policy: Any) -> None:
    for one in ("none", policy):
        model = Stack(2)
        apply(model, one)
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=1.0)
        loss = model(torch.randn(2, 5, 4)).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        found = "modified by an inplace" if one == "none" else r"its parameter 'norm\.weight' was edited"
        with pytest.raises(RuntimeError, match=found):
            loss.backward()


def test_a_parameter_that_its_forward_edits_is_an_error() -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.fc = nn.Parameter(torch.ones(4), requires_grad=False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.codes.mul_(0.5)
            return (self.fc(x).tanh() * self.codes.clone()).exp()

    model = nn.Sequential(Codebook(), Codebook())
    apply(model, {"mode": "full", "blocks": "Codebook"})
    with pytest.raises(RuntimeError, match="its parameter 'codes' was edited in place"):
        model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("policy", ["full", "selective", {"mode": "segments", "k": 2}], ids=str)
def test_parameters_of_one_call_are_those_of_its_recompute(policy: Any) -> None:
    torch.manual_seed(0)
    plain, x = Stack(2), torch.randn(2, 5, 4)
    model = copy.deepcopy(plain)
    apply(model, policy)
    found = []
    for one in (plain, model):
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in one.named_parameters()}
        loss = torch.func.functional_call(one, weights, (x,)).square().sum()
        found.append(torch.autograd.grad(loss, list(weights.values())))
        assert all(isinstance(p, nn.Parameter) for m in one.modules() for p in m._parameters.values() if p is not None)
    assert same(*map(list, found))


def test_a_parameter_that_is_replaced_before_backward_is_an_error() -> None:
    model = Stack(2)
    apply(model, "full")
    loss = model(torch.randn(2, 5, 4)).sum()
    model.blocks[1].norm.weight = nn.Parameter(torch.ones(8))
    with pytest.raises(RuntimeError, match=r"blocks\.1 is recomputed.* its parameter 'norm\.weight' was replaced"):
        loss.backward()


def test_an_rrelu_must_not_stop_early() -> None:
    """It saves its noise before it draws it: a recompute that stops at the last saved tensor leaves it unfilled."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.RReLU()) for _ in range(2)))
    early = copy.deepcopy(plain)
    apply(early, "full")
    with pytest.raises(PlanError, match=r"0 has an RReLU.*ckpt\.early_stop=false"):
        early(torch.randn(4, 6))
    model = copy.deepcopy(plain)
    apply(model, {"mode": "full", "early_stop": False})
    x = torch.randn(4, 6)
    for one in (plain, model):
        torch.manual_seed(1)
        one(x).square().sum().backward()
    assert same(grads(model), grads(plain))
