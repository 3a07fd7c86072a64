"""What a pipeline can cut: a model's forward as a list of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One step of a model's forward: what the layer before returned → what the next one is given."""

    modules: tuple[str, ...]
    """Names of the modules that it owns, in the whole model; the first one names the layer."""
    run: Callable[[nn.Module, Tensor], Tensor]
    """(model, whole or with this stage's modules alone; input) → output. The first layer is given the input ids."""


@dataclass(frozen=True)
class LayerList:
    """A model's forward and loss."""

    layers: tuple[Layer, ...]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(model, the last layer's output, labels) → the sum over tokens of the loss, an fp32 scalar. It may use modules
    that the last layer owns."""
