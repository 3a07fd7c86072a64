"""Policies that offload: the gradients of the plain model, bytes by arithmetic, and plans that cost what they say."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dist_ckpt.cost import plan_cost
from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.memory.storages import Storages
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import EVERYTHING, OpRule, Plan, Region, SaveRule
from dist_ckpt.planning import apply, make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.wrap.apply import apply_plan, remove_plan
from dist_ckpt.wrap.offload import MIN_BYTES, Offloader
from tests.unit.hosts import hosts_made
from tests.unit.toys import Stack

BATCH, SEQ = 4, 96
"""So that a residual stream of ``tiny`` is not small, and the statistics of its norms are."""

OFFLOADING: list[Any] = [
    "offload",
    {"mode": "full", "inputs": "offload"},
    {"mode": "segments", "k": 2, "inputs": "offload"},
    {"mode": "selective", "inputs": "offload", "offload": ["attention"]},
]
MORE: list[Any] = [
    {"mode": "offload", "modules": ["attention", "feed_forward.w2"]},
    {"mode": "every_k", "k": 2, "inputs": "offload"},
    {"mode": "selective", "inputs": "offload"},
    {"mode": "selective_attention", "inputs": "offload"},
    {"mode": "nested", "k": 2, "inputs": "offload"},
]


def batch_for(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("input_ids", "labels")
    return {n: torch.randint(0, config.vocab_size, (BATCH, SEQ), generator=generator) for n in names}


def step(config: ModelConfig, policy: Any, backwards: int = 1) -> tuple[SavedBytes, int, dict[str, Tensor]]:
    """Saved bytes, FLOPs and gradients of a step on real tensors."""
    model = Transformer(config)
    init_parameters(model, 0, config.n_layers)
    apply_plan(model, make_plan(model, policy))
    saved: list[SavedBytes] = []

    def run() -> None:
        torch.manual_seed(1)
        loss = model(**batch_for(config))
        saved.append(saved_bytes([loss], [*model.parameters(), *model.buffers()]))
        for n in range(backwards):
            loss.backward(retain_graph=n + 1 < backwards)

    flops = count_flops(run)
    return saved[0], flops, {name: p.grad for name, p in named_parameters(model) if p.grad is not None}


@pytest.mark.parametrize("policy", [*OFFLOADING, *(pytest.param(one, marks=pytest.mark.full) for one in MORE)], ids=str)
def test_gradients_are_bitwise_those_without_and_the_cost_is_what_was_said(policy: Any) -> None:
    config = ModelConfig(n_layers=3, dropout=0.1)
    _, _, expected = step(config, "none")
    saved, flops, found = step(config, policy)
    assert found.keys() == expected.keys() and saved.offloaded > 0
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    model = Transformer(config)
    cost = plan_cost(model, make_plan(model, policy), batch_for(config))
    assert (cost.saved_bytes, cost.offloaded_bytes, cost.flops) == (saved.total, saved.offloaded, flops)
    assert "in host memory" in str(cost)


@pytest.mark.parametrize("policy", ["offload", {"mode": "full", "inputs": "offload"}], ids=str)
def test_a_second_backward_is_right(policy: Any) -> None:
    config = ModelConfig(n_layers=2)
    _, _, expected = step(config, "none", backwards=2)
    _, _, found = step(config, policy, backwards=2)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


class Arithmetic:
    """Bytes of ``tiny`` (fp32, fused attention, no dropout)."""

    def __init__(self, config: ModelConfig) -> None:
        tokens, layers, kv = BATCH * SEQ, config.n_layers, config.n_kv_heads * config.head_dim
        self.residual = 4 * tokens * config.d_model
        small = 4 * tokens * (2 + config.n_heads)  # 1/rms of two norms, log-sum-exp of each head
        heads = 4 * tokens * (2 * config.d_model + 2 * kv)  # q, output, k, v
        ffn = 4 * tokens * 4 * config.d_ff  # w1(x), silu of it, w3(x), their product
        self.small, self.offloaded = layers * small, layers * (2 * 3 * self.residual + heads + ffn)
        assert small // 3 < MIN_BYTES <= 4 * tokens * kv


def test_bytes_follow_the_closed_formula() -> None:
    config = ModelConfig(n_kv_heads=4)
    formula = Arithmetic(config)
    model = Transformer(config)
    cost = plan_cost(model, make_plan(model, "offload"), batch_for(config))
    assert cost.offloaded_bytes == formula.offloaded
    assert cost.saved_bytes == cost.baseline_saved_bytes and cost.recomputed_flops == 0
    full = plan_cost(model, make_plan(model, {"mode": "full", "inputs": "offload"}), batch_for(config))
    assert full.offloaded_bytes == full.input_bytes == config.n_layers * formula.residual
    outside = full.saved_bytes - full.input_bytes
    assert cost.saved_bytes - cost.offloaded_bytes == outside + formula.small


def test_min_bytes_counts_what_leaves_the_device() -> None:
    config = ModelConfig(n_layers=2)
    model = Transformer(config)
    for asked, regions in ((1000, 2), (2**30, 0)):
        plan = make_plan(model, {"mode": "offload", "min_bytes": asked}, batch_for(config))
        assert len(plan.regions) == regions


def stack(policy: Any, width: int = 8) -> Stack:
    torch.manual_seed(0)
    model = Stack(3, width, 0.1)
    apply(model, policy)
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small to be offloaded."""
    monkeypatch.setattr(Offloader.__init__, "__defaults__", (0, 0, ()))


