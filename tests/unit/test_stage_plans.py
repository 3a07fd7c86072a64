"""Plans of pipelines: within each stage, a policy of its own for each, cut for other stages, one stage's part."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dist_ckpt import Plan, PlanError, Region, apply_plan, make_plan
from dist_ckpt.blocks import find_blocks
from dist_ckpt.engines.stage import keep_stage
from dist_ckpt.plan import OpRule, SaveRule, Stages, stages_of
from dist_ckpt.policy import NestedPolicy, NoPolicy, PerStagePolicy, SelectivePolicy, policy_from
from dist_ckpt.trainer.config import config_from_yaml, config_yaml, load_config
from dist_ckpt.wrap.module import is_recomputed
from tests.unit.toys import Block, Stack


def stages_for(*counts: int) -> Stages:
    """Stages of a Stack with so many blocks each."""
    names: list[list[str]] = []
    start = 0
    for count in counts:
        names.append([f"blocks.{n}" for n in range(start, start + count)])
        start += count
    names[0].insert(0, "embed")
    names[-1].append("head")
    return tuple(map(tuple, names))


def spans(plan: Plan) -> list[str]:
    """Blocks of each region, by number: ``0-3``, ``4``."""
    numbers = [[name.split(".")[1] for name in region.modules] for region in plan.regions]
    return ["-".join(dict.fromkeys((span[0], span[-1]))) for span in numbers]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"mode": "segments", "k": 4}, ["0-3", "4-5", "6-9", "10-11"]),
        ({"mode": "nested", "k": 4}, ["0-3", "4-5", "6-9", "10-11"]),
        ({"mode": "segments", "k": 4, "skip_last": True}, ["0-3", "6-9"]),
        ({"mode": "segments", "k": "sqrt"}, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"]),
        ({"mode": "every_k", "k": 4}, ["0", "4", "6", "10"]),
        ({"mode": "first_n", "n": 2}, ["0", "1", "6", "7"]),
        ({"mode": "segments", "k": 3, "exclude": "blocks.1"}, ["0", "2-4", "5", "6-8", "9-11"]),
    ],
    ids=str,
)
def test_a_policy_starts_anew_in_each_stage(policy: Any, expected: list[str]) -> None:
    plan = make_plan(Stack(12), policy, stages=stages_for(6, 6))
    assert spans(plan) == expected
    assert plan.stages == stages_for(6, 6)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("policy", ["full", "selective", "selective_attention", "offload", "none"])
def test_modes_without_counts_are_what_they_are_without_stages(policy: str) -> None:
    model, stages = Stack(4), stages_for(1, 3)
    assert make_plan(model, policy, stages=stages).cut(()).regions == make_plan(model, policy).regions


def test_a_batch_measures_each_stage_by_itself() -> None:
    batch = torch.randn(2, 5, 4)
    policy = {"mode": "segments", "k": "sqrt"}
    plan = make_plan(Stack(6), policy, batch, stages=stages_for(4, 2))
    whole = make_plan(Stack(6), policy, batch)
    assert spans(plan) == spans(whole) == [str(n) for n in range(6)]
    assert any("√(n·input/block)" in note for note in plan.notes)
    assert make_plan(Stack(6), {"mode": "full", "min_bytes": 1}, batch, stages=stages_for(4, 2)).regions


def test_a_stage_without_blocks_takes_any_policy() -> None:
    stages = (("embed",), ("blocks.0", "blocks.1"), ("head",))
    plan = make_plan(Stack(2), {"mode": "segments", "k": 2}, stages=stages)
    assert spans(plan) == ["0-1"] and [len(plan.part(n).regions) for n in range(3)] == [0, 1, 0]


def test_per_stage_plans_each_stage_by_its_own_policy() -> None:
    policies = ["full", {"mode": "nested", "k": 2, "inner": ["attention", "mlp"]}, "none", {"mode": "selective"}]
    stages = stages_for(2, 3, 1, 2)
    plan = make_plan(Stack(8), {"mode": "per_stage", "per_stage": policies}, stages=stages)
    assert spans(plan) == ["0", "1", "2-3", "4", "6", "7"]
    assert plan.regions[2].inner and plan.regions[4].save.ops
    assert plan.blocks == tuple(f"blocks.{n}" for n in range(8)) and plan.unmatched == ("blocks.5",)
    assert ("inner=mlp in stage 1", 3) in plan.matched and ("blocks=auto in stage 3", 2) in plan.matched
    assert Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "plan: per_stage, 6 regions in 8 blocks, 4 stages" in text
    assert "  stage 0    embed, blocks.{0-1}: full\n" in text
    assert "  stage 1    blocks.{2-4}: nested (k=2, inner=['attention', 'mlp'])\n" in text
    assert "  stage 2    blocks.5: none\n" in text and "  stage 3    blocks.{6-7}, head: selective\n" in text


def test_per_stage_is_written_in_every_way_a_policy_is() -> None:
    expected = PerStagePolicy(per_stage=(policy_from("full"), NestedPolicy(k=2), NoPolicy()))
    data = {"mode": "per_stage", "per_stage": ["full", {"mode": "nested", "k": 2}, None]}
    for spec in (data, {"per_stage": data["per_stage"]}, OmegaConf.create(data), expected, expected.to_dict()):
        assert policy_from(spec) == expected
    assert json.loads(json.dumps(expected.to_dict()))["per_stage"][1]["k"] == 2
    assert PerStagePolicy(["none", SelectivePolicy()]).per_stage == (NoPolicy(), SelectivePolicy())  # type: ignore[arg-type]


def test_per_stage_on_the_command_line() -> None:
    value = "ckpt.per_stage=[full,{mode: selective, save: [mm]},none,null]"
    expected = PerStagePolicy(
        (policy_from("full"), SelectivePolicy(save=("mm",)), NoPolicy(), NoPolicy()),
    )
    for arguments in (["+ckpt=per_stage", value], ["ckpt=per_stage", value], [value]):
        config = load_config(arguments)
        assert config.ckpt == expected and config_from_yaml(config_yaml(config)) == config


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("full", r"ckpt\.per_stage='full': must be a list .* as in \[full"),
        ({"mode": "full"}, "must be a list"),
        (3, "must be a list"),
        (["full", "ful"], r"ckpt\.per_stage\[1\]: .*did you mean 'full'"),
        (["full", {"mode": "full", "k": 2}], r"ckpt\.per_stage\[1\]: ckpt\.k: no option of mode 'full'"),
        (["plan"], r"ckpt\.per_stage\[0\]: mode 'plan' is about all stages"),
        (
            [{"per_stage": ["full"]}],
            r"ckpt\.per_stage\[0\]: mode 'per_stage' is about all stages.*Valid: every_k, first_n",
        ),
    ],
    ids=str,
)
def test_what_is_no_policy_per_stage(spec: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        policy_from({"mode": "per_stage", "per_stage": spec})


def test_options_of_other_modes_are_refused_beside_per_stage() -> None:
    for options in ({"k": 2}, {"mode": "per_stage", "k": 2}):
        with pytest.raises(PlanError, match=r"ckpt\.k: no option of mode 'per_stage'"):
            policy_from({"per_stage": ["full"], **options})
    with pytest.raises(PlanError, match=r"ckpt\.per_stage: no option of mode 'full'"):
        policy_from({"mode": "full", "per_stage": ["full"]})


EMBEDDING_ALONE: Stages = (("embed",), ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"))


@pytest.mark.parametrize(
    ("policies", "stages", "message"),
    [
        (["full", "none"], (), r"there are no stages.*engine=deepspeed_pipe"),
        (["full"], stages_for(2, 2), r"has 1 policy, and there are 2 stages \(engine\.stages\): .* 'none' where"),
        (["full"] * 3, stages_for(2, 2), r"has 3 policies, and there are 2 stages.*one for each stage"),
        ([], stages_for(2, 2), r"has 0 policies"),
        (["full", "full"], EMBEDDING_ALONE, r"\[0\]: stage 0 has no blocks, only embed; mode 'none' leaves"),
        (
            ["none", {"mode": "first_n", "n": 3}],
            stages_for(2, 2),
            r"per_stage\[1\]: ckpt\.n=3: there are 2 blocks; mode 'full'",
        ),
        (
            ["none", {"mode": "full", "exclude": "blocks.0"}],
            stages_for(2, 2),
            r"\[1\]: ckpt\.exclude='blocks.0' matches no",
        ),
        (["none", {"mode": "full", "min_bytes": 3}], stages_for(2, 2), r"\[1\]: ckpt\.min_bytes=3 needs a batch"),
    ],
    ids=str,
)
def test_policies_that_do_not_fit_the_stages(policies: Any, stages: Stages, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(Stack(4), {"mode": "per_stage", "per_stage": policies}, stages=stages)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"mode": "first_n", "n": 3},
            r"there are 2 blocks in stage 1; mode 'full' recomputes them all; mode 'per_stage'",
        ),
        (
            {"mode": "segments", "k": 2, "skip_last": True},
            r"leaves no segment in stage 1: ckpt\.k=2 makes blocks\.\{4-5\}",
        ),
    ],
    ids=str,
)
def test_the_stage_that_a_policy_does_not_fit_is_named(policy: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(Stack(6), policy, stages=stages_for(4, 2))


def test_stages_that_are_not_the_models_or_cut_a_block_are_refused() -> None:
    with pytest.raises(PlanError, match=r"stage 1 owns 'blocks\.2', which Stack does not have"):
        make_plan(Stack(2), "full", stages=stages_for(2, 1))
    halves = (("embed", "blocks.0.norm", "blocks.0.attention"), ("blocks.0.mlp", "blocks.1", "head"))
    with pytest.raises(PlanError, match=r"the block 'blocks\.0' lies in stages 0 and 1: one stage has to own it"):
        make_plan(Stack(2), "full", stages=halves)
    with pytest.raises(PlanError, match=r"the block 'blocks\.1' lies in no stage"):
        make_plan(Stack(2), "full", stages=(("embed", "blocks.0"), ("head",)))
    assert make_plan(
        Stack(2), {"mode": "full", "blocks": "SelfMix"}, stages=(*halves[:1], ("blocks.0.mlp", "blocks.1"))
    )


def test_a_region_over_a_boundary_cannot_be_written_down() -> None:
    with pytest.raises(PlanError, match=r"the region of blocks\.1 \+ blocks\.2 lies in stages 0 and 1"):
        Plan(regions=(Region(("blocks.1", "blocks.2")),), stages=stages_for(2, 2))
    data = json.loads(make_plan(Stack(4), "full", stages=stages_for(2, 2)).to_json())
    data["regions"][0]["modules"] = ["blocks.0", "blocks.2"]
    with pytest.raises(PlanError, match="lies in stages 0 and 1"):
        Plan.from_json(json.dumps(data))
    data["regions"][0]["modules"], data["stage"] = ["blocks.0"], "1"
    with pytest.raises(PlanError, match="stage '1' is no number"):
        Plan.from_json(json.dumps(data))


def test_a_cut_splits_what_straddles_and_keeps_the_rest() -> None:
    plan = make_plan(Stack(12), {"mode": "nested", "k": 4, "inner": ["block", "attention"]})
    cut = plan.cut(stages_for(6, 6))
    assert spans(cut) == ["0-3", "4-5", "6-7", "8-11"]
    assert cut.regions[0] == plan.regions[0] and cut.regions[3] == plan.regions[2]
    assert cut.regions[1].inner + cut.regions[2].inner == plan.regions[1].inner
    assert cut.notes[-1] == "split where a stage ends: blocks.{4-7}"
    assert cut.cut(stages_for(6, 6)) is cut and Plan.from_json(cut.to_json()) == cut
    assert (cut.blocks, cut.policy, cut.matched) == (plan.blocks, plan.policy, plan.matched)


def test_a_piece_of_one_block_is_the_region_that_was_nested_there() -> None:
    """As an outer region it waits for backward as the segment around it did."""
    policy = {"mode": "nested", "k": 3, "save": "mm", "inputs": "offload", "determinism_check": "none"}
    plan = make_plan(Stack(6), policy)
    first, second, *_ = plan.cut(stages_for(1, 5)).regions
    rules = (OpRule("save", "mm"),)
    assert first == Region(("blocks.0",), SaveRule("offload", rules), determinism_check="none")
    assert second.modules == ("blocks.1", "blocks.2") and second.save == SaveRule("offload")
    assert [inner.save for inner in second.inner] == [SaveRule(ops=rules)] * 2


def test_a_piece_keeps_what_was_nested_beside_the_region_that_it_becomes() -> None:
    inner = (Region(("blocks.0",)), Region(("blocks.0.mlp",)))
    first, _ = Plan(regions=(Region(("blocks.0", "blocks.1"), inner=inner),)).cut(stages_for(1, 1)).regions
    assert first == Region(("blocks.0",), inner=(Region(("blocks.0.mlp",)),))


def test_segments_that_nest_are_split_at_each_level() -> None:
    names = tuple(f"blocks.{n}" for n in range(6))
    inner = (Region(names[:3], inner=(Region(names[:2]),)), Region(names[3:]))
    cut = Plan(regions=(Region(names, inner=inner),)).cut(stages_for(1, 3, 2))
    assert cut.regions == (
        Region(names[:1]),
        Region(names[1:4], inner=(Region(names[1:3], inner=(Region(names[1:2]),)), Region(names[3:4]))),
        Region(names[4:]),
    )
    assert len(cut.notes) == 4


def test_a_plan_knows_what_it_was_planned_for() -> None:
    stages, others = stages_for(2, 2), stages_for(1, 3)
    plan = make_plan(Stack(4), {"per_stage": ["full", "none"]}, stages=stages)
    cut = plan.cut(others)
    assert cut.planned_for == stages and "planned for 2 other stages" in str(cut)
    assert ": full\n" in str(plan) and ": full\n" not in str(cut)  # which would no longer be so
    assert spans(cut) == ["0", "1"] and cut.cut(stages) == plan
    dropped = cut.cut(())
    assert dropped.stages == () and dropped.planned_for == stages and spans(dropped) == ["0", "1"]
    assert "planned for 2 stages that this model does not have" in str(dropped)
    apply_plan(Stack(4), dropped)


def test_a_single_thing_is_no_plural() -> None:
    plan = make_plan(Stack(1), "full", stages=stages_for(1))
    assert "1 region in 1 block, 1 stage\n" in str(plan)
    cut = make_plan(Stack(2), "full", stages=stages_for(2)).cut(stages_for(1, 1))
    assert str(cut).endswith("planned for 1 other stage")


def test_a_plan_of_more_layers_is_for_another_model() -> None:
    plan = make_plan(Stack(3), {"mode": "full", "exclude": "blocks.2"}, stages=stages_for(2, 1))
    with pytest.raises(PlanError, match=r"names 'blocks\.2', and the stages own .*blocks\.\{0-1\}.* another model"):
        plan.cut(stages_for(1, 1))


def test_what_a_cut_cannot_do_is_said() -> None:
    whole = Plan(regions=(Region(("blocks",)),))
    with pytest.raises(PlanError, match=r"'blocks' lies in no stage: one stage has to own it"):
        whole.cut(stages_for(1, 1))
    part = make_plan(Stack(2), "full", stages=stages_for(1, 1)).part(0)
    with pytest.raises(PlanError, match="the part of stage 0 alone: cut the whole plan"):
        part.cut(())
    with pytest.raises(PlanError, match=r"no part for stage 1: this plan has 2 stages and is the part of stage 0"):
        part.part(1)
    for stage in (-1, 2):
        with pytest.raises(PlanError, match=f"no part for stage {stage}"):
            make_plan(Stack(2), "full", stages=stages_for(1, 1)).part(stage)


def test_a_written_plan_is_replayed_on_other_stages(tmp_path: Path) -> None:
    model, file = Stack(12), tmp_path / "plan.json"
    replay = {"mode": "plan", "path": str(file)}
    plan = make_plan(model, {"mode": "segments", "k": 4}, stages=stages_for(4, 4, 4))
    file.write_text(plan.to_json())
    assert make_plan(model, replay, stages=plan.stages) == plan
    again = make_plan(model, replay, stages=stages_for(6, 6))
    assert spans(again) == ["0-3", "4-5", "6-7", "8-11"] and again.stages == stages_for(6, 6)
    assert make_plan(model, replay).stages == ()
    with pytest.raises(PlanError, match=r"plan\.json: the plan says nothing about blocks.12"):
        make_plan(Stack(13), replay, stages=stages_for(6, 7))
    file.write_text(plan.part(1).to_json())
    with pytest.raises(PlanError, match=r"plan\.json: this is the part of stage 1 alone"):
        make_plan(model, replay, stages=plan.stages)


def test_a_plan_that_was_written_before_there_were_stages_is_read() -> None:
    plan = make_plan(Stack(2), "full")
    data = json.loads(plan.to_json())
    del data["planned_for"], data["stage"]
    assert Plan.from_json(json.dumps(data)) == plan


def stage_model(model: nn.Module, stages: Stages, stage: int) -> nn.Module:
    """One stage's modules of a copy, under their own names."""
    own = copy.deepcopy(model)
    keep_stage(own, stages, stage)
    return own


