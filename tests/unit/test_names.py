"""Names are those of the plain model, whatever wraps it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt import apply, named_parameters
from dist_ckpt.names import named_buffers, named_modules
from tests.ranks import RankGroups
from tests.unit.toys import Block, Stack


class Tied(nn.Module):
    """With a shared module, a tied weight and a tied buffer, which count once, under their first names."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2)
        self.again = self.stack.blocks[0]
        self.head = nn.Linear(4, 8)
        self.head.weight = self.stack.embed.weight
        self.register_buffer("table", torch.zeros(3))
        self.norm = nn.BatchNorm1d(4)
        self.norm.register_buffer("table", self.table)


def names(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    return (
        [n for n, _ in named_modules(model)],
        [n for n, _ in named_parameters(model)],
        [n for n, _ in named_buffers(model)],
    )


def plain_names(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    return (
        [n for n, _ in model.named_modules()],
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_buffers()],
    )


def test_a_plain_model_has_torchs_own_names() -> None:
    assert names(Tied()) == plain_names(Tied())


def wrapped_in_many_ways() -> dict[str, nn.Module]:
    models = {}
    for wrap in (checkpoint_wrapper, offload_wrapper, torch.compile, nn.DataParallel):
        inside, outside = Tied(), Tied()
        inside.stack.blocks[1] = wrap(inside.stack.blocks[1])
        inside.stack.blocks[1].train()
        models |= {f"{wrap.__name__} inside": inside, f"{wrap.__name__} outside": wrap(outside)}
    both = Tied()
    both.stack.blocks[1] = torch.compile(checkpoint_wrapper(both.stack.blocks[1]))
    planned = Tied()
    apply(planned.stack, "full")
    return models | {"both": nn.DataParallel(torch.compile(both)), "a plan": planned}


def test_wrappers_leave_no_trace_in_names() -> None:
    expected = plain_names(Tied())
    for how, model in wrapped_in_many_ways().items():
        assert names(model) == expected, how


def sharded_names(rank: int, world: int) -> dict[str, tuple[list[str], list[str], list[str]]]:
    ddp = DistributedDataParallel(Tied())
    part = Tied()
    part.stack = DistributedDataParallel(part.stack)
    fsdp1 = FullyShardedDataParallel(
        Stack(2), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )
    fsdp2 = Stack(2)
    apply(fsdp2, "full")
    for block in fsdp2.blocks:
        fully_shard(block)
    fully_shard(fsdp2)
    dist.barrier()
    found = {"ddp": ddp, "part": part, "fsdp1": fsdp1, "fsdp2": fsdp2}
    return {how: names(model) for how, model in found.items()}


def test_parallel_wrappers_leave_no_trace_in_names(ranks: RankGroups) -> None:
    for found in ranks(2).run(sharded_names):
        assert found["ddp"] == found["part"] == plain_names(Tied())
        assert found["fsdp1"] == found["fsdp2"] == plain_names(Stack(2))


@pytest.mark.full
def test_fabric_and_accelerate_leave_no_trace_in_names() -> None:
    from accelerate import Accelerator
    from lightning.fabric import Fabric

    optimizer = torch.optim.SGD(Tied().parameters(), lr=0.1)
    set_up, _ = Fabric(accelerator="cpu").setup(Tied(), optimizer)
    assert names(set_up) == names(Accelerator(cpu=True).prepare(Tied())) == plain_names(Tied())
