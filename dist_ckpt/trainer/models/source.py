"""The models of the training program, behind one shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.stages import LayerList, layers_of
from dist_ckpt.trainer.models.config import ModelConfig, ModelKind
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer


@dataclass(frozen=True)
class ModelSource:
    """A model that has no memory yet, and all that a run needs to know about it."""

    model: nn.Module
    """On the meta device."""
    vocab_size: int
    max_seq_len: int | None
    """Positions that it knows; ``None`` for any number."""
    hidden_size: int
    """Width of what its blocks pass on."""
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    """(model, batch) → the sum over tokens of the cross-entropy in nats, an fp32 scalar."""
    initialize: Callable[[nn.Module], None]
    """Fills parameters and buffers once the model, whole or sharded, has memory; the same numbers on every rank."""
    layers: Callable[[nn.Module], LayerList] = layers_of
    """(whole model) → what a pipeline can cut it into. Raises EngineError for a model that cannot be cut."""


def model_source(config: ModelConfig, seed: int) -> ModelSource:
    """The model that a configuration asks for.

    Args:
        seed: of random weights.

    Raises:
        ConfigError: ``model=hf`` names no model that can be built here.
    """
    if config.kind is ModelKind.hf:
        from dist_ckpt.trainer.models.hf import hf_source  # needs an extra

        return hf_source(config, seed)

    def initialize(model: nn.Module) -> None:
        whole = next(m for m in model.modules() if isinstance(m, Transformer))
        whole.init_buffers()
        init_parameters(whole, seed, config.n_layers)

    with torch.device("meta"):
        model = Transformer(config)
    return ModelSource(model, config.vocab_size, config.max_seq_len, config.d_model, _own_loss, initialize)


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch)
