"""Kept results stay right whatever happens to them: edits, further backwards, hooks, offload, dropout, Functions."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from dist_ckpt.compat.torch import frame_of
from dist_ckpt.cost import plan_cost
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule
from dist_ckpt.planning import apply
from dist_ckpt.wrap.apply import apply_plan
from tests.unit.toys import Block, Stack

WIDTH = 8
MATMULS = OpRule("save", "matmul")


def pair(block: nn.Module, *rules: OpRule) -> tuple[nn.Module, nn.Module]:
    """A model of one block that is a region with these rules, and the same model without."""
    plain = nn.Sequential(block)
    model = copy.deepcopy(plain)
    apply_plan(model, plan_of(*rules))
    return model, plain


def plan_of(*rules: OpRule) -> Plan:
    return Plan(regions=(Region(("0",), SaveRule(ops=rules or (MATMULS,))),))


def inputs(rows: int = 4, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: Tensor, around: AbstractContextManager[Any] | None = None) -> tuple[Tensor, list[Tensor]]:
    """A forward, and what is to be differentiated by."""
    torch.manual_seed(7)
    x = x.clone().requires_grad_()
    with around or nullcontext():
        loss = model(x).square().sum()
    return loss, [x, *(p for p in model.parameters())]


def gradients(model: nn.Module, x: Tensor, around: AbstractContextManager[Any] | None = None) -> list[Tensor]:
    loss, by = step(model, x, around)
    return list(torch.autograd.grad(loss, by, allow_unused=True, materialize_grads=True))


def step_flops(model: nn.Module, x: Tensor) -> int:
    def run() -> None:
        step(model, x)[0].backward()

    return count_flops(run)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def saved(model: nn.Module, x: Tensor, around: AbstractContextManager[Any] | None = None) -> SavedBytes:
    return saved_bytes([step(model, x, around)[0]], model.parameters())


class Edited(nn.Module):
    """A matrix product whose result is edited in place before it is used again."""

    def __init__(self, edit: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.edit = edit

    def forward(self, x: Tensor) -> Tensor:
        y = self.w(x)
        z = y.exp()  # of the value before the edit
        self.edit(y)
        return self.v(y.tanh() * z).exp()


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda y: y.add_(1.0),
    "relu": lambda y: F.relu(y, inplace=True),
    "twice": lambda y: y.add_(1.0).mul_(0.5),
    "view": lambda y: y.view(-1).mul_(0.5),
    "slice": lambda y: y[:, :4].mul_(0.5),
    "setitem": lambda y: y.__setitem__((slice(None), 0), 2.0),
    "list": lambda y: torch._foreach_mul_([torch.ones(1), y], 0.5),
    "out": lambda y: _without_grad(lambda: torch.mul(y, 0.5, out=y)),
    "no_grad": lambda y: _without_grad(lambda: y.detach().mul_(0.5)),
}


def _without_grad(run: Callable[[], Any]) -> None:
    with torch.no_grad():
        run()


@pytest.mark.parametrize("edit", EDITS)
def test_a_result_that_the_region_edits_is_copied_first(edit: str) -> None:
    model, plain = pair(Edited(EDITS[edit]))
    x = inputs()
    for _ in range(2):
        assert_equal(gradients(model, x), gradients(plain, x))
    assert step_flops(model, x) == step_flops(plain, x)  # nothing is recomputed that was to be kept
    assert saved(model, x).cached == 2 * x.nbytes


def test_an_edit_of_something_else_copies_nothing() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.w(x)
            torch.zeros_like(y).add_(y)
            return y.tanh().exp()

    model, _ = pair(Other())
    x = inputs()
    outputs: list[Tensor] = []
    model[0].w.register_forward_hook(lambda _, __, out: outputs.append(out))
    loss, _ = step(model, x)
    (kept,) = cache_of(loss)
    assert kept.data_ptr() == outputs[0].data_ptr()


def cache_of(loss: Tensor) -> list[Tensor]:
    """The tensors that the op-level cache of the only region in a graph holds."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_") and not isinstance(getattr(node, name), tuple):
                frame = frame_of(getattr(node, name))
                if frame is not None:
                    entries = [entry for calls in frame.caches[0].values() for entry in calls if entry is not None]
                    return [entry.out.val for entry in entries]
        pending += [following for following, _ in node.next_functions]
    raise AssertionError("no region with a cache")


