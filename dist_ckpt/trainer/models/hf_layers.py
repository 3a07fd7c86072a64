"""Hugging Face's GPT-2 and Llama as layers that a pipeline can place.

Another model needs an adapter like these: a function (model) → :class:`~dist_ckpt.stages.LayerList` whose layers do
what the model's own ``forward`` does between its modules. Give it to the engine as ``TrainingOptions.layers``, or to
the model's class as its method ``pipeline_layers``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.errors import EngineError
from dist_ckpt.names import own_class, unwrap
from dist_ckpt.stages import Layer, LayerList, token_loss


def hf_layers(model: nn.Module) -> LayerList:
    """The layers of a causal language model of Hugging Face's.

    Raises:
        EngineError: there is no adapter for its class, or it is configured in a way that the adapter does not know.
    """
    model = unwrap(model)
    cls = own_class(model)
    adapter = _ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")
    if adapter is None:
        known = ", ".join(sorted(name.rpartition(".")[2] for name in _ADAPTERS))
        raise EngineError(
            f"{cls.__name__} cannot be cut into stages: there are adapters for {known}. Take another engine, or write "
            f"one like those in {__name__} (a function (model) → LayerList) and pass it as TrainingOptions.layers"
        )
    return adapter(model)


class _PerForward:
    """What a model's own loop makes once and gives to all blocks: masks, positions.

    A block takes what was made for the block before it, so that the blocks that a stage runs one after another share
    it, and nothing is taken from an earlier forward.
    """

    def __init__(self, make: Callable[[Any, Tensor], Mapping[str, Any]]) -> None:
        self._make = make
        self._made: Mapping[str, Any] = {}
        self._next: int | None = None

    def of(self, number: int, model: Any, x: Tensor) -> Mapping[str, Any]:
        """The arguments of a block, by its number in the whole model."""
        if number != self._next:
            self._made = self._make(model, x)
        self._next = number + 1
        return self._made


def _gpt2(model: Any) -> LayerList:
    if model.config.add_cross_attention:
        raise EngineError("GPT-2 with add_cross_attention cannot be cut into stages: it needs an encoder's output")
    shared = _PerForward(_gpt2_arguments)
    blocks = [
        Layer((f"transformer.h.{number}",), partial(_block, f"transformer.h.{number}", number, shared))
        for number in range(len(model.transformer.h))
    ]
    first = Layer(("transformer.wte", "transformer.wpe", "transformer.drop"), _gpt2_embed)
    return LayerList((first, *blocks, Layer(("transformer.ln_f", "lm_head"), _gpt2_head)), _loss)


def _gpt2_embed(model: Any, input_ids: Tensor) -> Tensor:
    body = model.transformer
    x: Tensor = body.drop(body.wte(input_ids) + body.wpe(_positions(input_ids)))
    return x


def _gpt2_arguments(model: Any, x: Tensor) -> Mapping[str, Any]:
    positions = _positions(x)
    return {"attention_mask": _mask(model, x, positions), "position_ids": positions, "use_cache": False}


def _gpt2_head(model: Any, x: Tensor) -> Tensor:
    logits: Tensor = model.lm_head(model.transformer.ln_f(x))
    return logits


def _llama(model: Any) -> LayerList:
    shared = _PerForward(_llama_arguments)
    blocks = [
        Layer((f"model.layers.{number}",), partial(_block, f"model.layers.{number}", number, shared))
        for number in range(len(model.model.layers))
    ]
    first = Layer(("model.embed_tokens",), _llama_embed)
    return LayerList((first, *blocks, Layer(("model.norm", "lm_head"), _llama_head)), _loss)


def _llama_embed(model: Any, input_ids: Tensor) -> Tensor:
    x: Tensor = model.model.embed_tokens(input_ids)
    return x


def _llama_arguments(model: Any, x: Tensor) -> Mapping[str, Any]:
    positions = _positions(x)
    return {
        "attention_mask": _mask(model, x, positions),
        "position_embeddings": model.model.rotary_emb(x, position_ids=positions),
        "position_ids": positions,
        "use_cache": False,
    }


def _llama_head(model: Any, x: Tensor) -> Tensor:
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


def _block(name: str, number: int, shared: _PerForward, model: nn.Module, x: Tensor) -> Tensor:
    out = model.get_submodule(name)(x, **shared.of(number, model, x))  # a list would count the blocks that are left
    first: Tensor = out[0] if isinstance(out, tuple) else out  # a tuple until transformers 5
    return first


def _positions(x: Tensor) -> Tensor:
    """(1, seq)."""
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def _mask(model: Any, x: Tensor, positions: Tensor) -> Any:
    """The causal mask in the form that the model's attention takes, without padding."""
    from transformers.masking_utils import create_causal_mask  # an extra; whoever has such a model has imported it

    given = {
        "config": model.config,
        "inputs_embeds": x,
        "input_embeds": x,
        "attention_mask": None,
        "cache": None,
        "past_key_values": None,
        "cache_position": positions[0],
        "position_ids": positions,
    }
    names = inspect.signature(create_causal_mask).parameters  # some were renamed in transformers 5
    return create_causal_mask(**{name: value for name, value in given.items() if name in names})


def _loss(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    return token_loss(logits, labels)


_ADAPTERS: Mapping[str, Callable[[Any], LayerList]] = types.MappingProxyType(
    {
        "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": _gpt2,
        "transformers.models.llama.modeling_llama.LlamaForCausalLM": _llama,
    }
)
