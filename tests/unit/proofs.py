"""Small models of which a part is of the kind that a test of proofs is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt import verify
from dist_ckpt.verification import Finding, Verification

WIDTH = 8


class Layer(nn.Module):
    """A block with one part of a kind that a test chooses. x: (batch, seq, width) → the same."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.part = part
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(self.part(torch.tanh(self.into(x)))))


class Model(nn.Module):
    """Three layers of a kind."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(part()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def proof_of(part: Callable[[], nn.Module], plan: Any = "full", **options: Any) -> Verification:
    torch.manual_seed(0)
    return verify(Model(part), torch.randn(2, 5, WIDTH), None, plan, **options)


def finding_at(verification: Verification, where: str) -> Finding:
    """The finding about a place; the report is in the message if there is none."""
    found = [finding for finding in verification.findings if finding.where == where]
    assert found, str(verification)
    return found[0]
