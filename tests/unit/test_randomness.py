"""Random numbers that no recompute replays are refused in a region's first forward, by the name of their stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import apply, plan_cost, recompute
from dist_ckpt.errors import PlanError
from dist_ckpt.planning import make_plan

GENERATOR = torch.Generator().manual_seed(3)
Draw = Callable[[nn.Module], Tensor]


class Drawing(nn.Module):
    """A layer with a mask that it draws as told."""

    def __init__(self, draw: Draw | None = None, **held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.draw = draw
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(8) if self.draw is None else self.draw(self)
        return torch.sigmoid(self.fc(x) * (mask > 0.5)).square()


class DrawingFromAGlobal(Drawing):
    """Names a generator that it does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x) * (torch.rand(8, generator=GENERATOR) > 0.5)).square()


class DrawingFromItsClass(Drawing):
    """Has a generator that all of its kind share."""

    shared = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x) * (torch.rand(8, generator=self.shared) > 0.5)).square()


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (lambda: Drawing(lambda m: torch.full((8,), random.random())), "Python's random"),
    "numpy": (lambda: Drawing(lambda m: torch.from_numpy(numpy.random.rand(8))), r"numpy\.random"),
    "held": (
        lambda: Drawing(lambda m: torch.rand(8, generator=m.own), own=torch.Generator()),
        r"the generator Drawing\.own",
    ),
    "held in a list": (
        lambda: Drawing(lambda m: torch.rand(8, generator=m.own[0]), own=[torch.Generator()]),
        r"the generator Drawing\.own",
    ),
    "numpy generator": (
        lambda: Drawing(lambda m: torch.from_numpy(m.own.random(8)), own=numpy.random.default_rng(0)),
        r"the generator Drawing\.own",
    ),
    "Python generator": (
        lambda: Drawing(lambda m: torch.full((8,), m.own.random()), own=random.Random(0)),
        r"the generator Drawing\.own",
    ),
    "class attribute": (lambda: DrawingFromItsClass(), r"the generator DrawingFromItsClass\.shared"),
    "global": (DrawingFromAGlobal, "the generator 'GENERATOR'"),
}


@pytest.mark.parametrize("policy", ["full", {"mode": "segments", "k": 2}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_stream_that_is_not_replayed_is_named(case: str, policy: Any) -> None:
    build, stream = CASES[case]
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(build()) for _ in range(2))))
    options = {"mode": policy} if isinstance(policy, str) else policy
    apply(model, {**options, "blocks": "0.*"})
    with pytest.raises(PlanError, match=rf"forward of 0\.0 draws from {stream}, which no recompute replays"):
        model(torch.randn(4, 8))


def test_the_global_generator_and_streams_that_rest_are_fine() -> None:
    model = nn.Sequential(Drawing(own=torch.Generator()), Drawing(own=random.Random(0)))
    apply(model, {"mode": "full", "blocks": "Drawing"})
    for _ in range(2):
        random.random(), numpy.random.rand()
        model(torch.randn(4, 8)).sum().backward()
    assert plan_cost(Drawing(), make_plan(nn.Sequential(Drawing()), "none"), torch.randn(4, 8)).flops > 0


def test_a_function_that_closes_over_a_generator_is_refused() -> None:
    own, fc = torch.Generator(), nn.Linear(8, 8)
    drawing = recompute(lambda x: torch.sigmoid(fc(x) * torch.rand(8, generator=own)))
    with pytest.raises(PlanError, match="draws from the generator 'own'"):
        drawing(torch.randn(4, 8))
    replayed = recompute(lambda x: torch.sigmoid(fc(x) * torch.rand(8)))
    replayed(torch.randn(4, 8)).sum().backward()
