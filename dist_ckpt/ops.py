"""The vocabulary of operations that policies name.

Logical names stand for the kernels of every backend, so that a plan made on a laptop holds on a GPU. Kernel names
are those of torch's dispatcher; one that this build of torch lacks is simply not in its set.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping

import torch
from torch._ops import OpOverload, OpOverloadPacket

from dist_ckpt.errors import PlanError, choices

LOGICAL_OPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"),
        "convolution": ("aten.convolution",),
        "attention": (
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
            "aten._scaled_dot_product_fused_attention_overrideable",
            "aten._flash_attention_forward",
            "aten._efficient_attention_forward",
        ),
        "collective": (
            "_c10d_functional.all_gather_into_tensor",
            "_c10d_functional.all_reduce",
            "_c10d_functional.all_to_all_single",
            "_c10d_functional.reduce_scatter_tensor",
        ),
        "topk": ("aten.topk",),
        # A copy is device-to-host only if it crosses devices: the caller checks that (see ``is_host_copy``).
        "d2h": ("aten._to_copy",),
    }
)
"""Logical name to dispatcher operators."""


@functools.cache
def resolve_op(name: str) -> frozenset[OpOverload]:
    """The operators that a name stands for, all overloads of each.

    Args:
        name: a logical name, or an operator as people write it: ``mm``, ``aten.mm``, ``aten.mm.default``,
            ``torch.ops.aten.mm.default``.

    Raises:
        PlanError: a name that is neither.
    """
    if name in LOGICAL_OPS:
        return frozenset(op for one in LOGICAL_OPS[name] for op in _operators(one))
    ops = _operators(name)
    if not ops:
        raise PlanError(
            f"no operation {name!r}: {choices(name, LOGICAL_OPS)}, or an operator of torch.ops such as aten.mm"
        )
    return frozenset(ops)


def _operators(name: str) -> tuple[OpOverload, ...]:
    parts = name.removeprefix("torch.ops.").split(".")
    if len(parts) == 1:
        parts = ["aten", *parts]
    found: object = torch.ops
    for part in parts:
        if not part.isidentifier():
            return ()
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return ()
    if isinstance(found, OpOverload):
        return (found,)
    if isinstance(found, OpOverloadPacket):
        return tuple(getattr(found, overload) for overload in found.overloads())
    return ()


def is_host_copy(args: tuple[object, ...], out: object) -> bool:
    """Whether an ``aten._to_copy`` moved a tensor from an accelerator to host memory."""
    source = args[0] if args else None
    return (
        isinstance(source, torch.Tensor)
        and isinstance(out, torch.Tensor)
        and source.device.type != "cpu"
        and out.device.type == "cpu"
    )
