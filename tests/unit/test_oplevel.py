"""Op rules: which calls of a region's forward they mean, in eager and in compiled code."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule
from dist_ckpt.planning import apply
from dist_ckpt.wrap.apply import apply_plan
from dist_ckpt.wrap.oplevel import eager_contexts
from tests.unit.toys import Residual, Stack

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
TOKENS = 2 * 5 * 4
"""Bytes of one fp32 feature of a batch of ``X``."""
QKV, SCORES, MIXED, OUT, UP, DOWN = 24 * TOKENS, 5 * TOKENS, 8 * TOKENS, 8 * TOKENS, 16 * TOKENS, 8 * TOKENS
"""Bytes of the matrix products of a toy ``Block``, in their order. The last is needed only by dropout after it."""


def with_rules(*rules: OpRule, model: nn.Module | None = None, names: tuple[str, ...] = ("blocks.0",)) -> nn.Module:
    """A model of three blocks, or the given one, whose regions have these rules."""
    torch.manual_seed(0)
    model = Stack(3, p=0.5) if model is None else model
    apply_plan(model, Plan(regions=tuple(Region((name,), SaveRule(ops=rules)) for name in names)))
    return model


def cached(model: nn.Module, x: Tensor = X) -> int:
    return saved_bytes([model(x).sum()], model.parameters()).cached


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{n: p.grad.clone() for n, p in named_parameters(model) if p.grad is not None}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


ALL = QKV + SCORES + MIXED + OUT + UP + DOWN
MEANT: list[tuple[tuple[OpRule, ...], int]] = [
    ((OpRule("save", "matmul"),), ALL),
    ((OpRule("recompute", "bmm"), OpRule("save", "matmul")), ALL - SCORES - MIXED),
    ((OpRule("save", "matmul", within="attention"),), QKV + SCORES + MIXED + OUT),
    ((OpRule("save", "matmul", within="attention.*"),), QKV + OUT),
    ((OpRule("save", "matmul", within="mlp"),), UP + DOWN),
    ((OpRule("save", "matmul", within="**.qkv"),), QKV),
    ((OpRule("save", "matmul", within="**"),), ALL),
    ((OpRule("save", "matmul", calls=(4, 1)),), SCORES + UP),
    ((OpRule("save", "matmul", within="attention", calls=(3,)),), OUT),
    ((OpRule("save", "matmul", every=2),), QKV + MIXED + UP),
    ((OpRule("save", "matmul", every=4),), QKV + UP),  # six products: a count that ran on would shift
    # What an earlier rule takes is not counted by a later one.
    ((OpRule("recompute", "matmul", within="**.qkv"), OpRule("save", "matmul", every=2)), SCORES + OUT + DOWN),
    ((OpRule("save", "matmul", calls=(0,)), OpRule("save", "matmul", calls=(0,))), QKV + SCORES),
    # What a rule with calls does not mean, the next one may.
    ((OpRule("recompute", "matmul", every=2), OpRule("save", "matmul")), SCORES + OUT + DOWN),
]


@pytest.mark.parametrize(("rules", "kept"), MEANT, ids=[", ".join(map(str, rules)) for rules, _ in MEANT])
def test_rules_keep_what_they_mean_in_every_block_and_forward(rules: tuple[OpRule, ...], kept: int) -> None:
    model, plain = with_rules(*rules, names=("blocks.0", "blocks.2")), Stack(3, p=0.5)
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain)
    for _ in range(2):
        assert cached(model) == 2 * kept
        assert_equal(gradients(model), expected)


COMPILED = [MEANT[3], MEANT[7], MEANT[11]]


@pytest.mark.parametrize(("rules", "kept"), COMPILED, ids=[", ".join(map(str, rules)) for rules, _ in COMPILED])
def test_rules_mean_the_same_in_compiled_blocks(rules: tuple[OpRule, ...], kept: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = with_rules(*rules, model=Stack(1))
    plain = Stack(1)
    plain.load_state_dict(model.state_dict())
    kept_bytes: list[int] = []
    model.blocks[0].compile(backend=_noting(kept_bytes), fullgraph=True)
    assert_equal(gradients(model), gradients(plain))
    assert sum(kept_bytes) == kept


def test_blocks_with_equal_rules_share_compiled_code() -> None:
    """The compiler goes on uncompiled after eight variants of one function."""
    torch._dynamo.reset()
    blocks, kept_bytes = 10, list[int]()
    model = with_rules(
        OpRule("recompute", "matmul", within="mlp"),
        OpRule("save", "matmul"),
        model=Stack(blocks),
        names=tuple(f"blocks.{i}" for i in range(blocks)),
    )
    backend = _noting(kept_bytes)
    for block in model.blocks:
        block.compile(backend=backend)
    gradients(model)
    assert kept_bytes == [QKV, SCORES, MIXED, OUT]


def _noting(kept_bytes: list[int]) -> Callable[..., Any]:
    """A compiler that notes the bytes of results which must be saved, as the partitioner is told."""

    def partition(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE and isinstance(node.meta["val"], Tensor):
                kept_bytes.append(node.meta["val"].nbytes)
        return min_cut_rematerialization_partition(graph, inputs, **kwargs)

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (OpRule("save", "convolution"), r"matched no call in the forward of a compiled block: convolution"),
        (
            OpRule("save", "matmul", within="mpl"),
            r"matmul within mpl \(no such module; there are attention, attention.out",
        ),
        (OpRule("offload", "matmul"), "a Block offloads what it saves"),
    ],
)
def test_compiled_blocks_stop_at_a_rule_that_cannot_be_kept(rule: OpRule, message: str) -> None:
    torch._dynamo.reset()
    model = with_rules(rule, model=Stack(1))
    model.blocks[0].compile(backend="eager" if rule.action == "offload" else "aot_eager")
    with pytest.raises(Exception, match=message):
        model(X)


def test_copies_count_only_where_they_go_to_the_host() -> None:
    """A cast for autocast is none, in eager and in compiled code."""
    for compiles in (False, True):
        torch._dynamo.reset()
        casting = with_rules(OpRule("save", "d2h"), model=Stack(1))
        if compiles:
            casting.blocks[0].compile(backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match=r"matched no call.*: d2h"):
            casting(X)


MISSES: list[tuple[tuple[OpRule, ...], str]] = [
    ((OpRule("save", "attention"),), r"forward of blocks.0: attention\. Operations that did run there:.*aten\.addmm"),
    ((OpRule("save", "matmul", calls=(0, 9)),), r"matmul calls 0, 9 \(it ran 6 times, counted from 0\)"),
    ((OpRule("save", "matmul", within="norm"),), "matmul within norm .it ran in other modules"),
    ((OpRule("save", "matmul", within="mpl"),), r"no such module; there are attention, attention.out, .*, norm\)"),
    ((OpRule("save", "matmul"), OpRule("save", "addmm")), "addmm .a rule before it takes these calls"),
    ((OpRule("save", "mm"), OpRule("save", "addmm"), OpRule("save", "topk")), "blocks.0: mm; topk. "),
    ((OpRule("save", "topk", required=False), OpRule("save", "mm", required=False)), "blocks.0: topk; mm. "),
]


@pytest.mark.parametrize(("rules", "message"), MISSES, ids=[", ".join(map(str, rules)) for rules, _ in MISSES])
def test_a_rule_that_matches_no_call_stops_the_first_forward(rules: tuple[OpRule, ...], message: str) -> None:
    model = with_rules(*rules)
    with pytest.raises(PlanError, match=f"matched no call.*{message}"):
        model(X)


def test_a_later_forward_may_take_another_way() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.skips = nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() if self.skips else self.fc(x).tanh()

    model = with_rules(OpRule("save", "matmul"), model=nn.Sequential(Skips()), names=("0",))
    x = torch.randn(2, 8, requires_grad=True)
    model(x).sum().backward()
    model[0].skips = True
    model(x).sum().backward()


def test_convolutions_are_kept_by_default() -> None:
    model = nn.Sequential(Residual(4), Residual(4))
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    plain = count_flops(lambda: model(x).sum().backward())
    apply(model, "selective")
    assert count_flops(lambda: model(x).sum().backward()) == plain


class Winding(nn.Module):
    """A block whose submodules are shared, called twice, called past ``__call__``, or raise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.again = self.first
        self.inner = Residue()
        self.free = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x).tanh())
        try:
            self.inner(x, fails=True)
        except ArithmeticError:
            x = (x @ self.free).tanh()
        x = self.inner(x) + self.inner.forward(x)
        return self.inner.help(x).tanh()


