"""Hugging Face models: their blocks, caches, own checkpointing and frozen bases."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist_ckpt import PlanError, apply, make_plan, named_parameters, plan_cost, remove_plan, verify
from dist_ckpt.blocks import find_blocks
from tests.hf_models import (
    BLOCKS,
    MODELS,
    batch_for,
    build,
    cache_of,
    differing,
    step,
    switch_own_checkpointing,
)

MODES: list[Any] = [
    "full",
    "selective",
    {"mode": "selective_attention"},
    {"mode": "segments", "k": 2},
    {"mode": "nested", "k": 2},
]

WITH_CACHE = "gpt2", "llama", "gemma3", "mixtral", "t5"


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found_without_help(name: str) -> None:
    assert find_blocks(build(name)) == BLOCKS[name]


@pytest.mark.parametrize(("name", "mode"), [*zip(MODELS, MODES * 2, strict=False), ("llama", MODES[3])], ids=str)
def test_training_is_that_without_a_policy(name: str, mode: Any) -> None:
    check(name, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_without_a_policy_in_every_mode(name: str, mode: Any) -> None:
    check(name, mode)


def check(name: str, mode: Any) -> None:
    batch, model = batch_for(name), build(name)
    if mode == {"mode": "selective_attention"} and name == "resnet":
        with pytest.raises(PlanError, match="no attention found"):
            apply(model, mode)
        return
    assert apply(model, mode).regions
    # A cache lays keys out otherwise in memory, which rounds gradients otherwise: the run without a policy has none.
    plain, keywords = build(name), {"use_cache": False} if name in WITH_CACHE else {}
    assert differing(step(model, batch), step(plain, batch, **keywords)) == []


def test_a_cache_is_not_made_in_training_and_is_in_evaluation() -> None:
    model, batch = build("llama"), batch_for("llama")
    plan = apply(model, "full")
    assert "use_cache of the model is off in training" in plan.repairs
    assert cache_of(model(**batch)) is None and model.config.use_cache is True
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert cache_of(twin(**batch)) is None
    with torch.no_grad():
        assert len(cache_of(model(**batch)).layers) == 4
    model.eval()
    ids = batch["input_ids"][:1]
    assert torch.equal(
        model.generate(ids, max_new_tokens=3, do_sample=False),
        build("llama").eval().generate(ids, max_new_tokens=3, do_sample=False),
    )
    model.train()
    remove_plan(model)
    assert len(cache_of(model(**batch)).layers) == 4 and not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "t5"])
def test_a_cache_that_is_asked_for_in_training_is_refused_by_name(name: str) -> None:
    model = build(name)
    apply(model, "full")
    with pytest.raises(
        PlanError, match=r"changes its argument '(cache|past_key_values)' \(\w+Cache\).*use_cache = False"
    ):
        model(**batch_for(name), use_cache=True)


def test_own_checkpointing_is_refused_before_and_after() -> None:
    before = build("llama")
    switch_own_checkpointing(before, on=True)
    with pytest.raises(PlanError, match=r"gradient_checkpointing switched on.*activation_checkpointing_disable"):
        apply(before, "full")
    for name in ("llama", "bert", "t5"):
        after = build(name)
        apply(after, "selective")
        switch_own_checkpointing(after, on=True)
        with pytest.raises(PlanError, match=r"switched on after a plan was applied.*activation_checkpointing=False"):
            after(**batch_for(name))
        switch_own_checkpointing(after, on=False)
        after(**batch_for(name)).loss.backward()


@pytest.mark.parametrize("mode", MODES[:4], ids=str)
@pytest.mark.parametrize("target", [["q_proj", "v_proj"], ["down_proj"]], ids=str)
def test_adapters_on_a_frozen_base_have_their_gradients(mode: Any, target: list[str]) -> None:
    """The first block's input needs no gradient: what reentrant checkpointing would take for nothing to do."""

    def adapted() -> nn.Module:
        torch.manual_seed(6)
        config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False, lora_dropout=0.2)
        return peft.get_peft_model(build("llama"), config).train()

    model, batch = adapted(), batch_for("llama")
    plan = apply(model, mode)
    assert plan.blocks == tuple(f"base_model.model.{name}" for name in BLOCKS["llama"])
    found = step(model, batch)
    assert differing(found, step(adapted(), batch, use_cache=False)) == []
    trained = [name for name, p in named_parameters(model) if p.requires_grad]
    assert len(trained) == 2 * 4 * len(target) and all(found[name].abs().sum() > 0 for name in trained)


