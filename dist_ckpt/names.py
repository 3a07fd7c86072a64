"""Names as the model's author gave them, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_WRAPPER_LEVELS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attribute levels that activation wrappers, FSDP1 and torch.compile put into a name."""


def unwrapped_name(name: str) -> str:
    """A module or parameter name without the levels that wrappers add.

    >>> unwrapped_name("layers.0._checkpoint_wrapped_module.attention._orig_mod.wq.weight")
    'layers.0.attention.wq.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_LEVELS)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` under the names that the plain model has."""
    for name, parameter in unwrap(model).named_parameters():
        yield unwrapped_name(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, object]]:
    """``model.named_buffers()`` under the names that the plain model has."""
    for name, buffer in unwrap(model).named_buffers():
        yield unwrapped_name(name), buffer


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` under the names that the plain model has; a wrapper and what it wraps share one."""
    for name, module in unwrap(model).named_modules():
        yield unwrapped_name(name), module


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose ``module.`` is the one level that a user's model may have too."""
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.module if is_ddp else model