class Residue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.fc(x).tanh()
        if fails:
            raise ArithmeticError
        return x @ x.mT @ x

    def help(self, x: Tensor) -> Tensor:
        return x @ x.mT @ x


@pytest.mark.parametrize(
    ("within", "calls"),
    [
        ("*", 12),
        ("first", 2),
        ("again.0", 2),  # a shared module has both of its names
        ("inner", 5),  # twice by a call, of which one raised; past it only its own ``fc``
        ("inner.fc", 3),
        ("?irst*", 2),
    ],
)
def test_calls_belong_to_the_innermost_module_that_is_called(within: str, calls: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Winding())
    model = with_rules(OpRule("save", "matmul", within=within), model=copy.deepcopy(plain), names=("0",))
    x = torch.randn(2, 4, 8)
    assert_equal(gradients(model, x), gradients(plain, x))
    with pytest.raises(PlanError, match=rf"it ran {calls} times"):
        with_rules(OpRule("save", "matmul", within=within, calls=(99,)), model=copy.deepcopy(plain), names=("0",))(x)


def test_what_a_submodules_hook_computes_belongs_to_it() -> None:
    model = Stack(1)
    weight = torch.randn(8, 8, requires_grad=True)
    model.blocks[0].attention.register_forward_hook(lambda _, args, out: out + (args[0] @ weight).tanh())
    with_rules(OpRule("save", "matmul", within="attention", calls=(4,)), model=model)
    assert cached(model) == 8 * TOKENS


