"""Who holds a rank's lasting memory: parameters, gradients, optimizer state, buffers and unsharded copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat import fsdp
from dist_ckpt.names import named_buffers, named_parameters

Category = Literal["params", "grads", "optimizer", "other"]
"""``optimizer``: moments and fp32 master weights (arXiv:1910.02054, section 3.1); ``other``: buffers, communication
buckets, unsharded copies."""

CATEGORIES: tuple[Category, ...] = get_args(Category)

Owner = tuple[Category, str, Tensor]
"""(category, name as in the plain model, this rank's tensor)."""


def owners_of(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Owner]:
    """Every owner of a plain, DDP, FSDP1 or FSDP2 model. A storage may appear under several owners."""
    yield from resident_of(model)
    yield from _grads(model)
    yield from _optimizer_state(optimizer)


def resident_of(model: nn.Module) -> Iterator[Owner]:
    """Owners that are alive whatever is trained: parameters, buffers and unsharded copies."""
    flat_parameters = list(fsdp.fsdp1_flat_parameters(model))
    for name, flat in flat_parameters:
        yield "params", name, getattr(flat, "_local_shard", flat).detach()
    # FSDP1's parameters are views into the flat one: of the shard at rest, of the unsharded copy within a step.
    category: Category = "other" if flat_parameters else "params"
    for name, parameter in named_parameters(model):
        yield category, name, local(parameter)
    for name, buffer in named_buffers(model):
        yield "other", name, local(buffer)
    for name, copy in (*fsdp.fsdp1_unsharded(model), *fsdp.fsdp2_unsharded(model)):
        yield "other", f"{name} (unsharded)", copy


def _grads(model: nn.Module) -> Iterator[Owner]:
    for name, flat in fsdp.fsdp1_flat_parameters(model):
        for grad in (flat.grad, getattr(flat, "_saved_grad_shard", None)):
            if grad is not None:
                yield "grads", name, grad
    for name, parameter in named_parameters(model):
        if parameter.grad is not None:
            yield "grads", name, local(parameter.grad)


def _optimizer_state(optimizer: Optimizer | None) -> Iterator[Owner]:
    for state in optimizer.state.values() if optimizer is not None else ():
        for leaf in tree_leaves(state):
            if isinstance(leaf, Tensor):
                yield "optimizer", "state", local(leaf)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a DTensor's ``nbytes`` is that of all ranks together."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients, to_local would add a view to the graph
        return tensor.to_local()