@pytest.mark.parametrize("policy", ["offload", {"mode": "segments", "k": 2, "inputs": "offload"}], ids=str)
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_offload_by_themselves(policy: Any, how: Any, everything: None) -> None:
    model, x = stack(policy), torch.randn(2, 5, 4)
    expected = gradients(model, x)
    loss = model(x).sum()  # something waits while the copy is made
    twin = how(model)
    del model
    found = saved_bytes([twin(x).sum()], twin.parameters())
    assert found.offloaded > 0
    for one, other in zip(gradients(twin, x), expected, strict=True):
        assert torch.equal(one, other)
    loss.backward()
    remove_plan(twin)
    assert saved_bytes([twin(x).sum()], twin.parameters()).offloaded == 0


@pytest.mark.parametrize("policy", ["offload", {"mode": "full", "inputs": "offload"}], ids=str)
def test_nothing_is_copied_without_gradients(policy: Any, everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = hosts_made(monkeypatch)
    model, x = stack(policy), torch.randn(2, 5, 4)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert made == []


@pytest.mark.parametrize("policy", ["offload", {"mode": "segments", "k": 2, "inputs": "offload"}], ids=str)
def test_each_step_frees_what_it_copied(
    policy: Any,
    everything: None,
    monkeypatch: pytest.MonkeyPatch,
    no_collector: None,
) -> None:
    made = hosts_made(monkeypatch)
    model = stack(policy)
    for _ in range(2):
        gradients(model, torch.randn(2, 5, 4))
        loss = model(torch.randn(2, 5, 4)).sum()  # and one without backward
        assert any(ref() is not None for ref in made)
        del loss
        assert made and not any(ref() is not None for ref in made)


class EditsItsInput(nn.Module):
    """A model that edits the residual stream in place between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for layer in self.layers:
            y = layer(x)
            with torch.no_grad():
                x.mul_(3)
            x = y
        return x


def test_inputs_that_are_edited_later_are_right_as_they_were_copied(everything: None) -> None:
    torch.manual_seed(0)
    model, x = EditsItsInput(), torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)
    reference = nn.Sequential(*copy.deepcopy(model.layers))
    expected = gradients(reference, x)
    apply(model, {"mode": "full", "inputs": "offload"})
    for one, other in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(one, other)


class Masked(nn.Module):
    """A block that gets a tensor by keyword, and the same one in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return (self.linear(x) * mask).tanh()


class MaskedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


def test_what_all_regions_are_given_waits_once(everything: None) -> None:
    model, x = MaskedStack(), torch.randn(4, 8)
    apply(model, {"mode": "full", "inputs": "offload"})
    found = saved_bytes([model(x).sum()], model.parameters())
    assert found.total == found.inputs == found.offloaded == 3 * 4 * 8 * 4 + 4 * 8


@pytest.mark.parametrize("policy", ["none", "full", "selective", {"mode": "segments", "k": 2}], ids=str)
def test_a_users_own_hooks_get_everything_that_is_kept(policy: Any) -> None:
    """``save_on_cpu`` around the model, say: inputs of regions and results in op-level caches come to it too."""
    model, x = stack(policy), torch.randn(2, 5, 4)
    expected = gradients(model, x)
    owned, seen = Storages(model.parameters()), Storages()

    def pack(tensor: Tensor) -> Tensor:
        seen.add(tensor, unless_in=owned)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients(model, x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert seen.nbytes == saved_bytes([model(x).pow(2).sum()], model.parameters()).total


def test_offloading_inside_a_users_own_hooks_is_right(everything: None) -> None:
    for policy in ("offload", {"mode": "full", "inputs": "offload"}):
        model, x = stack(policy), torch.randn(2, 5, 4)
        expected = gradients(stack("none"), x)
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            found = gradients(model, x)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_region_that_offloads_inside_one_that_recomputes_is_refused(everything: None) -> None:
    model = stack("none")
    waits = SaveRule(ops=(OpRule("offload", EVERYTHING),))
    regions = tuple(Region((f"blocks.{n}",), inner=(Region((f"blocks.{n}.mlp",), waits),)) for n in range(3))
    with pytest.raises(PlanError, match="offloads inside the region of"):
        apply_plan(model, Plan(regions=regions))