def test_modules_are_looked_up_in_each_forward() -> None:
    """An adapter that is put in after the plan was applied is found where it lies now."""
    model = with_rules(OpRule("save", "matmul", within="mlp.0"))
    assert cached(model) == UP
    model.blocks[0].mlp[0] = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 16))
    assert cached(model) == 2 * TOKENS + UP


def test_rules_survive_copies_and_wrapped_submodules() -> None:
    model = with_rules(OpRule("save", "matmul", within="attention.*"))
    twin = copy.deepcopy(model)
    assert cached(twin) == cached(model) == QKV + OUT
    twin.blocks[0].attention = _Wrapper(twin.blocks[0].attention)
    assert cached(twin) == QKV + OUT
    assert "_dist_ckpt_op_rules" not in copy.deepcopy(model).blocks[0].__dict__


class _Wrapper(nn.Module):
    """As ``torch.compile`` and FSDP1 put one around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any) -> Any:
        return self._orig_mod(*args)


def test_forwards_in_several_threads_count_each_for_themselves() -> None:
    model = with_rules(OpRule("save", "matmul", every=2))
    kept: list[int] = []
    turns = threading.Barrier(2)
    model.blocks[0].norm.register_forward_hook(lambda *_: (turns.wait(timeout=60), None)[1])
    threads = [threading.Thread(target=lambda: kept.append(cached(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == [QKV + MIXED + UP] * 2


class Flex(nn.Module):
    """Attention by a higher-order operator, which has no backward on the CPU: everything before it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.detach().unsqueeze(1)
        return self.out(flex_attention(heads, heads, heads).squeeze(1)).tanh()


class _Counting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.higher_order.flex_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("rule", "calls"), [(OpRule("save", "attention"), 1), (OpRule("save", "matmul"), 2)])
def test_flex_attention_is_an_operation_like_any_other(rule: OpRule, calls: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Flex())
    model = with_rules(rule, model=copy.deepcopy(plain), names=("0",))
    x = torch.randn(2, 16, 8)
    plain(x).sum().backward()
    with _Counting() as counting:
        model(x).sum().backward()
    assert counting.calls == calls
    assert torch.equal(model[0].out.weight.grad, plain[0].out.weight.grad)


class Routed(nn.Module):
    """An expert a token, by top-k."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8, 8))
        self.sign = 1.0

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = F.softmax(self.router(x) * self.sign, dim=-1).topk(2)
        return torch.einsum("bskio,bsi,bsk->bso", self.experts[chosen], x, scores).tanh()


@pytest.mark.parametrize(
    ("policy", "holds"), [({"mode": "selective", "save": ["topk"]}, True), ({"mode": "full"}, False)]
)
def test_a_kept_routing_decision_does_not_flip(policy: dict[str, Any], holds: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Routed(), Routed())
    model = copy.deepcopy(plain)
    apply(model, policy | {"blocks": "Routed"})
    x = torch.randn(2, 3, 8)
    expected = gradients(plain, x)["1.experts"]
    loss = model(x).square().sum()
    model[1].sign = -1.0  # the recompute would choose other experts
    loss.backward()
    assert torch.equal(model[1].experts.grad, expected) is holds


def test_default_rules_must_find_something_to_keep() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Tanh()) for _ in range(2)))
    apply(model, "selective")
    with pytest.raises(PlanError, match="matched no call"):
        model(X)


def test_rules_are_plain_data() -> None:
    rules = (
        OpRule("recompute", "matmul", within="mlp.*"),
        OpRule("offload", "aten.mm", calls=(0, 3), required=False),
        OpRule("save", "matmul", within="**", every=2),
    )
    plan = Plan(blocks=("a.0",), regions=(Region(("a.0",), SaveRule(ops=rules)),))
    assert Plan.from_json(plan.to_json()) == plan
    shown = "recompute matmul within mlp.*, offload aten.mm calls 0, 3 if present, save matmul every 2 within **"
    assert f"[{shown}]" in str(plan)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"within": ""}, "within is empty"),
        ({"calls": (-1,)}, "counted from 0"),
        ({"calls": (True,)}, "counted from 0"),
        ({"every": 0}, "at least 1"),
        ({"every": 2, "calls": (1,)}, "excludes calls"),
        ({"action": "keep"}, "no action 'keep'"),
    ],
)
def test_mistakes_in_a_rule_say_which(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"op rule for 'mm': .*{message}"):
        OpRule(**({"action": "save", "op": "mm"} | mistake))


def test_a_function_has_no_modules_for_a_rule_to_name() -> None:
    with pytest.raises(PlanError, match="a function has no modules for `within`"):
        eager_contexts(Region(("f",), SaveRule(ops=(OpRule("save", "mm", within="x"),))))
