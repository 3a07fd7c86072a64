"""A tensor as a few numbers that are equal only where every bit is.

A proof compares what hundreds of modules return in several runs. Keeping all of that would take the memory that
checkpointing saves, so 64 bits of each tensor are kept instead: a sum in integer arithmetic, exact in any order and so
the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat.torch import local_tensor, without_modes

_CHUNK = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fingerprint = tuple[str, str, int]
"""Shape, dtype, and 64 bits of the values."""


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Shape, dtype and digest of a tensor, of a DTensor's local part; one without memory has digest 0."""
    with torch.no_grad(), without_modes():
        local = local_tensor(tensor).detach()
        return str(tuple(local.shape)), str(local.dtype).removeprefix("torch."), _digest(local)


def describe(value: Any, *, only_tensors: bool = False) -> tuple[Any, ...]:
    """Fingerprints of the tensors and plain values in what a module takes or returns.

    Args:
        only_tensors: leave out mappings and lists, which a callee may rightly change.
    """
    if isinstance(value, Tensor):
        return (fingerprint(value),)
    if isinstance(value, tuple):
        return tuple(leaf for item in value for leaf in describe(item, only_tensors=only_tensors))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return (repr(value),)
    if only_tensors:
        return ()
    if isinstance(value, Mapping):
        value = dict(value)  # a model's output class may be a mapping that pytrees do not know
    elif not isinstance(value, list) and hasattr(value, "__dict__"):
        value = vars(value)
    return tuple(fingerprint(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def same_shapes(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two descriptions differ in values at most."""
    return [leaf[:2] for leaf in one if isinstance(leaf, tuple)] == [
        leaf[:2] for leaf in other if isinstance(leaf, tuple)
    ]


def _digest(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return hash((_digest(tensor.indices()), _digest(tensor.values())))
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.jagged):
        return _digest(tensor.values())
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.is_meta or not tensor.numel() or not tensor.untyped_storage().nbytes():  # the last: freed by sharding
        return 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        # splitmix64's multipliers as signed numbers: neighbouring positions get unrelated weights.
        weight = torch.arange(start + 1, start + 1 + bits.numel(), device=bits.device) * -7046029254386353131
        weight = (weight ^ (weight >> 29)) * -4658895280553007687
        mixed = (bits + 1) * weight
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % 2**64
