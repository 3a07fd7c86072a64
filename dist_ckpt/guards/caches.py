"""Key/value caches of Hugging Face models: no use in training, and wrong where a block is recomputed.

``config.use_cache`` is on by default, also in training: each forward then fills a cache with every layer's keys and
values, and a recompute would fill it again. transformers switches it off for its own checkpointing only (5.x:
``merge_with_config_defaults``). Here the same is done for a model with a plan, in training alone: the configuration,
``eval()`` and ``generate()`` stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
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
        position = _position(module)
        assert position is not None, "checked by caching_modules"
        module.register_forward_pre_hook(WithoutCache(position), with_kwargs=True)


def leave_caches_alone(model: nn.Module) -> None:
    """Undoes :func:`switch_off_caches`."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, WithoutCache)]:
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


@dataclass(frozen=True)
class WithoutCache:
    """A forward pre-hook; a class, so that a model with it can be pickled."""

    position: int
    """Of ``use_cache`` among the positional arguments."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # What a caller asks for is not overruled: it is refused where a block changes its argument.
        is_asked_for = len(args) > self.position or kwargs.get("use_cache") is not None
        if is_asked_for or not (module.training and torch.is_grad_enabled()):
            return None
        return args, {**kwargs, "use_cache": False}


def _position(module: nn.Module) -> int | None:
    """Where a module's forward takes ``use_cache``; ``None`` if it does not, by that name."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index("use_cache") if "use_cache" in names else None