def test_inputs_without_gradient_and_frozen_blocks_save_nothing_they_need_not() -> None:
    model, batch = build("llama"), batch_for("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.3.", "lm_head")))
    plain = copy.deepcopy(model)
    apply(model, "full")
    assert differing(step(model, batch), step(plain, batch, use_cache=False)) == []


def test_prefix_tuning_hands_blocks_a_filled_cache_and_is_refused() -> None:
    torch.manual_seed(6)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(build("llama"), config).train()
    apply(model, "full")
    with pytest.raises(PlanError, match=r"changes its argument '(cache|past_key_values)'"):
        model(**batch_for("llama"))


@pytest.mark.full
def test_costs_are_computed_for_models_on_meta() -> None:
    with torch.device("meta"):
        model = build("llama")
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    cost = plan_cost(model, make_plan(model, "full"), batch)
    assert 0 < cost.saved_bytes < cost.baseline_saved_bytes and cost.recomputed_flops > 0


class Outside(nn.Module):
    """A model that checkpoints its own layers, from outside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.layers, self.use_reentrant = nn.ModuleList(layers), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("policy", ["full", "selective", {"mode": "segments", "k": 2}], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_from_outside_is_refused(use_reentrant: bool, policy: Any) -> None:
    model, x = Outside(use_reentrant), torch.randn(2, 4, requires_grad=True)
    apply(model, policy)
    around = (
        "runs inside a backward, as in a reentrant" if use_reentrant else "another activation checkpoint runs around"
    )
    with pytest.raises(PlanError, match=around):
        model(x).sum().backward()


class Inside(nn.Module):
    """A block that checkpoints a part of itself, which is recomputed twice and right."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x.sin(), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("policy", ["full", "selective", {"mode": "segments", "k": 2}], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_inside_a_block_stays_right(use_reentrant: bool, policy: Any) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(*(Inside(use_reentrant) for _ in range(4))).train()
    model, found = copy.deepcopy(plain), []
    apply(model, policy)
    for one in (model, plain):
        torch.manual_seed(2)
        x = torch.randn(2, 4, requires_grad=True)
        one(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in one.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_adapters_may_be_added_after_a_plan(mode: Any) -> None:
    def adapted(policy: Any) -> nn.Module:
        base = build("llama")
        apply(base, policy)
        torch.manual_seed(6)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2)).train()

    batch = batch_for("llama")
    assert differing(step(adapted(mode), batch), step(adapted("none"), batch, use_cache=False)) == []


@pytest.mark.full
def test_a_model_that_is_compiled_whole_after_a_plan_trains_the_same() -> None:
    torch._dynamo.reset()
    model, batch = build("llama"), batch_for("llama")
    plain = build("llama")
    apply(model, "full")
    for one in (model, plain):
        one.eval().requires_grad_(True)  # compiled dropout draws its own way
        for layer in one.modules():
            layer.training = not isinstance(layer, nn.Dropout)
        for layer in one.model.layers:
            layer.self_attn.attention_dropout = 0.0
    found = step(torch.compile(model, backend="aot_eager"), batch)
    expected = step(torch.compile(plain, backend="aot_eager"), batch, use_cache=False)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_plan_is_proven_against_a_step_without_cache_too(name: str) -> None:
    model, batch = build(name), batch_for(name)
    assert getattr(model.config, "use_cache", False) is True
    outcome = verify(model, batch, None, {"mode": "segments", "k": 2})
    assert outcome.ok, str(outcome)
