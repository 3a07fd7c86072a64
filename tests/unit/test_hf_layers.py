"""GPT-2 and Llama as layers compute what they compute as a whole, together and cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import apply_plan, make_plan
from dist_ckpt.engines.stage import keep_stage, shared_parameters
from dist_ckpt.errors import EngineError
from dist_ckpt.stages import LayerList, layers_by_stage, partition
from dist_ckpt.trainer.models.hf import token_loss
from dist_ckpt.trainer.models.hf_layers import hf_layers
from tests.hf_models import MODELS, VOCAB

hf = pytest.importorskip("transformers")


def llama(**options: object) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=VOCAB, **options))


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CASES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": MODELS["gpt2"],  # with dropout, and a tied head
    "llama": partial(llama, attention_dropout=0.1),
    "llama_tied": partial(llama, tie_word_embeddings=True),
    "llama_scaled_rope": partial(llama, rope_parameters=SCALED),
}


def made(case: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[case]()
    model.config.use_cache = False  # type: ignore[union-attr]
    model.set_attn_implementation(attention)  # type: ignore[operator]
    return model.train()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(0, VOCAB, (2, 2, 12)).unbind()
    labels[0, 5:8] = -100
    return {"input_ids": ids, "labels": labels}


def through(layers: LayerList, model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    x = rows["input_ids"]
    for layer in layers.layers:
        x = layer.run(model, x)
    return layers.loss(model, x, rows["labels"])


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["none", "full", {"mode": "segments", "k": 2}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_models_own_forward(case: str, attention: str, policy: object) -> None:
    model, rows = made(case, attention), batch()
    torch.manual_seed(2)
    expected = token_loss(model, rows)
    expected.backward()
    wanted = grads(model)
    model.zero_grad()
    layers = hf_layers(model)
    apply_plan(model, make_plan(model, policy))
    torch.manual_seed(2)
    loss = through(layers, model, rows)
    loss.backward()
    assert torch.equal(loss, expected)
    found = grads(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", CASES)
def test_stages_one_after_another_are_the_model(case: str) -> None:
    model, rows = made(case, "eager"), batch()
    layers = hf_layers(model)
    stages = partition(layers, model, 3, "uniform")
    parts = [copy.deepcopy(model) for _ in stages]
    torch.manual_seed(2)
    x = rows["input_ids"]
    for stage, own in enumerate(layers_by_stage(layers, stages)):
        keep_stage(parts[stage], stages, stage)
        for layer in own:
            x = layer.run(parts[stage], x)
    torch.manual_seed(2)
    assert torch.equal(layers.loss(parts[-1], x, rows["labels"]), token_loss(model, rows))
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted([*dict(model.named_parameters()), *shared_parameters(model, stages)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_is_made_once_a_forward_and_never_from_another_one(attention: str) -> None:
    model = made("llama", attention)
    layers = hf_layers(model).layers
    given: list[object] = []
    for block in model.get_submodule("model.layers").children():
        block.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["position_embeddings"][0]), with_kwargs=True
        )
    for seq in (12, 7, 7):
        x = torch.randint(0, VOCAB, (1, seq))
        for layer in layers[:-1]:
            x = layer.run(model, x)
    assert [len({id(one) for one in given[start : start + 4]}) for start in (0, 4, 8)] == [1, 1, 1]
    assert len({id(one) for one in given}) == 3


def test_models_without_an_adapter_are_refused() -> None:
    for name in ("mixtral", "bert"):
        with pytest.raises(
            EngineError, match=r"adapters for GPT2LMHeadModel, LlamaForCausalLM.*TrainingOptions\.layers"
        ):
            hf_layers(MODELS[name]())
    crossed = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=8, add_cross_attention=True))
    with pytest.raises(EngineError, match="add_cross_attention"):
        hf_layers(crossed)
