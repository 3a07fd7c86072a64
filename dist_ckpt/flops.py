"""Counting floating-point operations, the one helper for plans, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def count_flops(step: Callable[[], object]) -> int:
    """Floating-point operations of everything that ``step`` runs, backward and recompute included.

    Matrix products, convolutions and attention kernels are counted, as ``torch.utils.flop_counter`` does, and as there
    a causal mask halves nothing. That counter takes the CPU's flash-attention kernel for free (torch 2.13), so its
    formula is added here.
    """
    with FlopCounterMode(display=False, custom_mapping=_missing_formulas()) as counter:
        step()
    return counter.get_total_flops()


def _missing_formulas() -> dict[Any, Callable[..., int]]:
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    }


def _flash_forward(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _flash_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)
