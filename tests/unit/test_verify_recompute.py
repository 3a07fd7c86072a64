"""A proof finds what a recompute does otherwise: other experts, other layers, an operation that it never reaches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_ckpt import verify
from tests.unit.proofs import WIDTH, Model, finding_at, proof_of


class Router(nn.Module):
    """Sends each token to one of four experts, all of them on all tokens or each on its own.

    Args:
        dense: each expert computes every token, and one result is chosen: shapes do not depend on the choice.
        in_buffer: its balance is a buffer, which a recompute finds as its forward did.
    """

    def __init__(self, dense: bool, in_buffer: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dense = dense
        if in_buffer:
            self.register_buffer("balance", torch.zeros(4))
        else:
            self.balance = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(self.router(x))
        pick = (score + self.balance).topk(1, dim=-1).indices.squeeze(-1)
        self.load = torch.bincount(pick.flatten(), minlength=4).float()
        if self.dense:
            every = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -2)
            return every.gather(-2, pick[..., None, None].expand(*pick.shape, 1, WIDTH)).squeeze(-2) * score.amax(
                -1, True
            )
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (pick == number).nonzero(as_tuple=True)
            out = out.index_put(rows, torch.tanh(expert(x[rows])) * score[rows][:, number, None])
        return out


def balanced_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Loss-free balancing, as between two micro-batches: the bias moves after the forward."""
    loss: Tensor = model(x)
    for module in model.modules():
        if isinstance(module, Router):
            module.balance = module.balance + 0.3 * torch.sign(module.load.mean() - module.load)
    return loss


@pytest.mark.parametrize("dense", [True, False])
def test_routing_that_flips_and_the_advice_that_helps(dense: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(lambda: Router(dense)), torch.randn(4, 16, WIDTH)
    proof = verify(model, x, balanced_loss, "full")
    found = finding_at(proof, "layers.{0-2}.part" if dense else "layers.2.part")
    assert "topk chose otherwise" in found.what and "balance" in found.what
    assert '{"mode": "selective", "save": ["topk"]}' in found.advice
    if dense:  # no error of torch's, and wrong gradients
        assert any(check.status == "differs" and check.relative > 1e-3 for check in proof.gradients)
    assert verify(model, x, balanced_loss, {"mode": "selective", "save": ["topk"]}).ok


def test_a_routing_bias_in_a_buffer_is_fine() -> None:
    torch.manual_seed(0)
    proof = verify(Model(lambda: Router(False, in_buffer=True)), torch.randn(4, 16, WIDTH), balanced_loss, "full")
    assert not [finding for finding in proof.findings if "topk" in finding.what], str(proof)
    assert all(check.status == "equal" for check in proof.gradients)


class Alternating(nn.Module):
    """Runs its inner layer every second time, from a state that is no buffer."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.turn = first

    def forward(self, x: Tensor) -> Tensor:
        self.turn = not self.turn
        return x if self.turn else x + self.inner(x)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_only_one_of_both_calls(first: bool) -> None:
    one, other = ("forward", "recompute") if first else ("recompute", "forward")
    found = finding_at(proof_of(lambda: Alternating(first)), "layers.2.part" if first else "layers.{0-2}.part")
    assert f"its {one} called inner, its {other} did not: turn was {first}" in found.what
    assert "register_buffer" in found.advice


class Leaky(nn.Module):
    """A leaky ReLU with random slopes, which the operation writes into a tensor that autograd has saved before."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


class Ending(nn.Module):
    """A block that ends with a given operation."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.into(x))


class EndingModel(Model):
    def __init__(self, last: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Identity)
        self.layers = nn.ModuleList(Ending(last()) for _ in range(3))


def test_rrelu_as_the_last_operation() -> None:
    torch.manual_seed(0)
    model, x = EndingModel(Leaky), torch.randn(2, 5, WIDTH)
    proof = verify(model, x, None, "full")
    found = finding_at(proof, "layers.{0-2}.last")
    assert "rrelu_with_noise" in found.what and "early_stop=false" in found.advice
    assert verify(model, x, None, {"mode": "full", "early_stop": False}).ok


def test_rrelu_as_a_module_is_refused() -> None:
    proof = proof_of(nn.RReLU)
    assert proof.is_refused and "early_stop=false" in proof.findings[-1].what


def test_what_fills_its_arguments_earlier_is_fine() -> None:
    assert proof_of(Leaky).ok


def test_a_norm_as_the_last_operation_is_fine() -> None:
    torch.manual_seed(0)
    proof = verify(EndingModel(lambda: nn.BatchNorm1d(5)), torch.randn(2, 5, WIDTH), None, "full")
    assert proof.ok, str(proof)
