"""Segments and nested regions: exact gradients, bytes and FLOPs, whatever a model's loop does between its blocks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import apply, apply_plan, make_plan, plan_cost, remove_plan
from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.toys import Block, Stack

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
WIDTH = 8
INPUT_BYTES = 2 * 5 * WIDTH * 4

Loop = Callable[[nn.Module, Tensor], Tensor]


class Looped(Stack):
    """A stack whose loop over its blocks is given."""

    def __init__(self, loop: Loop, depth: int = 6, p: float = 0.2) -> None:
        super().__init__(depth, WIDTH, p)
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.loop(self, self.embed(x)))


def step(model: nn.Module, batch: Any = X, backwards: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(7)
    loss = model(batch).square().sum()
    for remaining in reversed(range(backwards)):
        loss.backward(retain_graph=remaining > 0)
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, policy: Any, **options: Any) -> Plan:
    expected = step(copy.deepcopy(model), **options)
    with_policy = copy.deepcopy(model)
    plan = apply(with_policy, policy)
    found = step(with_policy, **options)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert with_policy.state_dict().keys() == model.state_dict().keys()
    return plan


def plain(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def collects_hidden_states(model: nn.Module, x: Tensor) -> Tensor:
    states = [x]
    for block in model.blocks:
        states.append(block(states[-1]))
    return torch.stack(states).sum(0)


def computes_in_between(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = torch.tanh(block(x) * 1.5)
    return x


def edits_in_between(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
        x += 0.1
    return x


def draws_in_between(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        torch.rand(3)  # the blocks' dropout must not depend on who else drew
        x = block(x)
    return x


def skips_the_first(model: nn.Module, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        x = block(x) if index not in (0, 3) else x
    return x


def runs_twice(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model, plain(model, x))


def runs_each_block_twice(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(block(x))
    return x


def runs_two_streams(model: nn.Module, x: Tensor) -> Tensor:
    y = x + 1
    for block in model.blocks:
        x, y = block(x), block(y)
    return x + y


def runs_backwards(model: nn.Module, x: Tensor) -> Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def stops_early(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks[:4]:
        x = block(x)
    return x


def detaches(model: nn.Module, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        x = block(x.detach() if index == 4 else x)
    return x


LOOPS: list[Loop] = [
    plain,
    collects_hidden_states,
    computes_in_between,
    edits_in_between,
    draws_in_between,
    skips_the_first,
    runs_twice,
    runs_each_block_twice,
    runs_two_streams,
    runs_backwards,
    stops_early,
    detaches,
]


@pytest.mark.filterwarnings("ignore:.*is not given what")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_any_loop_keeps_its_gradients(loop: Loop) -> None:
    model = Looped(loop)
    assert_same(model, {"mode": "segments", "k": 3})
    assert_same(model, {"mode": "nested", "k": 3, "inner": ["block", "attention"]})


@pytest.mark.parametrize("loop", [plain, draws_in_between, runs_two_streams], ids=lambda loop: loop.__name__)
def test_only_the_inputs_of_segments_are_kept(loop: Loop) -> None:
    streams = 2 if loop is runs_two_streams else 1
    kept = {}
    for k in (1, 2, 3, 6):
        model = Looped(loop)
        apply(model, {"mode": "segments", "k": k})
        saved = saved_bytes([loop(model, torch.randn(2, 5, WIDTH, requires_grad=True))], model.parameters())
        kept[k] = saved.total
        assert saved.total == saved.inputs
    assert kept == {k: 6 // k * streams * INPUT_BYTES for k in (1, 2, 3, 6)}


def test_skip_last_keeps_the_last_segment_and_its_flops() -> None:
    model = Looped(plain, depth=7, p=0.0)
    batch = torch.randn(2, 5, 4)
    none, all_of_it, but_last = (
        plan_cost(model, make_plan(model, policy), batch)
        for policy in (
            "none",
            {"mode": "segments", "k": 3},
            {"mode": "segments", "k": 3, "skip_last": True},
        )
    )
    one = Looped(plain, depth=1, p=0.0)
    block = plan_cost(one, make_plan(one, "none"), batch).saved_bytes
    rest = plan_cost(Looped(plain, depth=0), Plan(), batch).saved_bytes
    assert all_of_it.saved_bytes == rest + 3 * INPUT_BYTES - INPUT_BYTES * 0
    assert but_last.saved_bytes - all_of_it.saved_bytes == (block - rest) - INPUT_BYTES
    assert 0 < but_last.recomputed_flops < all_of_it.recomputed_flops < none.baseline_flops


def test_the_blocks_extra_arguments_are_kept_once_and_may_differ() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor, *, table: dict[str, Any]) -> Tensor:
            return super().forward(x * mask) * table["scale"][0]

    def loop(model: nn.Module, x: Tensor) -> Tensor:
        masks = [torch.ones(5, 1), torch.linspace(0, 1, 5)[:, None]]
        table = {"scale": (torch.tensor(1.5), "x"), "none": None}
        for index, block in enumerate(model.blocks):
            x = block(x, masks[index % 2], table=table)
        return x

    model = Looped(loop)
    model.blocks = nn.ModuleList(Masked(WIDTH, 0.1) for _ in range(6))
    assert_same(model, {"mode": "segments", "k": 3})
    apply(model, {"mode": "segments", "k": 3})
    saved = saved_bytes([loop(model, torch.randn(2, 5, WIDTH, requires_grad=True))], model.parameters())
    assert saved.total == 2 * INPUT_BYTES + 2 * 5 * 4 + 4


class Passed(torch.autograd.Function):
    """What sharding hooks put between a block and its caller: another tensor, the same memory (ZeRO-3's do so)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def hooked(model: nn.Module, edit: bool = False) -> None:
    """Nobody holds the tensor that a block returns, only its alias."""

    def alias(block: nn.Module, args: Any, out: Tensor) -> Tensor:
        passed: Tensor = Passed.apply(out.clone() if edit else out)
        return passed.mul_(1.5) if edit else passed

    for block in model.blocks:
        block.register_forward_hook(alias)


@pytest.mark.parametrize("edit", [False, True])
def test_an_alias_in_an_outputs_place_is_that_output(edit: bool) -> None:
    """Unless it holds something else."""
    model = Looped(plain)
    hooked(model, edit)
    with pytest.warns(UserWarning, match="not given what") if edit else contextlib.nullcontext():
        assert_same(model, {"mode": "segments", "k": 3})
    kept = copy.deepcopy(model)
    apply(kept, {"mode": "segments", "k": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = kept(X).square().sum()
    whole = saved_bytes([loss], [*kept.parameters(), X])
    assert whole.inputs == (6 if edit else 2) * INPUT_BYTES


def test_what_stands_between_blocks_is_said() -> None:
    model = Looped(computes_in_between)
    apply(model, {"mode": "segments", "k": 3})
    with pytest.warns(UserWarning, match=r"blocks\.1 is not given what blocks\.0 returned"):
        model(X)


def test_outputs_and_arguments_of_any_kind() -> None:
    class Tupled(Block):
        def forward(self, state: dict[str, Tensor | int], log: list[str]) -> tuple[dict[str, Any], None]:  # type: ignore[override]
            log.append("ran")
            assert len(log) == state["count"], "the recompute gets the list as the forward did"
            return {"x": super().forward(state["x"]), "count": state["count"] + 1}, None  # type: ignore[arg-type]

    logs: list[list[str]] = []

    def loop(model: nn.Module, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "count": 1}
        logs.append([])
        for block in model.blocks:
            state, _ = block(state, logs[-1])
        return state["x"]

    model = Looped(loop)
    model.blocks = nn.ModuleList(Tupled(WIDTH, 0.1) for _ in range(6))
    assert_same(model, {"mode": "segments", "k": 3})
    assert all(log == ["ran"] * 6 for log in logs), "a recompute leaves the caller's list alone"


@pytest.mark.parametrize("policy", [{"mode": "segments", "k": 2}, {"mode": "nested", "k": 2}, "full"], ids=str)
def test_a_frame_lives_as_long_as_its_graph(policy: Any) -> None:
    def hidden(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
            kept.append(weakref.ref(x.untyped_storage()))
            x = x + 0
        return x

    kept: list[weakref.ref[Any]] = []
    model = Looped(hidden, p=0.0)
    apply(model, policy)
    gc.collect()
    gc.disable()
    try:
        with pytest.warns(UserWarning) if policy != "full" else _nothing():
            loss = model(X).sum()
        del loss
        assert not any(ref() for ref in kept), "a cycle keeps a graph that nobody runs backward through"
    finally:
        gc.enable()


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_copies_and_pickles_are_segments_of_their_own() -> None:
    model = Looped(plain)
    expected = step(copy.deepcopy(model))
    apply(model, {"mode": "nested", "k": 3})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.blocks[1], Block)
        found = step(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        saved = saved_bytes([plain(other, torch.randn(2, 5, WIDTH, requires_grad=True))], other.parameters())
        assert saved.total == 2 * INPUT_BYTES
    assert all(p.grad is None for p in model.parameters())
    remove_plan(model)
    assert type(model.blocks[1]) is Block and not [k for k in model.blocks[1].__dict__ if "dist_ckpt" in k]


def test_hooks_fire_once_and_a_block_alone_runs_alone() -> None:
    model = Looped(plain)
    fired: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: fired.append(index))
    apply(model, {"mode": "segments", "k": 3})
    step(model)
    assert fired == [0, 1, 2, 3, 4, 5]
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    reference = copy.deepcopy(model)
    remove_plan(reference)
    torch.manual_seed(0)
    out = model.blocks[4](x)
    out.sum().backward()
    torch.manual_seed(0)
    assert torch.equal(reference.blocks[4](x), out)


def test_two_backwards_and_a_forward_that_failed() -> None:
    assert_same(Looped(plain), {"mode": "segments", "k": 3}, backwards=2)

    def fails_once(model: nn.Module, x: Tensor) -> Tensor:
        for index, block in enumerate(model.blocks):
            if index == 2 and not model.failed:
                model.failed = True
                raise FloatingPointError
            x = block(x)
        return x

    model = Looped(fails_once)
    model.failed = True
    expected = step(copy.deepcopy(model))
    apply(model, {"mode": "segments", "k": 3})
    model.failed = False
    with pytest.raises(FloatingPointError):
        model(X)
    found = step(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_argument_that_is_edited_before_backward_is_an_error() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * scale)

    scale = torch.ones(WIDTH)

    def loop(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x, scale=scale)
        return x

    for policy in ("full", {"mode": "segments", "k": 3}):
        model = Looped(loop)
        model.blocks = nn.ModuleList(Scaled(WIDTH) for _ in range(6))
        apply(model, policy)
        loss = model(X).sum()
        scale.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_threads_do_not_disturb_each_other() -> None:
    model = Looped(plain, p=0.0)
    apply(model, {"mode": "nested", "k": 3})
    alone = [torch.autograd.grad(model(x).sum(), model.parameters()) for x in (X, X + 1)]
    found: dict[int, Any] = {}

    def train(number: int) -> None:
        for _ in range(10):
            found[number] = torch.autograd.grad(model(X + number).sum(), model.parameters())

    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for number in (0, 1) for a, b in zip(found[number], alone[number], strict=True))


def test_sparse_arguments_pass() -> None:
    class Weighted(Block):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.stack([torch.sparse.mm(adjacency, row) for row in x]))

    def loop(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x, torch.eye(5).to_sparse())
        return x

    model = Looped(loop)
    model.blocks = nn.ModuleList(Weighted(WIDTH) for _ in range(4))
    for policy in ("full", {"mode": "segments", "k": 2}):
        assert_same(model, policy)


def test_nothing_is_paid_in_eval_and_without_gradients() -> None:
    model = Looped(plain)
    apply(model, {"mode": "nested", "k": 3})
    reference = copy.deepcopy(model)
    remove_plan(reference)
    for mode in (lambda m: m.eval(), lambda m: m.train().requires_grad_(False)):
        mode(model), mode(reference)
        assert count_flops(lambda: model(X)) == count_flops(lambda: reference(X))
        assert saved_bytes([model(X)], []) == saved_bytes([reference(X)], [])
    model.eval().requires_grad_(True)
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_and_options_are_those_of_the_forward() -> None:
    class Mixed(Looped):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model = Mixed(plain)
    assert_same(model, {"mode": "segments", "k": 3})
    assert_same(Looped(plain, p=0.0), {"mode": "segments", "k": 3, "preserve_rng_state": False})
    assert_same(model, {"mode": "segments", "k": 3, "early_stop": False, "determinism_check": "none"})


def test_a_recompute_may_run_to_its_end() -> None:
    model, ids = Transformer(CONFIG), torch.zeros(2, 16, dtype=torch.int64)
    early, whole = (
        plan_cost(model, make_plan(model, {"mode": "segments", "k": 3, "early_stop": stop}), (ids, ids))
        for stop in (True, False)
    )
    assert whole.recomputed_flops - early.recomputed_flops == 2 * (2 * 32 * 32 * 48), "the last product of 2 segments"
    assert whole.saved_bytes == early.saved_bytes


@pytest.mark.parametrize("policy", ["full", {"mode": "segments", "k": 3}], ids=str)
def test_what_draws_must_be_replayed(policy: Any) -> None:
    options = {"mode": policy} if isinstance(policy, str) else policy
    model = Looped(plain)
    apply(model, {**options, "preserve_rng_state": False})
    with pytest.raises(PlanError, match=r"blocks\.0.* draws random numbers \(dropout\?\)"):
        model(X)


CONFIG = ModelConfig(n_layers=6, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16, vocab_size=64)


@pytest.mark.parametrize("inner", ["block", ("block", "attention"), ("attention", "mlp")], ids=str)
def test_each_level_recomputes_what_lies_below_once_more(inner: Any) -> None:
    """FLOPs of the matrix products. A level ends at the last tensor that it must restore, so the outer one does not
    run the last region inside it: that region does so itself."""
    model = Transformer(CONFIG)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    plan = make_plan(model, {"mode": "nested", "k": 3, "inner": inner})
    assert max(region.depth for region in plan.regions) == (3 if inner == ("block", "attention") else 2)
    cost = plan_cost(model, plan, (ids, ids))
    segments = plan_cost(model, make_plan(model, {"mode": "segments", "k": 3}), (ids, ids))
    assert cost.saved_bytes == segments.saved_bytes

    tokens, d, ff, kv, blocks = 32, 32, 48, 16, 6
    out, last = 2 * tokens * d * d, 2 * tokens * d * ff  # the last products of attention and of the MLP
    attention = 2 * tokens * d * (2 * d + 2 * kv) + 2 * 2 * 2 * 16 * 16 * d
    mlp = 3 * 2 * tokens * d * ff
    by_level = {
        "block": [4 * (attention + mlp), blocks * (attention + mlp - last)],
        ("block", "attention"): [
            4 * (attention + mlp),
            blocks * (attention + mlp - last),
            blocks * (attention - out),
        ],
        ("attention", "mlp"): [6 * attention + 4 * mlp, blocks * (attention - out), blocks * (mlp - last)],
    }
    assert segments.recomputed_flops == blocks * (attention + mlp) - 2 * last
    assert cost.recomputed_flops == sum(by_level[inner])


def test_what_nested_refuses() -> None:
    model = Transformer(CONFIG)
    with pytest.raises(PlanError, match="more than 3 are refused"):
        make_plan(model, {"mode": "nested", "k": 3, "inner": ["block", "attention", "attention.wq"]})
    with pytest.raises(PlanError, match=r"ckpt\.inner is empty"):
        make_plan(model, {"mode": "nested", "inner": []})
    with pytest.raises(PlanError, match="no chunk found"):
        make_plan(model, {"mode": "nested", "inner": "chunk"})
    for save in (SaveRule("offload"), SaveRule(ops=(OpRule("offload", "*"),))):
        inner = Region(("layers.0",), save)
        with pytest.raises(PlanError, match=r"layers\.0 offloads inside the region of layers\.0 \+ layers\.1"):
            apply_plan(model, Plan(regions=(Region(("layers.0", "layers.1"), inner=(inner,)),)))


def test_results_kept_inside_a_segment_cost_memory_in_its_recompute_alone() -> None:
    """torch's own op-level cache lives from the first forward to the backward, whatever recomputes around it."""
    assert_same(Looped(plain), {"mode": "nested", "k": 3, "save": ["matmul"]})
    model, ids = Transformer(CONFIG), torch.zeros(2, 16, dtype=torch.int64)
    segments, nested, keeping = (
        plan_cost(model, make_plan(model, {"k": 3, **policy}), (ids, ids))
        for policy in ({"mode": "segments"}, {"mode": "nested"}, {"mode": "nested", "save": ["matmul"]})
    )
    assert keeping.saved_bytes == segments.saved_bytes == nested.saved_bytes and keeping.cached_bytes == 0
    scores = 2 * 2 * 2 * 16 * 16 * 32  # two products of the attention kernel, which is not kept
    last = 2 * 32 * 32 * 48  # a block files its results at its end, which each segment's recompute so has to reach
    assert keeping.recomputed_flops == segments.recomputed_flops + 2 * last + 6 * scores < nested.recomputed_flops


def test_the_length_of_segments() -> None:
    model = Looped(plain, depth=9)
    plan = make_plan(model, "segments")
    assert [len(region.modules) for region in plan.regions] == [3, 3, 3]
    assert any("√n, as no batch" in note and "nested" in note for note in plan.notes)
    measured = make_plan(model, "segments", torch.randn(2, 5, 4))
    assert len(measured.regions[0].modules) < 3, "a transformer block keeps far more than its input"
    assert any("√(n·input/block)" in note for note in measured.notes)


def test_segments_stay_within_their_list_and_skip_what_is_excluded() -> None:
    stages = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)))
    plan = make_plan(stages, {"mode": "segments", "k": 2, "blocks": "Block"})
    assert [r.modules for r in plan.regions] == [("0.0", "0.1"), ("0.2",), ("1.0", "1.1"), ("1.2",)]
    plan = make_plan(Stack(6), {"mode": "segments", "k": 4, "exclude": "blocks.1"})
    assert [r.modules for r in plan.regions] == [("blocks.0",), tuple(f"blocks.{i}" for i in range(2, 6))]
    assert plan.unmatched == ("blocks.1",)
