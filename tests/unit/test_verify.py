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
from dist_ckpt.verification import Finding, GradientCheck, Verification, merge
from tests import hf_models
from tests.architectures import ARCHITECTURES, build
from tests.unit.test_architectures import PAIRS as ALL_PAIRS
from tests.unit.test_architectures import expected_refusal, pair_id
from tests.unit.toys import Stack

PAIRS = [pair for pair in ALL_PAIRS if pair[1] not in ("none", "plan") and expected_refusal(*pair) is None]
DIAGONAL = PAIRS[:: 2 * len(ARCHITECTURES) - 3]


def check_no_alarm(name: str, mode: str, options: dict[str, Any], mixed: bool = False) -> None:
    case = build(name)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return case.loss_fn(model, batch)

    proof = verify(case.model, case.batch, loss_fn, {"mode": mode, **options, **case.options})
    assert proof.ok and not proof.notes, str(proof)
    assert proof.regions and (proof.recomputes or mode == "offload")
    assert proof.gradients and all(check.status == "equal" for check in proof.gradients)
    assert proof.buffers == len(list(case.model.buffers()))
    assert {"torch", "random", "numpy.random"} <= set(proof.streams)
    assert "proven: the step is the same" in str(proof)


@pytest.mark.parametrize(("name", "mode", "options"), DIAGONAL, ids=pair_id)
def test_no_alarm_over_healthy_models(name: str, mode: str, options: dict[str, Any]) -> None:
    check_no_alarm(name, mode, options)


def test_no_alarm_under_autocast() -> None:
    check_no_alarm("decoder", "selective", {}, mixed=True)


@pytest.mark.full
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "mode", "options"), PAIRS, ids=pair_id)
def test_no_alarm_over_any_healthy_model(name: str, mode: str, options: dict[str, Any], mixed: bool) -> None:
    check_no_alarm(name, mode, options, mixed)


def decoder() -> tuple[nn.Module, Any]:
    case = build("decoder")
    return case.model, case.batch


def test_no_alarm_over_a_model_that_makes_a_cache_without_a_plan() -> None:
    proof = verify(hf_models.build("gpt2"), hf_models.batch_for("gpt2"), None, "full")
    assert proof.ok and not proof.notes, str(proof)


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
    case = build("resnet")
    frozen = next(module for module in case.model.modules() if isinstance(module, nn.BatchNorm2d))
    frozen.eval()
    proof = verify(case.model, case.batch, case.loss_fn, {"mode": "full", **case.options})
    assert proof.ok, str(proof)
    assert not frozen.training


def test_a_plan_that_is_applied_already() -> None:
    torch.manual_seed(0)
    model, batch = decoder()
    plan = dist_ckpt.apply(model, "full")
    assert verify(model, batch, None, plan).recomputes == len(plan.regions)


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


def test_noise_inside_a_region_is_no_fault() -> None:
    model, batch = noisy(0.0)
    model.blocks[1].mlp.insert(0, Unseeded(1e-5, iter([0.0, 1.0, 0.5, 0.7])))  # the last two: forward and recompute
    proof = verify(model, batch, None, "full")
    assert proof.ok and "not deterministic" in proof.notes[0], str(proof)


def test_a_fault_is_told_apart_from_noise() -> None:
    model, batch = noisy(1e-5)
    model.blocks[1].mlp.insert(0, Unseeded(1.0, itertools.chain([0.1, 0.1], itertools.count())))
    proof = verify(model, batch, None, "full")
    assert "blocks.1.mlp.0" in [finding.where for finding in proof.findings], str(proof)


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
    assert "random stream torch: ends elsewhere with the plan" in texts
    assert {check.status for check in proof.gradients} == {"differs", "only without the plan"}


class Telling(nn.Module):
    """Keeps the name of the forward that ran, which is another one with a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ran = ""

    def forward(self, x: Tensor) -> Tensor:
        self.ran = type(self).__mro__[0].__dict__.get("forward", Telling.forward).__code__.co_filename[-14:]
        return torch.tanh(self.linear(x))


def test_state_that_a_forward_leaves_otherwise() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Telling(), Telling())
    proof = verify(model, torch.randn(2, 8), None, {"mode": "full", "blocks": "1"})
    assert [finding.where for finding in proof.findings] == ["1"], str(proof)
    assert "ran ends as" in proof.findings[0].what and "with the plan" in proof.findings[0].what


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
    with pytest.raises(PlanError, match="meta device"):
        verify(Stack().to("meta"), batch, None, "full")
    model.kept = model(batch)
    with pytest.raises(PlanError, match="cannot be copied"):
        verify(model, batch, None, "full")


def test_regions_that_nothing_recomputes_are_noted() -> None:
    proof = verify(Stack(), torch.randn(2, 5, 4), lambda m, x: m.head(m.embed(x)).sum(), "full")
    assert proof.ok and "no region was recomputed" in proof.notes[0]


def test_regions_that_the_step_does_not_call_are_noted() -> None:
    def first_only(model: nn.Module, x: Tensor) -> Tensor:
        return model.head(model.blocks[0](model.embed(x))).sum()

    proof = verify(Stack(), torch.randn(2, 5, 4), first_only, "full")
    assert proof.ok and proof.notes == ("not called in this step, so not proven: blocks.{1-2}",)


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
