"""Policies, block discovery and plans: all pure data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch import nn

from dist_ckpt.blocks import find_blocks, glob_match
from dist_ckpt.errors import PlanError
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule, fold_names
from dist_ckpt.planning import apply, make_plan
from dist_ckpt.policy import POLICIES, EveryKPolicy, NoPolicy, SelectivePolicy, policy_from
from tests.unit.toys import EncoderDecoder, Residual, Stack


@pytest.mark.parametrize("mode", POLICIES)
def test_a_policy_survives_its_dict(mode: str) -> None:
    policy = policy_from(mode)
    assert policy_from(policy.to_dict()) == policy and policy.to_dict()["mode"] == mode
    assert policy_from(OmegaConf.create(policy.to_dict())) == policy


def test_no_policy_means_none() -> None:
    assert policy_from(None) == NoPolicy()
    assert make_plan(Stack(), None) == Plan()


MISTAKES: list[tuple[Any, str]] = [
    ("selectve", "did you mean 'selective'"),
    ({"mode": "ful"}, "did you mean 'full'"),
    ({"k": 2}, r"ckpt.k: no policy is chosen, and this is an option of every_k, segments, nested; set mode"),
    ({}, "needs a mode. Valid: every_k, first_n, full"),
    ({"kk": 2}, r"ckpt.kk: no policy is chosen; set mode"),
    ({"mode": "full", "blocks": [1]}, "must be a string or a list of strings"),
    ({"mode": "full", "k": 2}, "an option of every_k"),
    ({"mode": "every_k", "kk": 2}, "did you mean 'k'"),
    ({"mode": "every_k", "k": "2"}, "ckpt.k='2': must be an integer"),
    ({"mode": "every_k", "k": True}, "ckpt.k=true: must be an integer"),
    ({"mode": "every_k", "k": 0}, "at least 1"),
    ({"mode": "selective", "save": 3}, "ckpt.save=3: must be a string or a list of strings or null"),
    ({"mode": "selective", "save": []}, "ckpt.save is empty"),
    ({"mode": "full", "blocks": 3}, "ckpt.blocks=3: must be a string or a list of strings"),
    (3, "not int"),
]


@pytest.mark.parametrize(("spec", "message"), MISTAKES, ids=[str(spec) for spec, _ in MISTAKES])
def test_mistakes_in_a_policy_name_the_choices(spec: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        policy_from(spec)


def test_a_policy_made_in_python_is_checked_too() -> None:
    assert SelectivePolicy(save=["mm"]) == policy_from({"mode": "selective", "save": ("mm",)})  # type: ignore[arg-type]
    assert (
        make_plan(Stack(), {"mode": "selective", "save": "mm"}).regions
        == make_plan(Stack(), SelectivePolicy(save=("mm",))).regions
    )
    with pytest.raises(PlanError, match=r"ckpt.k=2.5: must be an integer"):
        EveryKPolicy(k=2.5)  # type: ignore[arg-type]


def test_blocks_are_the_repeated_composite_layers() -> None:
    assert find_blocks(Stack(3)) == ("blocks.0", "blocks.1", "blocks.2")
    assert find_blocks(Stack(1)) == ("blocks.0",)
    assert find_blocks(EncoderDecoder()) == (
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    )
    stages = nn.Sequential(nn.Conv2d(3, 4, 1), *(nn.Sequential(Residual(4), Residual(4)) for _ in range(2)))
    assert find_blocks(stages) == ("1", "2") and find_blocks(stages, "Residual") == ("1.0", "1.1", "2.0", "2.1")


def test_blocks_by_class_glob_and_several() -> None:
    model = Stack(3)
    assert find_blocks(model, "Block") == find_blocks(model, "blocks.*") == find_blocks(model)
    assert find_blocks(model, "**.mlp") == ("blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp")
    assert find_blocks(model, ("blocks.2", "blocks.0")) == ("blocks.0", "blocks.2")
    assert find_blocks(model, ("blocks.*", "SelfMix")) == find_blocks(model)  # nested matches belong to the outer one


def test_empty_lists_of_patterns_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"ckpt\.blocks is empty"):
        make_plan(Stack(), {"mode": "full", "blocks": []})
    with pytest.raises(PlanError, match=r"ckpt\.modules is empty"):
        make_plan(Stack(), {"mode": "selective_attention", "modules": []})


def test_blocks_that_are_not_there_are_an_error_that_lists_the_classes() -> None:
    with pytest.raises(PlanError, match=r"did you mean 'Block'\?.*Block \(3\)"):
        find_blocks(Stack(3), "Blck")
    with pytest.raises(PlanError, match=r"no blocks found in Sequential.*Linear \(2\)"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        ("layers.0", "layers.*", True),
        ("layers.0.mlp", "layers.*", False),
        ("layers.0.mlp", "layers.**", True),
        ("layers.0.mlp", "**.mlp", True),
        ("layers.10", "layers.?", False),
        ("layersx0", "layers.*", False),
    ],
)
def test_globs_keep_to_their_level(name: str, pattern: str, matches: bool) -> None:
    assert glob_match(name, pattern) is matches


def test_full_and_every_k() -> None:
    model = Stack(5)
    assert [r.modules for r in make_plan(model, "full").regions] == [(f"blocks.{i}",) for i in range(5)]
    plan = make_plan(model, EveryKPolicy(k=2))
    assert [r.modules[0] for r in plan.regions] == ["blocks.0", "blocks.2", "blocks.4"]
    assert plan.unmatched == ("blocks.1", "blocks.3")


def test_selective_attention_finds_the_attention() -> None:
    model = Stack(2)
    plan = make_plan(model, "selective_attention")
    assert [r.modules for r in plan.regions] == [("blocks.0.attention",), ("blocks.1.attention",)]
    assert plan.unmatched == ()
    mlps = make_plan(model, {"mode": "selective_attention", "modules": ["mlp"]})
    assert [r.modules for r in mlps.regions] == [("blocks.0.mlp",), ("blocks.1.mlp",)]
    with pytest.raises(
        PlanError, match=r"ckpt.modules='mpl' matches no module inside the blocks blocks.{0-1}; did.*'mlp'"
    ):
        make_plan(model, {"mode": "selective_attention", "modules": ["mlp", "mpl"]})
    with pytest.raises(PlanError, match="no attention found"):
        make_plan(nn.Sequential(Residual(2), Residual(2)), "selective_attention")


def test_what_a_user_names_is_required_and_a_default_is_not() -> None:
    assert not any(rule.required for rule in make_plan(Stack(), "selective").regions[0].save.ops)
    named = make_plan(Stack(), SelectivePolicy(save=("mm", "attention"))).regions[0].save.ops
    assert named == (OpRule("save", "mm"), OpRule("save", "attention")) and all(rule.required for rule in named)


def test_making_a_plan_touches_nothing() -> None:
    model = Stack()
    kinds = [type(m) for m in model.modules()]
    make_plan(model, "selective")
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("mode", [mode for mode in POLICIES if mode not in ("plan", "per_stage")])
def test_a_plan_survives_json(mode: str) -> None:
    plan = make_plan(Stack(), mode)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_nested_plan_survives_json_and_prints_its_levels() -> None:
    inner = Region(("a.0.x",), SaveRule(ops=(OpRule("recompute", "mm", required=False), OpRule("save", "matmul"))))
    plan = Plan(blocks=("a.0", "a.1"), regions=(Region(("a.0", "a.1"), inner=(inner,)),), policy={"mode": "nested"})
    assert Plan.from_json(plan.to_json()) == plan
    assert "recompute  a.{0-1}  [keep inputs only]" in str(plan)
    assert "    recompute  a.0.x  [recompute mm if present, save matmul]" in str(plan)
    assert list(plan.all_regions()) == [plan.regions[0], inner]


def test_a_plan_says_what_each_pattern_matched() -> None:
    policy = {"mode": "selective_attention", "modules": ["attention", "mlp"], "blocks": ["Block", "blocks.0"]}
    plan = make_plan(Stack(3), policy)
    assert plan.matched == (("blocks=Block", 3), ("blocks=blocks.0", 1), ("modules=attention", 3), ("modules=mlp", 3))
    assert "  matched    modules=mlp: 3 modules" in str(plan)


def test_blocks_are_found_in_a_model_that_has_a_plan() -> None:
    model = Stack(3)
    apply(model, EveryKPolicy(k=3))
    assert find_blocks(model) == find_blocks(Stack(3)) == find_blocks(model, "Block")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["regions"][0]["save"]["ops"][0].update(action="keep"), "no action 'keep'"),
        (lambda d: d["regions"][0]["save"]["ops"][0].update(op="*"), "only 'offload' takes every operation"),
        (lambda d: d["regions"][0]["save"]["ops"][0].update(calls=[-1]), "counted from 0"),
        (lambda d: d["regions"][0]["save"].update(inputs="lose"), "region inputs: no 'lose'"),
        (lambda d: d["regions"][0]["save"].update(outputs="keep"), "not a plan.*outputs"),
        (lambda d: d["regions"][0].update(determinism_check="all"), "no determinism_check 'all'"),
        (lambda d: d["regions"][0].update(modules=["blocks.0", "blocks.1"]), "belong to regions of one module"),
        (lambda d: d["regions"][0].update(modules=[]), "without modules"),
        (lambda d: d["regions"][0].update(early_stop="no"), "early_stop='no' must be true or false"),
        (lambda d: d.update(region=[]), "it has a field 'region'; did you mean 'regions'"),
        (lambda d: d["regions"][0].update(inner=[d["regions"][1]]), "does not lie inside"),
        (lambda d: d["regions"][0].update(inner=[dict(d["regions"][0])]), "does not lie inside"),
    ],
)
def test_a_plan_with_a_field_that_would_do_nothing_is_refused(change: Any, message: str) -> None:
    data = json.loads(make_plan(Stack(), SelectivePolicy(save=("mm",))).to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2}', '{"schema": 2, "blocks": 3}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


def test_names_are_folded() -> None:
    assert fold_names(("layers.0", "layers.1", "layers.2", "layers.4")) == ("layers.{0-2,4}",)
    assert fold_names(("a.0.x", "a.1.x", "b", "c.7")) == ("a.{0-1}.x", "b", "c.7")


def test_a_printed_plan_shows_regions_and_what_is_kept_whole() -> None:
    text = str(make_plan(Stack(5), EveryKPolicy(k=2)))
    assert "plan: every_k (k=2), 3 regions in 5 blocks" in text
    assert "recompute  blocks.{0,2,4}  [keep inputs only]" in text
    assert "kept whole blocks.{1,3}" in text