class Returned(nn.Module):
    """A block that returns a kept result, which it also uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.w(x)
        return y, self.v(y.exp()).exp()


class Around(nn.Module):
    """Edits what its block returns, before or between forward and backward."""

    def __init__(self, edit: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block, self.edit = Returned(), edit

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.block(x)
        self.edit(y)
        return y.tanh() + z


@pytest.mark.parametrize(("action", "rows"), [("save", 4), ("offload", 4), ("offload", 4096)])
@pytest.mark.parametrize("edit", ["add", "view", "slice", "no_grad"])
def test_a_result_that_is_edited_after_the_region_is_recomputed(edit: str, action: Any, rows: int) -> None:
    plain = Around(EDITS[edit])
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("block",), SaveRule(ops=(OpRule(action, "matmul"),))),)))
    x = inputs(rows)
    assert_equal(gradients(model, x), gradients(plain, x))
    # A copy in host memory does not change with the original, so there is nothing to recompute.
    edited_products = 0 if rows == 4096 else 1
    assert step_flops(model, x) - step_flops(plain, x) == edited_products * 2 * rows * WIDTH * WIDTH


def test_an_edit_between_forward_and_backward_is_no_edit_of_what_is_kept() -> None:
    plain = Around(lambda y: None)
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("block",), SaveRule(ops=(MATMULS,))),)))
    x = inputs()
    expected = gradients(plain, x)
    outputs: list[Tensor] = []
    model.block.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    loss, by = step(model, x)
    with torch.no_grad():
        outputs[0].zero_()
    assert_equal(list(torch.autograd.grad(loss, by)), expected)


def test_further_backwards_are_right_and_cost_what_the_first_did() -> None:
    torch.manual_seed(0)
    model, plain = pair(Block(WIDTH, p=0.5))
    x = torch.randn(2, 5, WIDTH)
    costs, found = {}, {}
    for name, one in (("model", model), ("plain", plain)):
        loss, _ = step(one, x)
        costs[name], found[name] = [], []
        for retain in (True, True, False):
            one.zero_grad()
            costs[name].append(count_flops(lambda: loss.backward(retain_graph=retain)))  # noqa: B023
            found[name] += [p.grad.clone() for p in one.parameters()]
            if retain and one is model:  # what stays holds no graph of the recompute that it was given to
                assert all(tensor.grad_fn is None for tensor in cache_of(loss))
    assert_equal(found["model"], found["plain"])
    assert costs["model"] == costs["plain"]


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    model, plain = pair(Block(WIDTH, p=0.5))
    x = torch.randn(2, 5, WIDTH)

    def second_order(one: nn.Module) -> list[Tensor]:
        loss, by = step(one, x)
        first = torch.autograd.grad(loss, by, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), by))

    assert_equal(second_order(model), second_order(plain))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x).tanh().exp(), self.b(x).tanh().exp()


def test_backwards_of_two_outputs_one_by_one() -> None:
    """The first one frees its part of the graph, and with it what is kept; the second recomputes."""
    model, plain = pair(Branches())
    x = inputs()
    for one in (model, plain):
        for out in one(x):
            out.sum().backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_looking_at_a_saved_tensor_leaves_what_is_kept_for_backward() -> None:
    model, plain = pair(Branches())
    x = inputs()
    losses = [sum(out.sum() for out in one(x)) for one in (model, plain)]
    node = losses[0].grad_fn
    while not hasattr(node, "_saved_result"):
        node = node.next_functions[0][0]
    assert isinstance(node._saved_result, Tensor)
    assert count_flops(losses[0].backward) == count_flops(losses[1].backward)


def test_a_backward_frees_what_is_kept_as_it_goes() -> None:
    """When a backward comes to a region's first layer, all kept results are gone, as without a region."""
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.register_hook(lambda _: alive.append(sum(ref() is not None for ref in kept)))
            return self.second(x.sin()).sin().exp()

    for retain in (False, True):
        model, _ = pair(Two())
        loss, _ = step(model, inputs())
        kept[:] = [weakref.ref(tensor) for tensor in cache_of(loss)]
        assert len(kept) == 2
        loss.backward(retain_graph=retain)
    assert alive == [0, 2]


def test_a_backward_inside_a_forward_uses_up_nothing() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                loss = (x @ x.mT).tanh().sum()
                (grad,) = torch.autograd.grad(loss, x)
            ctx.save_for_backward(grad)
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return Inner.apply(self.w(x).tanh()) * x.exp()

    model, plain = pair(Loss())
    x = inputs()
    assert_equal(gradients(model, x), gradients(plain, x))
    assert step_flops(model, x) == step_flops(plain, x)


