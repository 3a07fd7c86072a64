"""Op rules under sharding: the same bits as without, collectives run once, submodules sharded inside a region."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.ledger import resident_of
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule
from dist_ckpt.planning import apply
from dist_ckpt.wrap.apply import apply_plan
from tests.distributed.test_parity import assert_same
from tests.distributed.training import Job, train_all
from tests.ranks import RankGroups
from tests.unit.toys import Stack

OPTIONS: list[dict[str, Any]] = [
    {"every_nth_matmul": 2, "recompute_matmuls_of": "feed_forward.w1", "offload": ["attention"]},
    {"save": ["mm", "attention"]},
    {"save": ["aten._scaled_dot_product_flash_attention_for_cpu"]},
    {"every_nth_matmul": 3},
    {"recompute_matmuls_of": ["attention", "feed_forward.w?"]},
    {"offload": ["matmul"], "save": ["attention"]},
    {"save": ["attention"], "early_stop": False, "inputs": "offload"},
]


def jobs(engine: str, choices: list[dict[str, Any]], **variant: Any) -> list[Job]:
    # A result of a micro-batch is large enough to be worth a copy to the host.
    base = Job(engine, model={"dropout": 0.1}, rows=16, seq=48, accumulation=2, **variant)
    return [base, *(dataclasses.replace(base, policy={"mode": "selective"} | one) for one in choices)]


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_options_together_change_no_bit(ranks: RankGroups, engine: str) -> None:
    for without, with_options in ranks(2).run(train_all, jobs(engine, OPTIONS[:1])):
        assert_same(with_options, without)
        assert with_options.memory[-1].activations < without.memory[-1].activations


@pytest.mark.full
@pytest.mark.parametrize("variant", ["fp32", "bf16", "compile"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_each_option_changes_no_bit(ranks: RankGroups, engine: str, variant: str) -> None:
    choices = [one for one in OPTIONS if variant != "compile" or not ({"offload", "inputs"} & one.keys())]
    options: dict[str, Any] = {"fp32": {}, "bf16": {"precision": "bf16"}, "compile": {"compile": True}}[variant]
    outcomes = ranks(2).run(train_all, jobs(engine, choices, options=options), timeout_s=400)
    for without, *with_options in outcomes:
        for outcome in with_options:
            assert_same(outcome, without)


def sharded_inside(rank: int, world: int, how: str, rules: tuple[OpRule, ...]) -> tuple[int, bool]:
    """Cached bytes of a model whose regions hold sharded modules, and whether its gradients are those without."""
    torch.manual_seed(0)
    plain = Stack(2, width=16, p=0.5)
    model = copy.deepcopy(plain)
    regions = tuple(Region((f"blocks.{i}",), SaveRule(ops=rules)) for i in range(2))
    found = []
    for one in (plain, model):
        if one is model:
            apply_plan(one, Plan(regions=regions))
        sharded = _shard(one, how)
        torch.manual_seed(10 + rank)
        for _ in range(2):
            sharded.zero_grad()
            loss = sharded(torch.randn(3, 5, 4)).square().sum()
            cached = saved_bytes([loss], (tensor for _, _, tensor in resident_of(sharded))).cached
            loss.backward()
        found.append([local_tensor(p.grad) for p in sharded.parameters() if p.grad is not None])
    same = len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return cached, same


def _shard(model: nn.Module, how: str) -> nn.Module:
    parts = [part for block in model.blocks for part in (block.attention.qkv, block.attention, block.mlp)]
    if how == "fsdp1":
        for block in model.blocks:
            for name in ("attention", "mlp"):
                setattr(block, name, _fsdp1(getattr(block, name)))
        return _fsdp1(model)
    for part in (*parts, *model.blocks, model):
        fully_shard(part, reshard_after_forward=how == "fsdp2")
    return model


def _fsdp1(module: nn.Module) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2", "fsdp2, kept gathered"])
def test_modules_that_are_sharded_inside_a_region_shift_no_call(ranks: RankGroups, how: str) -> None:
    rules = (OpRule("recompute", "matmul", within="mlp"), OpRule("save", "matmul", within="attention.qkv"))
    for cached, same in ranks(2).run(sharded_inside, how, rules):
        assert same and cached == 2 * 3 * 5 * 3 * 16 * 4


class Exchanging(nn.Module):
    """A block that routes by top-k and exchanges tokens and sums over ranks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, 4), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        tokens = (x * scores.sum(-1, keepdim=True)).contiguous()
        away = collectives.all_to_all_single_autograd(tokens, None, None, dist.group.WORLD)
        out = self.expert(away.tanh()).tanh()
        back = collectives.all_to_all_single_autograd(out.contiguous(), None, None, dist.group.WORLD)
        everyone = collectives.all_gather_tensor_autograd(back.tanh(), 0, dist.group.WORLD)
        mine = collectives.reduce_scatter_tensor_autograd(everyone.sin(), "sum", 0, dist.group.WORLD)
        return mine.cos() * (1 + chosen.sum(-1, keepdim=True))


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def exchange(rank: int, world: int, policy: Any) -> tuple[dict[str, int], list[Tensor]]:
    """How often each operator runs in a step of two blocks, and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(Exchanging(), Exchanging())
    apply(model, policy)
    torch.manual_seed(rank)
    x = torch.randn(6, 8, requires_grad=True)
    with Calls() as calls:
        model(x).square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return calls.counts, [grad.clone() for grad in grads if grad is not None]


COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.mark.parametrize("save", [None, ["collective", "topk"], ["collective"], ["topk"]])
def test_collectives_and_routing_run_once(ranks: RankGroups, save: list[str] | None) -> None:
    policy = {"mode": "selective", "blocks": "Exchanging", "save": save}
    plain, full, kept = (
        ranks(2).run(exchange, one) for one in ("none", {"mode": "full", "blocks": "Exchanging"}, policy)
    )
    for (counts, grads), (of_full, _), (of_kept, found) in zip(plain, full, kept, strict=True):
        assert len(found) == len(grads) and all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))
        for name in COLLECTIVES:
            saves = save is None or "collective" in save
            # The last collective of a block lies after everything that backward needs, so it is never run again.
            assert of_kept[name] == (counts[name] if saves else of_full[name]), name
        assert sum(of_full[name] for name in COLLECTIVES) > sum(counts[name] for name in COLLECTIVES)
        assert of_kept["topk"] == (2 if save is None or "topk" in save else 4)
