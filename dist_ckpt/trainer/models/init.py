"""Initial weights that depend on (seed, parameter name) alone.

Whole, sharded and meta-built models of every world size therefore start from the same numbers, bit for bit.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dist_ckpt.names import named_parameters

INIT_STD = 0.02
"""Standard deviation of embeddings and matrices, as in GPT-2."""


def initial_value(name: str, shape: torch.Size, seed: int, n_layers: int) -> Tensor:
    """The initial value of one parameter, fp32 on the CPU.

    Norm weights are one. Matrices and embeddings are normal with standard deviation 0.02; those that end a residual
    branch are scaled by 1/sqrt(2 · n_layers), so that the residual stream's variance does not grow with depth
    (GPT-2, section 2.3).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    residual_end = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
    std = INIT_STD * (2 * n_layers) ** -0.5 if residual_end else INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int, n_layers: int, prefix: str = "") -> None:
    """Fills every parameter in place; sharded ones (DTensor) get their own part of the whole value.

    Args:
        prefix: the name of ``model`` inside the whole model, with its dot, where only a part is initialized.
    """
    for name, parameter in named_parameters(model):
        fill(parameter, initial_value(prefix + name, parameter.shape, seed, n_layers))


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copies a whole value into a tensor; a sharded one (DTensor) gets its own part of it."""
    value = value.to(tensor.dtype)
    if isinstance(tensor, DTensor):
        # Without a source rank nothing is communicated: each rank keeps its part of what it computed itself.
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)
