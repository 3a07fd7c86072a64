"""The vocabulary of operations that policies name.

Logical names stand for the kernels of every backend, so that a plan made on a laptop holds on a GPU. Kernel names
are those of torch's dispatcher; one that this build of torch lacks is simply not in its set.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from dist_ckpt.compat.dispatch import UNCOUNTABLE_OPS, is_decomposed, is_dispatched, operator_names
from dist_ckpt.errors import PlanError, choices

Operator = OpOverload | HigherOrderOperator
"""What a dispatch mode sees as one call. Of higher-order operators only ``flex_attention`` can be named."""

LOGICAL_OPS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "matmul": (
            "aten.mm",
            "aten.addmm",
            "aten.bmm",
            "aten.baddbmm",
            "aten.addbmm",
            "aten._addmm_activation",
            "aten._int_mm",
            "aten._scaled_mm",
            "aten._scaled_mm_v2",
            "aten._grouped_mm",
            "aten._scaled_grouped_mm",
            "aten._scaled_grouped_mm_v2",
        ),
        "convolution": ("aten.convolution",),
        "attention": (
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
            "aten._scaled_dot_product_fused_attention_overrideable",
            "aten._flash_attention_forward",
            "aten._efficient_attention_forward",
            "torch_attn._varlen_attn",
            "higher_order.flex_attention",
        ),
        "collective": (
            "_c10d_functional.all_gather_into_tensor",
            "_c10d_functional.all_gather_into_tensor_coalesced",
            "_c10d_functional.all_reduce",
            "_c10d_functional.all_reduce_coalesced",
            "_c10d_functional.all_to_all_single",
            "_c10d_functional.broadcast",
            "_c10d_functional.reduce_scatter_tensor",
            "_c10d_functional.reduce_scatter_tensor_coalesced",
        ),
        "topk": ("aten.topk",),
        # Of these only calls that cross devices count, from an accelerator to the host: see ``crosses_to_host``.
        "d2h": ("aten._to_copy", "aten._local_scalar_dense"),
        # What fp8 scaling factors are made of: of the whole tensor, or of each row.
        "amax": ("aten.max.default", "aten.amax"),
    }
)
"""Logical name to dispatcher operators."""

_RUNS_AS: Mapping[str, str] = types.MappingProxyType(
    {
        "linear": "matmul",
        "matmul": "matmul",
        "einsum": "matmul",
        "scaled_dot_product_attention": "attention",
        "conv1d": "convolution",
        "conv2d": "convolution",
        "conv3d": "convolution",
    }
)
"""Operators that people name although another one does their work."""


@functools.cache
def resolve_op(name: str) -> frozenset[Operator]:
    """The operators that a name stands for: all overloads of each that return a new result.

    Args:
        name: a logical name, or an operator as people write it: ``mm``, ``aten.mm``, ``aten.mm.default``,
            ``torch.ops.aten.mm.default``.

    Raises:
        PlanError: a name that is neither, or an operator whose results cannot be kept: one that writes into its
            arguments, or that runs as other operators.
    """
    if name in LOGICAL_OPS:
        return frozenset(op for one in LOGICAL_OPS[name] for op in _operators(one) if not written_arguments(op))
    ops = _operators(name)
    if not ops:
        near = difflib.get_close_matches(name.removeprefix("torch.ops."), _spellings(), n=3, cutoff=0.75)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        logical = choices(name, LOGICAL_OPS) if not near else f"Valid: {', '.join(sorted(LOGICAL_OPS))}"
        raise PlanError(f"no operation {name!r}: {hint}{logical}, or an operator of torch.ops such as aten.mm")
    returning = [op for op in ops if not written_arguments(op)]
    if not returning:
        raise PlanError(f"operation {name!r} writes into its arguments: what it returns is no result of its own")
    kept = frozenset(op for op in returning if not (isinstance(op, OpOverload) and is_decomposed(op)))
    if not kept:
        base = ops[0].name().partition("::")[2].partition(".")[0]
        does = [_RUNS_AS[base]] if base in _RUNS_AS else [n for n in (f"_{base}", f"native_{base}") if _operators(n)]
        raise PlanError(
            f"operation {name!r} runs as other operators, and its own result is never seen: name "
            f"{' or '.join(does) or ', '.join(sorted(LOGICAL_OPS))}"
        )
    if kept & UNCOUNTABLE_OPS:
        raise PlanError(f"operation {name!r} is also run by checkpointing itself, so its calls cannot be counted")
    return kept


def _operators(name: str) -> tuple[Operator, ...]:
    parts = name.removeprefix("torch.ops.").split(".")
    if len(parts) == 1:
        parts = ["higher_order" if name == "flex_attention" else "aten", *parts]
    found: object = torch.ops
    for part in parts:
        if not part.isidentifier():
            return ()
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return ()
    if isinstance(found, OpOverload):
        return (found,) if is_dispatched(found) else ()
    if isinstance(found, OpOverloadPacket):
        overloads = (getattr(found, overload) for overload in found.overloads())
        return tuple(op for op in overloads if is_dispatched(op))
    return (found,) if found is torch.ops.higher_order.flex_attention else ()


@functools.cache
def _spellings() -> tuple[str, ...]:
    """Every operator that could be meant, with and without its namespace."""
    names = [name.replace("::", ".") for name in operator_names() if "." not in name]
    return tuple(dict.fromkeys([*names, *(name.removeprefix("aten.") for name in names), *LOGICAL_OPS]))


@functools.cache
def written_arguments(op: Operator) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes into, by position and name; none of most."""
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    written = ((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    return tuple(written)


def crosses_to_host(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a ``d2h`` operator brings a tensor, or the number in one, from an accelerator to the host."""
    source = args[0] if args else None
    if not isinstance(source, torch.Tensor) or source.device.type in ("cpu", "meta"):
        return False
    if op is torch.ops.aten._local_scalar_dense.default:
        return True
    target = kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu"


@functools.cache
def draws_random_numbers(op: Operator) -> bool:
    """Whether an operator advances a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


@functools.cache
def _dropout_argument(op: Operator) -> tuple[int, Any] | None:
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return next(((i, a.default_value) for i, a in enumerate(arguments) if a.name == "dropout_p"), None)


def has_drawn(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call advanced a random generator: one of an attention kernel without dropout has not."""
    if not draws_random_numbers(op):
        return False
    place = _dropout_argument(op)
    if place is None:
        return True
    position, default = place
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", default))
