"""Eight unlike architectures under every mode: bit for bit what they are without, or a refusal that says what to do."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_ckpt import PlanError, apply, make_plan, named_parameters
from dist_ckpt.blocks import find_blocks
from dist_ckpt.names import named_buffers
from dist_ckpt.policy import POLICIES
from tests.architectures import ARCHITECTURES, Case, build

EXAMPLES: Mapping[str, tuple[dict[str, Any], ...]] = types.MappingProxyType(
    {
        "none": ({},),
        "full": ({}, {"inputs": "offload"}),
        "every_k": ({"k": 2},),
        "first_n": ({"n": 1},),
        "selective": ({}, {"every_nth_matmul": 2}),
        "selective_attention": ({},),
        "segments": ({"k": 2}, {"k": "sqrt"}, {"k": 3, "skip_last": True}),
        "nested": ({"k": 2}, {"k": 2, "inner": ["block", "mlp"]}),
        "offload": ({},),
        "plan": ({"path": "plan.json"},),
    }
)
"""Options that each mode is tried with."""

FREE_OF_ATTENTION = "resnet", "unet3d", "recurrent"
FREE_OF_MLPS = "resnet", "unet3d", "recurrent"


@dataclass(frozen=True)
class Refusal:
    """What an architecture and a policy do not agree on, and what the message must tell the user to do."""

    message: str
    """A pattern that the PlanError has to contain."""


def expected_refusal(name: str, mode: str, options: Mapping[str, Any]) -> Refusal | None:
    """Every refusal of the matrix, with its reason; ``None`` where the results must be right."""
    if mode == "selective_attention" and name in FREE_OF_ATTENTION:  # there is nothing of the kind to recompute
        return Refusal(r"no attention found inside the blocks .*name the modules, relative to the block")
    if name == "recurrent" and options.get("skip_last"):  # one block is one segment, and that would be kept
        return Refusal(r"skip_last.*leaves no segment")
    if "mlp" in options.get("inner", ()) and name in FREE_OF_MLPS:
        return Refusal(r"no mlp found inside the blocks .*name the modules, relative to the block")
    return None


@dataclass(frozen=True)
class Outcome:
    losses: list[Tensor]
    grads: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    weights: dict[str, Tensor]
    keys: list[str]
    rng: Tensor


def train(case: Case, steps: int = 2) -> Outcome:
    """Two steps with dropout and SGD, so that the second one starts from what the first has left."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    losses, grads = [], []
    for _ in range(steps):
        loss = case.loss_fn(case.model, case.batch)
        loss.backward()
        losses.append(loss.detach())
        grads.append({n: p.grad.clone() for n, p in named_parameters(case.model) if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(
        losses,
        grads,
        {n: b.clone() for n, b in named_buffers(case.model)},
        {n: p.detach().clone() for n, p in named_parameters(case.model)},
        list(case.model.state_dict()),
        torch.get_rng_state(),
    )


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.keys == expected.keys
    assert all(map(torch.equal, found.losses, expected.losses))
    assert torch.equal(found.rng, expected.rng)
    pairs = (found.weights, expected.weights), (found.buffers, expected.buffers)
    for some, others in (*pairs, *zip(found.grads, expected.grads, strict=True)):
        assert list(some) == list(others)
        assert [name for name in some if not torch.equal(some[name], others[name])] == []


def check(name: str, mode: str, options: Mapping[str, Any], folder: Path) -> None:
    case = build(name)
    policy = {"mode": mode, **options}
    if mode == "plan":
        path = folder / options["path"]
        path.write_text(make_plan(case.model, {"mode": "full", **case.options}).to_json())
        policy["path"] = str(path)
    elif mode != "none":
        policy |= case.options
    refusal = expected_refusal(name, mode, options)
    if refusal is not None:
        with pytest.raises(PlanError, match=refusal.message):
            apply(case.model, policy, case.batch, case.loss_fn)
        return
    plan = apply(case.model, policy, case.batch, case.loss_fn)
    assert bool(plan.regions) == (mode != "none")
    assert_same(train(case), train(build(name)))


PAIRS = [(name, mode, options) for mode, tried in EXAMPLES.items() for name in ARCHITECTURES for options in tried]


def pair_id(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items()) or "-" if isinstance(value, Mapping) else str(value)


def test_every_mode_has_examples() -> None:
    assert {*EXAMPLES, "per_stage"} == set(POLICIES)  # that one is about pipelines


@pytest.mark.parametrize(("name", "mode", "options"), PAIRS[:: len(ARCHITECTURES) + 1], ids=pair_id)
def test_a_diagonal_of_the_matrix_changes_no_bit(name: str, mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    check(name, mode, options, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode", "options"), PAIRS, ids=pair_id)
def test_every_architecture_under_every_mode_changes_no_bit(
    name: str, mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    check(name, mode, options, tmp_path)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "recurrent"])
def test_blocks_are_found_without_help(name: str) -> None:
    case = build(name)
    assert find_blocks(case.model) == case.blocks


def test_a_loop_over_one_cell_has_no_blocks_to_find_and_says_how_to_name_it() -> None:
    case = build("recurrent")
    with pytest.raises(PlanError, match=r"Name them with ckpt.blocks: a class name or a glob.*Cell \(1\)"):
        make_plan(case.model, "full")
    for spec in ("Cell", "cell", "c*"):
        assert make_plan(case.model, {"mode": "full", "blocks": spec}).blocks == ("cell",)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_comparison_sees_what_a_recompute_could_change(name: str) -> None:
    """Without it, a test of equality could pass on models in which nothing is random and nothing is counted."""
    first = build(name)
    torch.manual_seed(5)
    expected = first.loss_fn(first.model, first.batch)
    assert not torch.equal(first.loss_fn(first.model, first.batch), expected)
    grads = train(build(name)).grads
    assert all(step.keys() == dict(named_parameters(first.model)).keys() for step in grads)
    if name in ("resnet", "unet3d", "moe"):
        before = {n: b.clone() for n, b in named_buffers(build(name).model)}
        after = train(build(name)).buffers
        assert all(not torch.equal(before[n], after[n]) for n in before if "bias" not in n)