def test_a_part_is_applied_to_the_model_of_its_stage() -> None:
    stages = (("embed",), ("blocks.0",), ("blocks.1", "blocks.2", "head"))
    plan = make_plan(Stack(3), "full", stages=stages)
    for stage, expected in enumerate([[], ["blocks.0"], ["blocks.1", "blocks.2"]]):
        model, part = stage_model(Stack(3), stages, stage), plan.part(stage)
        apply_plan(model, part)
        assert [name for name, module in model.named_modules() if is_recomputed(module)] == expected
        assert f"stage {stage} of 3\n" in str(part) and str(part).count("  stage ") == 1
        assert Plan.from_json(part.to_json()) == part


def test_a_segment_of_a_part_runs_as_one() -> None:
    torch.manual_seed(0)
    stages, whole = stages_for(1, 3), Stack(4)
    model = stage_model(whole, stages, 1)
    apply_plan(model, make_plan(whole, {"mode": "segments", "k": 3}, stages=stages).part(1))
    forwards: list[str] = []
    for name in ("blocks.1", "blocks.2", "blocks.3"):
        model.get_submodule(f"{name}.norm").register_forward_hook(lambda *_, name=name: forwards.append(name))
    x = torch.randn(2, 3, 8, requires_grad=True)
    other = x.detach().requires_grad_()
    out = x
    for block in model.blocks.children():  # an index would count those that are left
        out = block(out)
    out.sum().backward()
    for block in list(whole.blocks)[1:]:
        other = block(other) if other.grad_fn else block(start := other)
    other.sum().backward()
    assert torch.equal(x.grad, start.grad)
    assert sorted(forwards) == sorted(["blocks.1", "blocks.2", "blocks.3"] * 2)


