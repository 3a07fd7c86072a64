"""After the first backward, a parameter that has lost its gradient to the plan stops the run on every rank."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.errors import PlanError
from tests.distributed.training import Job, engine_for
from tests.ranks import RankGroups


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Calls its layers, or only those whose forward is the very one that it knows; a plan gives them another.

    Args:
        exact: whether it looks at forwards that way.
        unused: whether it has a layer that no forward calls.
    """

    def __init__(self, exact: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11)
        self.exact = exact
        if unused:
            self.extra = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            inner = getattr(layer, "module", layer)  # FSDP1 puts a wrapper around it
            if not self.exact or type(inner).forward is Block.forward:
                x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def outcomes(rank: int, world: int, engine: str, cases: list[tuple[dict[str, bool], Any, bool]]) -> list[str]:
    """The error of each case's first update, or its loss as text."""
    found = []
    for kind, policy, check in cases:
        torch.manual_seed(0)
        model = Model(**kind)
        job = Job(engine, policy=policy, accumulation=1, options={"check_gradients": check})
        built = engine_for(job, model, lambda m, b: m(**b))
        torch.manual_seed(rank)
        batch = {name: torch.randint(0, 11, (2, 6)) for name in ("input_ids", "labels")}
        try:
            found.append(f"loss {built.train_step([batch]).loss:.3f}")
        except PlanError as error:
            found.append(str(error))
        built.close()
    return found


ZERO = [f"deepspeed, ZeRO {stage}" for stage in range(4)]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        "fsdp1",
        "fsdp2",
        *(pytest.param(one, marks=[needs_deepspeed, *([pytest.mark.full] if one != ZERO[3] else [])]) for one in ZERO),
    ],
)
def test_a_lost_gradient_stops_every_rank(ranks: RankGroups, engine: str) -> None:
    plan = {"mode": "full", "blocks": ["layers.0", "layers.2"]}
    cases = [
        ({"exact": True}, plan, True),
        ({"exact": True}, plan, False),
        ({"exact": True}, "none", True),
        ({}, plan, True),
    ]
    if engine != "ddp":  # which waits for the gradient of every parameter
        cases.append(({"unused": True}, plan, True))
    for lost, unchecked, none, *healthy in ranks(2).run(outcomes, engine, cases):
        assert "layers.{0,2}.up.weight" in lost and "layers.{0,2}.down.bias" in lost and "layers.1" not in lost
        assert "without a plan it does" in lost and "train.check_gradients=false" in lost
        assert all(text.startswith("loss") for text in (unchecked, none, *healthy)), (unchecked, none, healthy)
