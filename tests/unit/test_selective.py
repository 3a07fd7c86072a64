"""Mode ``selective``: the rules that its options mean, and options that do nothing or contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import OpRule
from dist_ckpt.planning import apply, make_plan
from dist_ckpt.planning.selective import DEFAULT_SAVE
from tests.unit.toys import EncoderDecoder, Stack


def rules_of(model: nn.Module, **options: Any) -> list[str]:
    """The rules of the first region."""
    return [str(rule) for rule in make_plan(model, {"mode": "selective"} | options).regions[0].save.ops]


def test_defaults_are_kept_where_they_occur() -> None:
    assert rules_of(Stack()) == [f"save {name} if present" for name in DEFAULT_SAVE]


def test_what_a_user_names_must_occur() -> None:
    assert rules_of(Stack(), save=["mm", "aten.topk"]) == ["save mm", "save aten.topk"]
    assert rules_of(Stack(), save=[], offload=["matmul"]) == ["offload matmul"]


def test_options_become_rules_in_the_order_in_which_they_win() -> None:
    options = {"offload": ["attention"], "every_nth_matmul": 2, "recompute_matmuls_of": ["mlp.*", "attention"]}
    assert rules_of(Stack(), **options, save=["matmul", "topk"]) == [
        "recompute matmul within mlp.*",
        "recompute matmul within attention",
        "offload attention",
        "save matmul every 2",
        "save topk",
    ]
    # What is offloaded is not kept by default as well.
    assert not any("save attention" in rule for rule in rules_of(Stack(), **options))
    assert rules_of(Stack(), every_nth_matmul=3, save=["addmm"]) == ["save addmm every 3"]


def test_only_blocks_that_have_a_module_get_its_rule() -> None:
    plan = make_plan(EncoderDecoder(), {"mode": "selective", "recompute_matmuls_of": ["linear1", "attention"]})
    within = {r.modules[0]: [rule.within for rule in r.save.ops if rule.action == "recompute"] for r in plan.regions}
    assert within["encoder.layers.0"] == ["attention"] and within["decoder.layers.1"] == ["linear1"]
    assert dict(plan.matched)["recompute_matmuls_of=linear1"] == 2


def test_a_word_stands_for_modules_of_other_names() -> None:
    decoder = EncoderDecoder().decoder
    rules = rules_of(decoder, recompute_matmuls_of="attention")
    assert rules[:2] == ["recompute matmul within self_attn", "recompute matmul within multihead_attn"]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"save": ["matmul", "aten.mm"]}, "ckpt.save: 'aten.mm' says nothing that the names before it do not say"),
    ({"save": ["mm", "mm"]}, "'mm' says nothing"),
    ({"offload": ["mm", "torch.ops.aten.mm"]}, "ckpt.offload: 'torch.ops.aten.mm' says nothing"),
    ({"save": ["mm"], "offload": ["matmul"]}, "ckpt.save and ckpt.offload both name 'mm'"),
    ({"every_nth_matmul": 2, "save": ["topk"]}, "every_nth_matmul=2 has nothing to count.*Add matmul"),
    ({"every_nth_matmul": 2, "offload": ["matmul"]}, "every_nth_matmul=2 has nothing to count"),
    ({"every_nth_matmul": 2, "save": ["mm", "addmm"]}, "would count mm and addmm each by itself: write matmul"),
    ({"every_nth_matmul": 0}, "ckpt.every_nth_matmul=0: must be at least 1"),
    ({"recompute_matmuls_of": "mlp", "save": ["topk"]}, "recompute_matmuls_of='mlp': ckpt.save keeps no matrix"),
    ({"recompute_matmuls_of": "**"}, "leaves no matrix product to keep: leave matmul out of ckpt.save"),
    ({"recompute_matmuls_of": ["mlp", "attn"]}, r"='attn' matches no module inside the blocks blocks.\{0-2\}; did you"),
    ({"recompute_matmuls_of": "chunk"}, "no chunk found"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[str(options) for options, _ in MISTAKES])
def test_options_without_effect_are_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(Stack(), {"mode": "selective"} | options)


def test_a_module_without_matrix_products_stops_the_first_forward() -> None:
    model = Stack()
    apply(model, {"mode": "selective", "recompute_matmuls_of": "norm"})
    with pytest.raises(PlanError, match=r"matmul within norm \(it ran in other modules"):
        model(torch.randn(2, 5, 4))


def test_the_greatest_magnitude_is_kept_for_scaling_factors() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = x / x.detach().abs().max()
            return ((x / x.detach().abs().amax(-1, keepdim=True)) * self.w).exp()

    model = nn.Sequential(Scaled(), Scaled())
    plan = apply(model, {"mode": "selective", "blocks": "Scaled", "save": ["amax"]})
    assert plan.regions[0].save.ops == (OpRule("save", "amax"),)
    model(torch.randn(8, 8)).sum().backward()