def _seen(sizes: list[int]) -> saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def test_kept_results_pass_through_the_hooks_around_their_region() -> None:
    """Offloading and accounting contexts get them, as everything that backward needs."""
    torch.manual_seed(0)
    model, plain = pair(Block(WIDTH, p=0.5))
    x = torch.randn(2, 5, WIDTH)
    expected, sizes = gradients(plain, x), list[int]()
    cost = saved(model, x)
    assert_equal(gradients(model, x, _seen(sizes)), expected)
    assert sum(sizes) * 4 >= cost.cached + cost.inputs
    through = saved(model, x, save_on_cpu())
    assert through.cached == cost.cached > 0
    loss, by = step(model, x, save_on_cpu())
    for retain in (True, False):
        assert_equal(list(torch.autograd.grad(loss, by, retain_graph=retain)), expected)


def test_an_outer_region_recomputes_what_an_inner_one_keeps() -> None:
    """So that it frees it; while the outer one runs its recompute, the inner one saves its matrix products."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(Block(WIDTH, p=0.5), Block(WIDTH, p=0.5)))
    x, costs = torch.randn(2, 5, WIDTH), []
    for rules in ((), (MATMULS,)):
        inner = tuple(Region((f"0.{i}",), SaveRule(ops=rules)) for i in range(2))
        plan = Plan(regions=(Region(("0",), inner=inner),))
        model = copy.deepcopy(plain)
        apply_plan(model, plan)
        assert_equal(gradients(model, x), gradients(plain, x))
        loss, by = step(model, x)
        for retain in (True, False):
            assert_equal(list(torch.autograd.grad(loss, by, retain_graph=retain)), gradients(plain, x))
        costs.append(plan_cost(plain, plan, x))
    without, with_rules = costs
    assert with_rules.cached_bytes == 0 and with_rules.saved_bytes == without.saved_bytes
    products = 2 * 10 * WIDTH * (3 * WIDTH + WIDTH + 2 * WIDTH + 2 * WIDTH) + 2 * 2 * 2 * 5 * 5 * WIDTH
    # The outer recompute ends at the second block's input, and runs that block too where it keeps results.
    assert (without.recomputed_flops, with_rules.recomputed_flops) == ((1 + 2) * products, (2 + 0) * products)


@pytest.mark.parametrize("rows", [4, 4096])
def test_offloaded_results_wait_in_host_memory_if_they_are_worth_it(rows: int) -> None:
    torch.manual_seed(0)
    model, plain = pair(Edited(lambda y: y), OpRule("offload", "matmul"))
    x = inputs(rows)
    cost = saved(model, x)
    assert cost.offloaded == (cost.cached if rows == 4096 else 0) and cost.cached == 2 * x.nbytes
    loss, by = step(model, x)
    expected = gradients(plain, x)
    for retain in (True, False):
        assert_equal(list(torch.autograd.grad(loss, by, retain_graph=retain)), expected)
    assert step_flops(model, x) == step_flops(plain, x)


class Drawing(nn.Module):
    """A kept draw, and one that is recomputed after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.5))
        return F.dropout(self.w(x * kept).tanh(), 0.5).exp()


def test_what_draws_after_a_kept_draw_draws_what_it_drew() -> None:
    model, plain = pair(Drawing(), OpRule("save", "aten.bernoulli"), MATMULS)
    x = inputs()
    expected = gradients(plain, x)
    for retain in (True, False):
        assert_equal(gradients(model, x), expected)
        loss, by = step(model, x)
        before = torch.get_rng_state()
        assert_equal(list(torch.autograd.grad(loss, by, retain_graph=retain)), expected)
        assert torch.equal(torch.get_rng_state(), before)


class Product(torch.autograd.Function):
    """Saves an intermediate result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        out = (x @ w).tanh_()
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, out = ctx.saved_tensors
        grad = grad * (1 - out * out)
        return grad @ w.mT, x.mT @ grad


class Attributes(torch.autograd.Function):
    """Keeps tensors as attributes, which no hook sees."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, ctx.w, ctx.out = *inputs, output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad = grad * (1 - ctx.out * ctx.out)
        return grad @ ctx.w.mT, ctx.x.mT @ grad


