"""Tiny models of Hugging Face's, from their configurations, and one step of training on each."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from dist_ckpt import named_parameters
from dist_ckpt.names import named_buffers

VOCAB = 32
_IDS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
_DECODER = {**_SIZES, **_IDS, "num_key_value_heads": 1, "max_position_embeddings": 64}
_GEMMA_KINDS = ["sliding_attention", "full_attention"] * 2


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=4, n_head=2, n_positions=64, **_IDS))


def _llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, attention_dropout=0.1, **options))


def _gemma3() -> nn.Module:
    config = hf.Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=4, layer_types=_GEMMA_KINDS)
    return hf.Gemma3ForCausalLM(config)


def _mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_SIZES, **_IDS))


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "d_ff": 32}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **_IDS, decoder_start_token_id=0))


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**_SIZES, image_size=16, patch_size=8, hidden_dropout_prob=0.1))


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic")
    return hf.ResNetForImageClassification(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = types.MappingProxyType(
    {
        "gpt2": _gpt2,
        "llama": _llama,
        "gemma3": _gemma3,
        "mixtral": _mixtral,
        "bert": _bert,
        "t5": _t5,
        "vit": _vit,
        "resnet": _resnet,
    }
)

BLOCKS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "gpt2": tuple(f"transformer.h.{i}" for i in range(4)),
        "llama": tuple(f"model.layers.{i}" for i in range(4)),
        "gemma3": tuple(f"model.layers.{i}" for i in range(4)),
        "mixtral": tuple(f"model.layers.{i}" for i in range(4)),
        "bert": tuple(f"bert.encoder.layer.{i}" for i in range(4)),
        "t5": tuple(f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)),
        "vit": tuple(f"vit.layers.{i}" for i in range(4)),
        "resnet": tuple(f"resnet.encoder.stages.{s}.layers.{i}" for s in range(2) for i in range(2)),
    }
)
"""What a reader of each model would call its blocks."""


def build(name: str, **options: Any) -> nn.Module:
    """The same numbers each time, in training mode."""
    torch.manual_seed(3)
    return MODELS[name](**options).train()


def batch_for(name: str) -> dict[str, Tensor]:
    """Padded token rows with their mask, or images, and labels."""
    generator = torch.Generator().manual_seed(4)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, VOCAB, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def step(model: nn.Module, batch: Mapping[str, Any], **keywords: Any) -> dict[str, Tensor]:
    """One forward and backward with dropout: the loss, every gradient and every buffer."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**batch, **keywords).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in named_parameters(model) if p.grad is not None}
    return {"loss": loss.detach(), **grads, **{f"buffer {n}": b.clone() for n, b in named_buffers(model)}}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names that are in one only, or whose values are not the same bits."""
    both = found.keys() & expected.keys()
    return sorted(found.keys() ^ expected.keys() | {n for n in both if not torch.equal(found[n], expected[n])})


def cache_of(output: Any) -> Any:
    """The key/value cache that a model returns, ``None`` without one; releases before 5.24 name it otherwise."""
    return next((output[name] for name in ("cache", "past_key_values") if name in output), None)


def switch_own_checkpointing(model: Any, on: bool) -> None:
    """The model's own checkpointing; releases before 5.24 name its switch otherwise."""
    word = "enable" if on else "disable"
    name = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(model, f"{n}_{word}"))
    getattr(model, f"{name}_{word}")()
