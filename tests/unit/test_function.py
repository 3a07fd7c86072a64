"""Plain functions that are recomputed: the same gradients, less that is saved, the same guards as for modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import apply, recompute
from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes

W1 = torch.randn(8, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
W2 = torch.randn(32, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))


def mlp(x: Tensor, *, scale: float = 1.0, pair: tuple[Tensor, Tensor] = (W1, W2)) -> Tensor:
    """Two products with dropout between."""
    first, second = pair
    return nn.functional.dropout(torch.tanh(x @ first) * scale, 0.3) @ second


def gradients(function: Callable[..., Tensor]) -> tuple[int, int, list[Tensor]]:
    """Saved bytes, FLOPs of forward and backward, gradients."""
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    out = function(x, scale=0.5)
    saved = saved_bytes([out], [W1, W2, x]).total
    flops = count_flops(lambda: out.square().sum().backward())
    found = [t.grad for t in (x, W1, W2)]
    W1.grad = W2.grad = None
    assert all(grad is not None for grad in found)
    return saved, flops, found  # type: ignore[return-value]


FIRST, SECOND = 2 * 16 * 8 * 32, 2 * 16 * 32 * 8
SCALE = 8
"""Bytes of the number that the product with it saves: torch hands numbers to no hook (saved_variable.cpp)."""


@pytest.mark.parametrize(
    ("policy", "saved", "recomputed"),
    [
        ("full", SCALE, FIRST),
        ({"mode": "selective", "save": ["mm"]}, SCALE + 16 * 32 * 4, 0),
        ({"mode": "full", "early_stop": False}, SCALE, FIRST + SECOND),
        ({"mode": "full", "inputs": "offload"}, SCALE, FIRST),
    ],
    ids=str,
)
def test_a_function_is_recomputed_exactly(policy: Any, saved: int, recomputed: int) -> None:
    _, flops, expected = gradients(mlp)
    found = gradients(recompute(mlp, policy))
    assert all(torch.equal(one, other) for one, other in zip(found[2], expected, strict=True))
    assert (found[0], found[1] - flops) == (saved, recomputed)
    assert all(torch.equal(one, other) for one, other in zip(gradients(apply(mlp, policy))[2], expected, strict=True))


def test_a_function_keeps_its_name_and_pays_nothing_without_gradients() -> None:
    function = recompute(mlp)
    assert (function.__name__, function.__doc__) == ("mlp", "Two products with dropout between.")
    with torch.no_grad():
        assert count_flops(lambda: function(X)) == count_flops(lambda: mlp(X))


class Counted(nn.Module):
    """Counts its forwards, and keeps BatchNorm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.fc(self.norm(x)) / self.calls)


@pytest.mark.parametrize(
    "reach",
    [
        lambda model: model,
        lambda model: model.forward,
        lambda model: lambda x: model(x),
        lambda model: functools.partial(_call, model),
    ],
    ids=["module", "method", "closure", "partial"],
)
def test_buffers_of_modules_that_it_reaches_are_updated_once(reach: Callable[[Counted], Callable[..., Tensor]]) -> None:
    outcomes = []
    for wrap in (lambda function: function, recompute):
        torch.manual_seed(0)
        model = Counted()
        function = wrap(reach(model))
        for _ in range(3):
            function(X).sum().backward()
        assert model.calls == 3
        outcomes.append([*model.buffers(), *(p.grad for p in model.parameters())])
        model.eval()
        assert len(saved_bytes([function(X)], model.parameters()).opaque) == 0
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def _call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _later(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize(
    ("function", "policy", "message"),
    [
        (3, "full", "a int cannot be called"),
        (nn.Linear, "full", "Linear is a class: an instance of it is needed"),
        (_later, "full", "_later runs after it has returned"),
        (mlp, "segments", r"mode=segments: a function has no blocks\. Valid: full, offload, selective"),
        (mlp, {"mode": "full", "blocks": "Block"}, r"ckpt\.blocks: a function has no modules"),
        (mlp, {"mode": "selective", "recompute_matmuls_of": ["x"]}, r"ckpt\.recompute_matmuls_of: a function has no"),
    ],
)
def test_what_a_function_cannot_have(function: Any, policy: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        recompute(function, policy)


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(PlanError, match="op rules that matched no call in the forward of mlp: convolution"):
        recompute(mlp, {"mode": "selective", "save": ["convolution"]})(X)
