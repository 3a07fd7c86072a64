"""Names of operations as people write them, and the mistakes that can be made with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_ckpt.errors import PlanError
from dist_ckpt.ops import LOGICAL_OPS, crosses_to_host, has_drawn, resolve_op, written_arguments
from dist_ckpt.planning import make_plan
from tests.unit.toys import Stack

aten = torch.ops.aten


def test_operations_have_many_spellings() -> None:
    for name in ("mm", "aten.mm", "torch.ops.aten.mm", "aten.mm.default", "torch.ops.aten.mm.default"):
        assert aten.mm.default in resolve_op(name), name
    assert resolve_op("aten.mm.default") == {aten.mm.default}
    assert resolve_op("matmul") >= {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}
    assert all(resolve_op(name) for name in LOGICAL_OPS)


def test_attention_is_every_backends_kernel() -> None:
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
    assert kernels <= resolve_op("attention")
    assert resolve_op("flex_attention") == {torch.ops.higher_order.flex_attention}


def test_what_writes_into_its_arguments_is_no_result() -> None:
    """``mm.out`` called in a recompute must write, so it is not among what ``mm`` stands for."""
    assert aten.mm.out not in resolve_op("mm") and written_arguments(aten.mm.out) == ((2, "out"),)
    assert all(not written_arguments(op) for name in LOGICAL_OPS for op in resolve_op(name))
    assert aten.exp.default in resolve_op("exp")  # which has overloads on plain numbers, outside of the dispatcher


MISTAKES = [
    ("matmull", "no operation 'matmull': did you mean matmul"),
    ("addmn", "did you mean addmv or addmm"),
    ("aten.nothing", "no operation 'aten.nothing'.* Valid: amax, attention"),
    ("a b", "no operation"),
    ("torch.nn.Linear", "no operation"),
    ("", "no operation"),
    ("linear", "'linear' runs as other operators.*: name matmul"),
    ("aten.scaled_dot_product_attention", "runs as other operators.*: name attention"),
    ("softmax", "runs as other operators.*: name _softmax"),
    ("layer_norm", "name native_layer_norm"),
    ("add_", "'add_' writes into its arguments"),
    ("aten.mm.out", "'aten.mm.out' writes into its arguments"),
    ("detach", "'detach' is also run by checkpointing itself"),
    ("exp.int", "no operation"),
    ("inductor_compiled_code", "no operation"),
]


@pytest.mark.parametrize(("name", "message"), MISTAKES, ids=[name for name, _ in MISTAKES])
@pytest.mark.parametrize("key", ["save", "offload"])
def test_mistakes_in_a_name_say_what_to_write(name: str, message: str, key: str) -> None:
    with pytest.raises(PlanError, match=f"ckpt.{key}: .*{message}"):
        make_plan(Stack(), {"mode": "selective", key: [name]})


@pytest.mark.parametrize(
    ("args", "kwargs", "crosses"),
    [
        ((torch.ones(2),), {"device": torch.device("cpu")}, False),
        ((torch.ones(2),), {"dtype": torch.half}, False),
        (("accelerator",), {"device": torch.device("cpu")}, True),
        (("accelerator",), {"device": "cpu"}, True),
        (("accelerator",), {"dtype": torch.half}, False),
        (("accelerator",), {"device": None}, False),
        (("accelerator",), {"device": "cuda"}, False),
    ],
)
def test_only_copies_to_the_host_are_copies_to_the_host(args: Any, kwargs: Any, crosses: bool) -> None:
    class OnAccelerator(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    args = tuple(torch.ones(2).as_subclass(OnAccelerator) if one == "accelerator" else one for one in args)
    assert crosses_to_host(aten._to_copy.default, args, kwargs) is crosses


def test_a_number_read_from_an_accelerator_is_a_copy_to_the_host() -> None:
    assert not crosses_to_host(aten._local_scalar_dense.default, (torch.ones(()),), {})
    assert aten._local_scalar_dense.default in resolve_op("d2h")


def test_attention_draws_random_numbers_only_with_dropout() -> None:
    kernel, q = aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ones(1)
    assert not has_drawn(kernel, (q, q, q), {}) and not has_drawn(kernel, (q, q, q, 0.0), {})
    assert has_drawn(kernel, (q, q, q, 0.1), {}) and has_drawn(kernel, (q, q, q), {"dropout_p": 0.1})
    assert has_drawn(aten.bernoulli.default, (q,), {}) and not has_drawn(aten.mm.default, (q, q), {})
