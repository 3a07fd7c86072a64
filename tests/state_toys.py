"""A small tied model under each engine, and a state read back whole, for the tests of training states."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

VOCAB = 11
WIDTH = 6
"""Neither divides by two or four ranks: shards are uneven, and some are empty."""


class Block(nn.Module):
    """x: (batch, seq, WIDTH) → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1, self.training)


class Toy(nn.Module):
    """Two blocks between an embedding and, tied to it, a head. ids: (batch, seq) → summed loss."""

    def __init__(self, layers: int = 2, tied: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        self.seen += 1
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def sharded(model: Toy, engine: str, recompute: bool = False) -> nn.Module:
    """The model as ``engine`` wraps it: one, ddp, fsdp1, fsdp2 or hsdp (two groups of ranks)."""
    if recompute:
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if engine in ("fsdp2", "hsdp"):
        world_size = torch.distributed.get_world_size()
        mesh = (
            init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
            if engine == "hsdp"
            else init_device_mesh("cpu", (world_size,))
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    assert engine == "one"
    return model


def adamw(model: nn.Module) -> AdamW:
    """Two groups, told apart by what sharding does not change: the last part of a parameter's name."""
    decay = [p for name, p in model.named_parameters() if "norm" not in name]
    rest = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    return AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 1) -> None:
    """Steps on random ids that are the same on each rank; dropout differs between steps."""
    ids = torch.randint(0, VOCAB, (steps, 2, 5), generator=torch.Generator().manual_seed(seed))
    for batch in ids:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights and moments gathered from all ranks, by key, and the groups; not by way of a file."""
    options = StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights: dict[str, Any] = get_model_state_dict(model, options=options)
        moments: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    tensors = {f"model.{name}": value for name, value in weights.items()}
    for name, entries in moments["state"].items():
        tensors |= {f"optimizer.{name}.{kind}": value for kind, value in entries.items()}
    groups = [{**group, "params": sorted(group["params"])} for group in moments["param_groups"]]
    return {"tensors": {key: value.clone() for key, value in tensors.items()}, "groups": groups}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit, hyper-parameters included."""
    assert one["tensors"].keys() == other["tensors"].keys()
    unlike = [key for key, value in one["tensors"].items() if not torch.equal(value, other["tensors"][key])]
    assert not unlike
    assert one["groups"] == other["groups"]
