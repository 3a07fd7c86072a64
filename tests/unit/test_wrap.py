"""Applying a plan: the same results, names, hooks and copies as without, and nothing paid where nothing is saved."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan, Region
from dist_ckpt.planning import apply
from dist_ckpt.wrap.apply import apply_plan, remove_plan
from dist_ckpt.wrap.module import own_class
from tests.unit.toys import Block, Stack

POLICIES: list[Any] = ["full", {"mode": "every_k", "k": 2}, "selective", "selective_attention"]
X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


def stack(policy: Any = "none", p: float = 0.5) -> Stack:
    torch.manual_seed(0)
    model = Stack(3, p=p)
    apply(model, policy)
    return model


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    model(x).square().sum().backward()
    return {n: p.grad.clone() for n, p in named_parameters(model) if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_a_policy(policy: Any) -> None:
    expected = gradients(stack())
    model = stack(policy)
    assert_equal(gradients(model), expected)
    assert_equal(gradients(model), expected)  # no state is left from the first step


@pytest.mark.parametrize("policy", POLICIES)
def test_names_keys_and_classes_are_those_without_a_policy(policy: Any) -> None:
    plain, model = stack(), stack(policy)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(b, Block) and type(b).__name__ == "Block" for b in model.blocks)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_are_independent_and_still_recompute(policy: Any) -> None:
    model = stack(policy)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    expected, bytes_kept = gradients(model), kept(model)
    for twin in copies:
        assert_equal(gradients(twin), expected)
        assert kept(twin) == bytes_kept < kept(stack())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(7.0)
    assert_equal(gradients(model), expected)


def kept(model: nn.Module) -> int:
    return saved_bytes([model(X).sum()], model.parameters()).total


class Slotted(nn.Module):
    """A block that can only be pickled its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.handle = lambda x: x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.handle(self.fc(x)).exp()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = lambda x: x.tanh()


def test_a_block_is_pickled_its_own_way() -> None:
    model = nn.Sequential(Slotted(), Slotted())
    apply(model, {"mode": "full", "blocks": "Slotted"})
    twin = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), model(x)) and isinstance(twin[0], Slotted)
    assert saved_bytes([twin(x).sum()], twin.parameters()).total == 2 * x.nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_paid_in_eval_or_without_gradients(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(policy, p=0.0)
    monkeypatch.setattr(torch, "get_rng_state", None)  # what a checkpoint would call first
    with torch.no_grad():
        model(X)
    model.eval()
    loss = model(X).sum()
    recomputing = count_flops(loss.backward)
    plain_loss = stack(p=0.0).eval()(X).sum()
    assert recomputing == count_flops(plain_loss.backward)


def test_a_block_keeps_its_signature_and_any_keyword_name() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor, *, scale: Tensor, debug: float = 1.0, preserve_rng_state: bool = True) -> Tensor:
            return self.inner(x) * scale * debug if preserve_rng_state else x

    torch.manual_seed(0)
    plain, x, scale = Takes(), torch.randn(2, 4), torch.ones(2, 4)
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("",)),)))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    for keywords in ({"scale": scale}, {"scale": scale, "debug": 3.0}, {"scale": scale, "preserve_rng_state": False}):
        assert torch.equal(model(x, **keywords), plain(x, **keywords))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_hooks_of_a_block_fire_once(policy: str) -> None:
    model, calls = stack(policy), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append("pre"))
        block.register_forward_hook(lambda *_: calls.append("post"))
        block.register_full_backward_hook(lambda *_: calls.append("backward"))
    model(X).sum().backward()
    assert sorted(calls) == ["backward"] * 3 + ["post"] * 3 + ["pre"] * 3


def test_a_region_may_be_the_root_a_shared_module_or_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x).tanh())

    torch.manual_seed(0)
    plain = Twice()
    shared, root = copy.deepcopy(plain), copy.deepcopy(plain)
    apply_plan(shared, Plan(regions=(Region(("first",)),)))
    apply_plan(root, Plan(regions=(Region(("",)),)))
    x = torch.randn(2, 3, 8)
    expected = gradients(plain, x)
    assert_equal(gradients(shared, x), expected)
    assert_equal(gradients(root, x), expected)
    assert saved_bytes([root(x).sum()], root.parameters()).total == x.nbytes


def test_nested_regions_recompute_in_turn() -> None:
    regions = tuple(Region((f"blocks.{i}",), inner=(Region((f"blocks.{i}.mlp",)),)) for i in range(3))
    model, flat = stack(), stack("full")
    expected = gradients(model)
    apply_plan(model, Plan(regions=regions))
    assert_equal(gradients(model), expected)
    assert kept(model) == kept(flat)


def test_removing_a_plan_leaves_the_plain_model() -> None:
    model = stack("selective")
    remove_plan(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stack().modules()]
    assert kept(model) == kept(stack())
    apply(model, "full")
    assert own_class(model.blocks[0]) is Block


def test_a_printed_model_shows_its_regions() -> None:
    assert "recomputed: save addmm" in repr(stack({"mode": "selective", "save": ["addmm"]}))
    assert "recomputed\n" in repr(stack("full")) and "recomputed" not in repr(stack())


def test_a_second_application_is_an_error() -> None:
    model = stack("full")
    for again in ("full", "none", "selective_attention"):
        with pytest.raises(PlanError, match=r"already applied to this model \(module '.+' recomputes\)"):
            apply(model, again)


def test_other_checkpointing_is_an_error() -> None:
    wrapped = stack()
    wrapped.blocks[1] = checkpoint_wrapper(wrapped.blocks[1])
    with pytest.raises(PlanError, match="a Block is already in a torch CheckpointWrapper"):
        apply(wrapped, "full")
    own = stack()
    own.blocks[0].gradient_checkpointing = True
    with pytest.raises(PlanError, match="its own gradient_checkpointing"):
        apply(own, "full")


def test_what_cannot_be_recomputed_is_an_error() -> None:
    patched = stack()
    patched.blocks[2].forward = patched.blocks[2].forward
    with pytest.raises(PlanError, match=r"'blocks.2' had its forward replaced"):
        apply(patched, "full")
    compiled = stack()
    compiled.blocks[0].compile()
    with pytest.raises(PlanError, match="already compiled"):
        apply(compiled, "full")
    with pytest.raises(PlanError, match="a ModuleList, which has no forward"):
        apply(stack(), {"mode": "full", "blocks": "blocks"})
    with pytest.raises(PlanError, match=r"names 'blocks.7'.*did you mean 'blocks"):
        apply_plan(stack(), Plan(regions=(Region(("blocks.7",)),)))
    with pytest.raises(PlanError, match="two regions"):
        apply_plan(stack(), Plan(regions=(Region(("blocks.0",)), Region(("blocks.0",)))))


def test_an_error_in_a_plan_leaves_the_model_as_it_was() -> None:
    model = stack()
    with pytest.raises(PlanError):
        apply_plan(model, Plan(regions=(Region(("blocks.0",)), Region(("nothing",)))))
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize("nested", [False, True])
def test_an_input_that_is_edited_after_its_region_is_an_error_inside_another_region_too(nested: bool) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().exp()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.inner = nn.Linear(4, 4), Inner()

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            out = self.inner(h)
            return out + h.add_(1.0).tanh()

    model = nn.Sequential(Outer())
    inner = Region(("0.inner",))
    apply_plan(model, Plan(regions=(Region(("0",), inner=(inner,)) if nested else inner,)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(2, 4)).sum().backward()
