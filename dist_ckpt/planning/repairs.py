"""What the regions of a plan put right by themselves, and what they cannot, for whoever reads the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from dist_ckpt.guards.caches import caching_modules
from dist_ckpt.names import named_modules
from dist_ckpt.plan import Region, fold_names


def repairs(model: nn.Module, regions: Sequence[Region]) -> tuple[str, ...]:
    """What is put right: see :mod:`dist_ckpt.guards.forward_state` and :mod:`dist_ckpt.guards.caches`."""
    with_buffers = [
        name
        for name, module, _ in _inside(model, regions)
        if any(buffer is not None for buffer in module._buffers.values())
    ]
    caching = [name for name, _ in caching_modules(model)] if regions else []
    return (
        *(f"buffers of {n} are as its forward found them, and updated once" for n in fold_names(tuple(with_buffers))),
        *(f"use_cache of {name or 'the model'} is off in training" for name in caching),
    )


def fire_again(model: nn.Module, regions: Sequence[Region]) -> tuple[str, ...]:
    """What cannot be helped: hooks inside a region may be part of what it computes, so its recompute runs them."""
    hooked = [
        name
        for name, module, is_region in _inside(model, regions)
        if not is_region and (module._forward_hooks or module._forward_pre_hooks)
    ]
    return tuple(
        f"forward hooks of {name} lie inside a region, and fire in its recompute too"
        for name in fold_names(tuple(hooked))
    )


def _inside(model: nn.Module, regions: Sequence[Region]) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whether it is a region's own) of every module that is recomputed, in the model's order."""
    recomputed = {name for region in regions if not region.save.offloads_everything for name in region.modules}
    for name, module in named_modules(model):
        parts = name.split(".")
        if any(".".join(parts[:end]) in recomputed for end in range(len(parts) + 1)):
            yield name, module, name in recomputed
