"""The proof of a plan: no alarm over what is right, nothing of the user's touched, what cannot be proven refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dist_ckpt
from dist_ckpt import PlanError, make_plan, verify
from dist_ckpt.policy import POLICIES
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.verification import Finding, GradientCheck, Verification, merge
from tests.unit.toys import Stack

MODES = [mode for mode in POLICIES if mode not in ("none", "plan")]


def decoder() -> tuple[nn.Module, Any]:
    """Our transformer with dropout, on a batch of tokens."""
    model = Transformer(
        ModelConfig(n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, vocab_size=61, dropout=0.1)
    )
    model.init_buffers()
    init_parameters(model, 3, 3)
    tokens = torch.randint(0, 61, (2, 17))
    return model, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


class ResBlock(nn.Module):
    """x: (batch, channels, height, width) → the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu_(self.norm1(self.conv1(x))))))


def resnet() -> tuple[nn.Module, Any]:
    """Convolutions with BatchNorm, the last of them in front of a sum, on images."""
    blocks = [ResBlock(4) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*blocks), nn.Dropout2d(0.3)), torch.randn(2, 3, 8, 8)


def mixed_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def policy_of(mode: str, model_name: str) -> Any:
    policy: dict[str, Any] = {"mode": mode}
    if mode == "selective_attention" and model_name == "resnet":
        policy["modules"] = "conv2"
    return policy


FAST = [("decoder", mode) for mode in MODES] + [("resnet", "full"), ("autocast", "selective")]
OTHERS = [(name, mode) for name in ("resnet", "autocast") for mode in MODES if (name, mode) not in FAST]


