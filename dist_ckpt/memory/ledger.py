"""The ledger: who owns a rank's lasting memory, and how many bytes that is by category, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat import fsdp, zero
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.memory.profile.step_profile import PRECEDENCE, Kind
from dist_ckpt.memory.storages import Storages
from dist_ckpt.names import is_replicated, named_parameters, unwrapped_name

Category = Literal["params", "grads", "optimizer", "other"]
"""``optimizer``: moments and fp32 master weights (arXiv:1910.02054, section 3.1); ``other``: buffers, communication
buckets, unsharded copies, what a pipeline exchanges."""

CATEGORIES: tuple[Category, ...] = get_args(Category)

CATEGORY_OF: Mapping[Kind, Category] = {
    "params": "params",
    "grads": "grads",
    "optimizer": "optimizer",
    "unsharded": "other",
    "buffers": "other",
    "communication": "other",
}
"""The kinds that have owners."""

_FLAT = "_flat_param"
"""What FSDP1 calls the parameter in which it has put those of a unit."""

Owner = tuple[Kind, str, Tensor]
"""(one of the kinds of :data:`CATEGORY_OF`, name as in the plain model, this rank's tensor)."""


def owners_of(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Owner]:
    """Every owner of a plain, DDP, FSDP1 or FSDP2 model, or of a DeepSpeed engine, which knows its optimizer.

    A storage may appear under several owners.
    """
    yield from resident_of(model)
    yield from _grads(model)
    for module in model.modules():
        for name, tensor in fsdp.fsdp2_buffers(module):
            yield "communication", name, tensor
    if zero.is_engine(model):
        yield from _of_deepspeed(model)
    else:
        yield from _optimizer_state(model, optimizer)


def resident_of(model: nn.Module) -> Iterator[Owner]:
    """Owners that are alive whatever is trained: parameters, buffers and unsharded copies."""
    root: nn.Module = model.module if is_replicated(model) else model  # type: ignore[assignment]
    views: set[int] = set()
    for prefix, module in root.named_modules():
        flat = fsdp.fsdp1_flat_parameter(module)
        if flat is not None:
            # Its parameters, met further down, are views: of this rank's shard at rest, of a copy within a step.
            views.update(id(parameter) for parameter in fsdp.fsdp1_managed(flat))
            name = unwrapped_name(f"{prefix}.{_FLAT}")
            yield "params", name, fsdp.fsdp1_shard(flat)
            for copy in fsdp.fsdp1_copies(flat):
                yield "unsharded", name, copy
        for name, _, shard in fsdp.fsdp2_shards(module):
            yield "params", unwrapped_name(name), shard
        for name, copy in fsdp.fsdp2_copies(module):
            views.add(id(copy))  # while it is whole, it takes the place of the shard in its module
            yield "unsharded", unwrapped_name(name), copy
        for name, parameter in module._parameters.items():
            if parameter is None or parameter is flat:
                continue
            name = unwrapped_name(f"{prefix}.{name}")
            kind: Kind = "unsharded" if id(parameter) in views else "params"
            if zero.is_partitioned(parameter):
                kind = "unsharded"
                for shard in zero.shards(parameter):
                    yield "params", name, shard
            yield kind, name, local_tensor(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield "buffers", unwrapped_name(f"{prefix}.{name}"), local_tensor(buffer)


def _grads(model: nn.Module) -> Iterator[Owner]:
    for prefix, module in model.named_modules():
        flat = fsdp.fsdp1_flat_parameter(module)
        for grad in fsdp.fsdp1_shard_grads(flat) if flat is not None else ():
            yield "grads", unwrapped_name(f"{prefix}.{_FLAT}"), grad
        for name, grad in fsdp.fsdp2_unsharded_grads(module):
            yield "grads", unwrapped_name(name), local_tensor(grad)
        for name, parameter, _ in fsdp.fsdp2_shards(module):
            if parameter.grad is not None:
                yield "grads", unwrapped_name(name), local_tensor(parameter.grad)
    for name, parameter in named_parameters(model):
        if parameter.grad is not None:
            yield "grads", name, local_tensor(parameter.grad)
        for grad in zero.grads_of_parameter(parameter):
            yield "grads", name, grad


def _of_deepspeed(engine: nn.Module) -> Iterator[Owner]:
    """What a DeepSpeed engine's optimizer holds, and its pipeline if it runs one; names are those of its attributes."""
    optimizer = engine.optimizer
    for name, tensor in zero.flat_params(optimizer):
        yield "params", name, tensor
    for name, tensor in zero.grads(optimizer):
        yield "grads", name, tensor
    for name, tensor in zero.masters(optimizer):
        yield "optimizer", name, tensor
    for name, tensor in zero.states(optimizer):
        yield "optimizer", name, tensor
    for name, tensor in zero.buckets(optimizer):
        yield "communication", name, tensor
    for name, tensor in zero.pipe_buffers(engine) if zero.is_pipeline(engine) else ():
        yield "communication", name, tensor


def _optimizer_state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Owner]:
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    for module in model.modules():
        names |= {id(parameter): unwrapped_name(name) for name, parameter, _ in fsdp.fsdp2_shards(module)}
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        name = names.get(id(parameter), "a parameter outside the model")
        for leaf in tree_leaves(state):
            if isinstance(leaf, Tensor):
                yield "optimizer", name, local_tensor(leaf)


def in_precedence(owners: Iterable[Owner]) -> list[Owner]:
    """Owners in the order in which those of one storage come: it is what the first of them says."""
    return sorted(owners, key=lambda owner: PRECEDENCE.index(owner[0]))


def ledger(owners: Iterable[Owner]) -> dict[Category, int]:
    """Bytes of each category on this rank.

    Tied weights, views and aliases count once, for the first of their owners (a gradient that is a view of a
    communication bucket is a gradient). Tensors that are not on a device of their own (meta) count nothing.
    """
    storages = Storages()
    counts = dict.fromkeys(CATEGORIES, 0)
    for kind, _, tensor in in_precedence(owners):
        if tensor.device.type != "meta":
            counts[CATEGORY_OF[kind]] += storages.add(tensor)
    return counts