class Mixture(nn.Module):
    """A block that holds a list of alike modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))


def test_lists_inside_the_only_block_of_a_stage_are_no_blocks() -> None:
    """What is repeated in one stage need not be what the model repeats."""
    model = nn.Sequential(nn.Linear(4, 8), Mixture(), Mixture(), nn.Linear(8, 2))
    stages = (("0", "1"), ("2", "3"))
    plan = make_plan(model, "full", stages=stages)
    assert plan.blocks == ("1", "2")
    own = stage_model(model, stages, 1)
    assert find_blocks(own) == ("2.experts.0", "2.experts.1", "2.experts.2")
    apply_plan(own, plan.part(1))
    assert is_recomputed(own.get_submodule("2"))


def test_a_part_is_refused_by_other_models() -> None:
    stages = stages_for(2, 2)
    plan = make_plan(Stack(4), "full", stages=stages)
    with pytest.raises(
        PlanError, match=r"stage 0 alone, and this Stack has the modules of all 2 stages: apply the whole"
    ):
        apply_plan(Stack(4), plan.part(0))
    with pytest.raises(
        PlanError, match=r"'blocks\.0', which Stack does not have; it is the plan of stage 0, which owns"
    ):
        apply_plan(stage_model(Stack(4), stages, 1), plan.part(0))
    with pytest.raises(PlanError, match=r"A model of one stage takes plan\.part\(stage\)"):
        apply_plan(stage_model(Stack(4), stages, 1), plan)
    apply_plan(Stack(4), plan)


def test_blocks_that_a_plan_per_stage_does_not_know_are_refused() -> None:
    plan = make_plan(Stack(4), {"per_stage": ["full", "none"]}, stages=stages_for(2, 2))
    with pytest.raises(PlanError, match=r"says nothing about blocks\.4"):
        apply_plan(Stack(5), plan)
    named = [{"mode": "full", "blocks": "blocks.*"}, {"mode": "full", "blocks": "SelfMix"}]
    apply_plan(Stack(4), make_plan(Stack(4), {"per_stage": named}, stages=stages_for(2, 2)))


def test_a_tied_module_has_several_stages() -> None:
    stages = (("shared", "0"), ("1", "shared"))
    assert (
        stages_of("shared.table", stages) == (0, 1) and stages_of("1", stages) == (1,) and stages_of("2", stages) == ()
    )
    model = nn.ModuleDict({"shared": Block(), "0": Block(), "1": Block()})
    plan = make_plan(model, {"mode": "full", "blocks": "Block"}, stages=stages)
    assert [region.modules for region in plan.regions] == [("shared",), ("0",), ("1",)]
    assert [[r.modules[0] for r in plan.part(n).regions] for n in range(2)] == [["shared", "0"], ["shared", "1"]]