class Unseen(torch.autograd.Function):
    """Computes outside of torch's dispatcher, as a Triton kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.numpy() @ w.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


class Outside(Unseen):
    """The same, outside of the region."""


@torch.library.custom_op("dist_ckpt_tests::product", mutates_args=())
def registered(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


registered.register_autograd(Unseen.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Custom(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.v, self.w, self.product = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH)), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.v(x).tanh(), self.w).exp()


FUNCTIONS: list[tuple[Callable[[Tensor, Tensor], Tensor], tuple[OpRule, ...], int, tuple[str, ...]]] = [
    (Product.apply, (), 2, ()),
    (Attributes.apply, (), 2, ()),
    (Unseen.apply, (), 1, ("Unseen",)),
    (lambda x, w: registered(x, w), (), 1, ("GeneratedBackwardFor_dist_ckpt_tests_product_default",)),
    (lambda x, w: registered(x, w), (OpRule("save", "dist_ckpt_tests.product"), MATMULS), 2, ()),
]


@pytest.mark.parametrize(
    ("product", "rules", "kept", "unseen"), FUNCTIONS, ids=["saved", "attributes", "numpy", "library", "library_named"]
)
def test_custom_functions_are_right_and_those_that_no_rule_sees_into_are_reported(
    product: Callable[[Tensor, Tensor], Tensor], rules: tuple[OpRule, ...], kept: int, unseen: tuple[str, ...]
) -> None:
    plain = nn.Sequential(Custom(product), Custom(Outside.apply))
    model = copy.deepcopy(plain)
    apply_plan(model, plan_of(*rules))
    x = inputs()
    for _ in range(2):
        assert_equal(gradients(model, x), gradients(plain, x))
    found = saved(model, x)
    assert found.unseen == unseen and found.cached == kept * x.nbytes
    assert saved(plain, x).unseen == ()


def test_a_plans_cost_names_functions_that_no_rule_sees_into() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x * w.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad.sum() * torch.ones(WIDTH, WIDTH)

    plain = nn.Sequential(Custom(Scaled.apply))
    cost = plan_cost(plain, plan_of(MATMULS), inputs())
    assert cost.unseen == ("Scaled",) and "recomputes Scaled, into which no op rule sees" in str(cost)


def test_nothing_is_held_after_backward() -> None:
    model = Stack(2)
    apply_plan(model, Plan(regions=(Region(("blocks.0",), SaveRule(ops=(MATMULS,))),)))
    loss = model(torch.randn(2, 5, 4)).sum()
    kept = [weakref.ref(tensor) for tensor in cache_of(loss)]
    assert kept
    loss.backward()
    assert all(ref() is None for ref in kept)


class Nested(nn.Module):
    """An outer block that edits what its inner one returns."""

    def __init__(self, edit: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.edit = Around(edit), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.tanh()).exp()


@pytest.mark.parametrize("hooks", [lambda: _seen([]), save_on_cpu], ids=["identity", "save_on_cpu"])
def test_edits_after_the_region_are_noticed_whatever_hooks_have_the_result(hooks: Callable[[], Any]) -> None:
    """Hooks may hand the very tensor through, and autograd does not watch what they were given."""
    plain = Around(EDITS["add"])
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("block",), SaveRule(ops=(MATMULS,))),)))
    x = inputs()
    loss, by = step(model, x, hooks())
    for retain in (True, False):
        found = torch.autograd.grad(loss, by, retain_graph=retain)
        assert_equal(list(found), gradients(plain, x))


def test_edits_between_an_inner_and_an_outer_region_are_noticed() -> None:
    plain = nn.Sequential(Nested(EDITS["add"]))
    inner = Region(("0.inner.block",), SaveRule(ops=(MATMULS,)))
    model = copy.deepcopy(plain)
    apply_plan(model, Plan(regions=(Region(("0",), inner=(inner,)),), policy={"mode": "nested"}))
    x = inputs()
    assert_equal(gradients(model, x), gradients(plain, x))


class Stepping(nn.Module):
    """A block that takes a gradient step of its own: its forward runs a backward, and so a recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        (step,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + step


@pytest.mark.parametrize(
    "options", [{}, {"every_nth_matmul": 3}, {"recompute_matmuls_of": ["b"]}, {"offload": ["matmul"]}], ids=str
)
def test_a_recompute_inside_the_forward_is_no_part_of_it(options: dict[str, Any]) -> None:
    plain, x = nn.Sequential(*(Stepping() for _ in range(3))), torch.randn(8, 8)
    model = copy.deepcopy(plain)
    apply(model, {"mode": "selective", "blocks": "Stepping", **options})
    assert_equal(gradients(model, x), gradients(plain, x))


def test_an_offloaded_result_may_be_edited_in_place() -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            y.relu_()
            return x + self.norm(y)

    plain, x = nn.Sequential(Edits(), Edits()), torch.randn(8, 64, 64)
    model = copy.deepcopy(plain)
    apply(model, {"mode": "selective", "blocks": "Edits", "offload": ["matmul"]})
    assert saved(model, x).offloaded > 0, "or the results are too small to be tried"
    assert_equal(gradients(model, x), gradients(plain, x))
