"""Key/value caches of Hugging Face models: no use in training, and wrong where a block is recomputed.

``config.use_cache`` is on by default, also in training: each forward then fills a cache with every layer's keys and
values, and a recompute would fill it again. transformers switches it off for its own checkpointing only (5.x:
``merge_with_config_defaults``). Here the same is done for a model with a plan, in training alone: the configuration,
``eval()`` and ``generate()`` stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dist_ckpt.names import named_modules


def caching_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose forward would make a cache in training unless told otherwise, with their names."""
    for name, module in named_modules(model):
        if getattr(getattr(module, "config", None), "use_cache", None) is True and _position(module) is not None:
            yield name, module


def switch_off_caches(model: nn.Module) -> None:
    """Lets no forward in training make a cache that its caller does not ask for."""
    for _, module in caching_modules(model):
        module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def leave_caches_alone(model: nn.Module) -> None:
    """Undoes :func:`switch_off_caches`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _without_cache]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    position = _position(module)
    is_given = position is not None and len(args) > position
    # What was asked for by name is not overruled: it is refused where a block changes its argument.
    if not (module.training and torch.is_grad_enabled()) or is_given or kwargs.get("use_cache") is not None:
        return None
    return args, {**kwargs, "use_cache": False}


def _position(module: nn.Module) -> int | None:
    """Where a module's forward takes ``use_cache``; ``None`` if it does not, by that name."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("use_cache") if "use_cache" in names else None
