"""A model that is sharded already has the blocks that it had before, and takes the plan that was made before."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

from dist_ckpt import apply_plan, make_plan
from dist_ckpt.blocks import find_blocks
from tests.architectures import ARCHITECTURES, build
from tests.ranks import RankGroups

pytestmark = pytest.mark.full


def blocks_after(rank: int, world: int, name: str, how: str) -> tuple[tuple[str, ...], float]:
    """The blocks of the sharded model, and the loss of a step with the plan."""
    case = build(name)
    plan = make_plan(case.model, {"mode": "full", **case.options})
    modules = dict(case.model.named_modules())
    units = [modules[block] for block in plan.blocks]
    model = case.model
    if how == "fsdp2":
        for unit in units:
            fully_shard(unit)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_id=torch.device("cpu"),
            use_orig_params=how == "fsdp1",
        )
    blocks = find_blocks(model, **({"spec": case.options["blocks"]} if case.options else {}))
    apply_plan(model, plan)
    torch.manual_seed(5)
    loss = case.loss_fn(model, case.batch)
    loss.backward()
    return blocks, loss.item()


@pytest.mark.parametrize("how", ["fsdp1", "fsdp1 with flat parameters", "fsdp2"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_those_of_the_plain_model(ranks: RankGroups, name: str, how: str) -> None:
    case = build(name)
    torch.manual_seed(5)
    expected = case.loss_fn(case.model, case.batch).item()
    for blocks, loss in ranks(2).run(blocks_after, name, how):
        assert blocks == case.blocks and loss == pytest.approx(expected, rel=1e-5)
