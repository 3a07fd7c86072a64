"""A proof finds randomness that no recompute replays, and names the module that draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.proofs import WIDTH, finding_at, proof_of


class Masked(nn.Module):
    """Multiplies with a random mask; ``draw`` gives it."""

    def __init__(self, draw: Callable[[torch.Size], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * self.draw(x.shape)


class Private(nn.Module):
    """Draws from a torch generator of its own, held in a list."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * (torch.rand(x.shape, generator=self.generators[0]) > 0.5)


class NumpyPrivate(Private):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [np.random.default_rng(1)]  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.from_numpy(self.generators[0].random(x.shape, dtype=np.float32))  # type: ignore


class Source:
    """An object of the user's that holds a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)


class FromObject(nn.Module):
    """Draws from a generator in an object, where no guard looks."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.rand(x.shape, generator=self.source.generator)


def numpy_mask(shape: torch.Size) -> Tensor:
    return torch.from_numpy(np.random.rand(*shape).astype(np.float32))


def python_mask(shape: torch.Size) -> Tensor:
    return torch.tensor([random.random() for _ in range(shape[-1])])


def mask_of_a_closure() -> Callable[[torch.Size], Tensor]:
    generator = random.Random(3)

    def draw(shape: torch.Size) -> Tensor:
        return torch.tensor([generator.random() for _ in range(shape[-1])])

    return draw


_GENERATOR = torch.Generator().manual_seed(5)


def mask_of_a_global(shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR)


@pytest.mark.parametrize(
    ("part", "stream"),
    [
        (Private, "generators[0]"),
        (NumpyPrivate, "generators[0]"),
        (FromObject, "source.generator"),
        (lambda: Masked(numpy_mask), "numpy.random"),
        (lambda: Masked(python_mask), "random"),
        (lambda: Masked(mask_of_a_closure()), "variable 'generator' around mask_of_a_closure.<locals>.draw"),
        (lambda: Masked(mask_of_a_global), f"global '_GENERATOR' of {__name__}"),
    ],
    ids=["torch", "numpy_private", "object", "numpy", "random", "closure", "global"],
)
def test_randomness_that_no_checkpoint_replays(part: Callable[[], nn.Module], stream: str) -> None:
    proof = proof_of(part)
    found = next(finding for finding in proof.findings if stream in finding.what)
    assert found.where == "layers.{0-2}.part", str(proof)
    assert f"draws from {stream}, which no checkpoint replays" in found.what
    assert "torch's own generators" in found.advice
    assert any(name.endswith(stream) for name in proof.streams)


def test_gradients_that_are_silently_wrong() -> None:
    proof = proof_of(FromObject)
    assert not proof.is_refused
    assert "gives backward tensors of other values" in finding_at(proof, "layers.{0-2}.part").what
    assert any(check.status == "differs" and check.relative > 0.1 for check in proof.gradients)


NESTED = {"mode": "nested", "k": 2}


@pytest.mark.parametrize(
    "plan", ["selective", {"mode": "segments", "k": 2}, NESTED, {"mode": "full", "inputs": "offload"}]
)
def test_the_module_to_blame_is_found_in_every_mode(plan: Any) -> None:
    proof = proof_of(FromObject, plan)
    blamed = {finding.where for finding in proof.findings if "draws from source.generator" in finding.what}
    assert all(where.endswith(".part") for where in blamed), str(proof)
    assert {n for where in blamed for n in "012" if n in where or "0-2" in where} == set("012"), str(proof)
    others = [finding.what for finding in proof.findings if finding.where not in blamed]
    assert all(what.startswith("gradients differ") for what in others), str(proof)


def test_offloading_alone_recomputes_nothing_and_is_fine() -> None:
    assert proof_of(FromObject, "offload").ok


class AddsNoise(FromObject):
    """An addition saves nothing for backward: only what the next layer is given shows the difference."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.source.generator)


class DrawsForAnother(FromObject):
    """Draws itself, and passes on what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.rand(x.shape, generator=self.source.generator))


@pytest.mark.parametrize(
    ("part", "says"),
    [(AddsNoise, "computed other values than its forward:"), (DrawsForAnother, "and gave them to inner:")],
)
def test_the_module_to_blame_is_the_one_that_draws(part: Callable[[], nn.Module], says: str) -> None:
    found = finding_at(proof_of(part), "layers.{0-2}.part")
    assert says in found.what and "draws from source.generator" in found.what


class DrawingInVain(FromObject):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) + 0 * torch.rand(x.shape, generator=self.source.generator)


def test_a_stream_that_only_ends_elsewhere() -> None:
    proof = proof_of(DrawingInVain)
    assert "its recompute draws again: it draws from source.generator" in finding_at(proof, "layers.{0-2}.part").what
    assert len(proof.findings) == 1 and all(check.status == "equal" for check in proof.gradients)


class SkippedByChance(nn.Module):
    """Drop path, with Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if random.random() < 0.5 else x


def test_a_layer_that_is_skipped_by_chance() -> None:
    found = finding_at(proof_of(SkippedByChance), "layers.{0-2}.part")
    assert "draws from random, which no checkpoint replays" in found.what and "torch's own generators" in found.advice


def test_what_a_guard_refuses_is_a_finding() -> None:
    proof = proof_of(lambda: nn.Dropout(0.5), {"mode": "full", "preserve_rng_state": False})
    found = finding_at(proof, "layers.0")
    assert found.what.startswith("the plan is refused: ") and "preserve_rng_state" in found.what
    assert proof.is_refused and proof.has_failed and "PlanError" in proof.notes[0]