@pytest.mark.parametrize(("model_name", "mode"), [*FAST, *(pytest.param(*c, marks=pytest.mark.full) for c in OTHERS)])
def test_no_alarm_over_a_healthy_model(model_name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, batch = resnet() if model_name == "resnet" else decoder()
    proof = verify(model, batch, mixed_loss if model_name == "autocast" else None, policy_of(mode, model_name))
    assert proof.ok and not proof.notes, str(proof)
    assert proof.regions and (proof.recomputes or mode == "offload")
    assert proof.gradients and all(check.status == "equal" for check in proof.gradients)
    assert proof.buffers == len(list(model.buffers())) and {"torch", "random", "numpy.random"} <= set(proof.streams)
    assert "proven: the step is the same" in str(proof)


def test_memory_and_flops_are_those_of_plan_cost() -> None:
    torch.manual_seed(0)
    model, batch = decoder()
    plan = make_plan(model, "full")
    proof, cost = verify(model, batch, None, plan), dist_ckpt.plan_cost(model, plan, batch)
    assert (proof.saved_bytes, proof.baseline_saved_bytes) == (cost.saved_bytes, cost.baseline_saved_bytes)
    assert (proof.flops, proof.baseline_flops) == (cost.flops, cost.baseline_flops)


class Teacher:
    """A loss that keeps a module, a history and a generator of its own."""

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(2)
        self.history: list[float] = []
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        noise = torch.rand(2, generator=self.generator) + float(np.random.rand()) + random.random()
        loss = self.norm((model(batch) + noise).flatten(0, 1)).square().mean() + torch.rand(())
        self.history.append(loss.item())
        return loss


def test_nothing_of_the_users_is_touched() -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = Stack(p=0.5), torch.randn(2, 5, 4), Teacher()
    model.eval()
    model.blocks[0].mlp.train()
    model.register_buffer("count", torch.zeros(()))
    loss_fn(model, batch).backward()

    def everything() -> list[Any]:
        tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), batch]
        tensors += [*loss_fn.norm.state_dict().values(), torch.get_rng_state(), loss_fn.generator.get_state()]
        flags = [module.training for module in model.modules()]
        return [
            *(t.tolist() for t in tensors),
            flags,
            random.getstate(),
            str(np.random.get_state()),
            loss_fn.history[:],
        ]

    before = everything()
    assert verify(model, batch, loss_fn, "full").ok
    after = everything()
    assert len(loss_fn.history) == 1
    assert all(one == other for one, other in zip(before, after, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_frozen_norm_stays_frozen() -> None:
    torch.manual_seed(0)
    model, batch = resnet()
    model[1][0].norm1.eval()
    assert verify(model, batch, None, "full").ok


def test_a_plan_that_is_applied_already() -> None:
    torch.manual_seed(0)
    model, batch = decoder()
    plan = dist_ckpt.apply(model, "full")
    assert verify(model, batch, None, plan).recomputes == 3


class Unseeded(nn.Module):
    """Noise from a source that nothing can put back, as the clock or the system: another number each time."""

    def __init__(self, scale: float, numbers: Iterator[float]) -> None:
        super().__init__()
        self.noise = lambda: scale * next(numbers)  # a function, so that copies share the source

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * (1 + self.noise())


def noisy(scale: float) -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    model = Stack()
    model.head = nn.Sequential(Unseeded(scale, iter([0.0, 1.0, 0.5])), model.head)
    return model, torch.randn(2, 5, 4)


def test_a_step_that_is_not_deterministic_by_itself() -> None:
    proof = verify(*noisy(1e-5), None, "full")
    assert proof.ok and "the step itself is not deterministic" in proof.notes[0], str(proof)
    assert "e-05" in proof.notes[0] or "e-06" in proof.notes[0]

    proof = verify(*noisy(1.0), None, "full")
    assert "the step itself is not deterministic" in proof.findings[0].what, str(proof)
    assert "nothing can be proven" in proof.findings[0].what


def test_a_fault_is_told_apart_from_noise() -> None:
    model, batch = noisy(1e-5)
    model.blocks[1].mlp.append(Unseeded(1.0, itertools.chain([0.1, 0.1], itertools.count())))
    proof = verify(model, batch, None, "full")
    assert "blocks.1.mlp.4" in [finding.where for finding in proof.findings], str(proof)


class ByClass(nn.Module):
    """Calls those of its layers whose class is exactly the one that it knows, which a plan's subclass is not."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if type(layer) is self.kind:
                x = layer(x)
        return self.head(x).square().mean()


def test_a_forward_that_does_something_else_with_a_plan() -> None:
    torch.manual_seed(0)
    proof = verify(ByClass(), torch.randn(2, 5, 8), None, "full")
    texts = [str(finding) for finding in proof.findings]
    assert any("the forward itself computes something else with the plan" in text for text in texts)
    assert any("layers.{0-1}" in text and "no gradient with the plan, and one without" in text for text in texts)
    assert {check.status for check in proof.gradients} == {"differs", "only without the plan"}


class Raising(nn.Module):
    """Fails in a recompute: it counts, and refuses to be called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("called twice")
        return torch.sigmoid(x)


def test_an_error_that_only_the_plan_brings_is_a_finding() -> None:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[1].mlp[1] = Raising()
    proof = verify(model, torch.randn(2, 5, 4), None, "full")
    found = next(finding for finding in proof.findings if "the step fails with the plan" in finding.what)
    assert found.where == "blocks.1.mlp.1" and "KeyError: 'called twice'" in found.what


def test_an_error_of_the_step_itself_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verify(Stack(), torch.randn(2, 5, 3), None, "full")


def test_what_cannot_be_proven_is_refused() -> None:
    model, batch = Stack(), torch.randn(2, 5, 4)
    with pytest.raises(PlanError, match="matches no module"):
        verify(model, batch, None, {"mode": "full", "blocks": "nothing"})
    with pytest.raises(PlanError, match="has to call the model that it is given"):
        verify(model, batch, lambda _, x: model(x).sum(), "full")
    with pytest.raises(PlanError, match="scalar tensor that needs a gradient"):
        verify(model, batch, lambda m, x: m(x), "full")
    with pytest.raises(PlanError, match="before sharding and compiling"):
        verify(torch.compile(model), batch, None, "full")  # type: ignore[arg-type]
    model.kept = model(batch)
    with pytest.raises(PlanError, match="cannot be copied"):
        verify(model, batch, None, "full")


def test_regions_that_nothing_recomputes_are_noted() -> None:
    proof = verify(Stack(), torch.randn(2, 5, 4), lambda m, x: m.head(m.embed(x)).sum(), "full")
    assert proof.ok and "no region was recomputed" in proof.notes[0]


def test_one_report_of_all_ranks() -> None:
    def rank(findings: tuple[Finding, ...], max_abs: float, saved: int) -> Verification:
        check = GradientCheck("w", "differs" if max_abs else "equal", max_abs, max_abs)
        return Verification("full", findings, gradients=(check,), saved_bytes=saved, baseline_saved_bytes=9)

    everywhere, here = Finding("a", "is wrong"), Finding("b", "too")
    whole = merge([rank((everywhere,), 0.0, 5), rank((everywhere, here), 0.5, 4)])
    assert whole.findings[:2] == (everywhere, Finding("b", "too (on rank 1)"))
    assert "gradients differ" in whole.findings[2].what and len(whole.findings) == 3
    assert whole.gradients[0].max_abs == 0.5 and whole.saved_bytes == 5 and not whole.ok


def test_the_function_has_the_packages_name_for_it() -> None:
    assert dist_ckpt.verify is verify
    assert callable(dist_ckpt.verify)
