"""Streams of random numbers: torch's, Python's, numpy's, and generators that a model or its code holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt.generators import comparable, generator_state, loaded_numpy_random, restore_generator


@dataclass(frozen=True)
class Stream:
    """One source of random numbers."""

    name: str
    """``torch``, ``torch cuda:0``, ``random``, ``numpy.random``, or the path of a generator."""
    state: Callable[[], Any]
    """Its state, which can be compared, and handed to ``restore``."""
    restore: Callable[[Any], None]
    is_replayed: bool
    """Whether checkpoints put it back for a recompute, unless a plan says otherwise."""


def streams_of(devices: Iterable[torch.device], generators: Mapping[str, Any]) -> tuple[Stream, ...]:
    """The streams that a step may draw from.

    Args:
        devices: where it computes.
        generators: path → generator that a model or its code holds.
    """
    found = [Stream("torch", torch.get_rng_state, torch.set_rng_state, True)]
    for device in dict.fromkeys(devices):
        if device.type not in ("cpu", "meta"):
            found.append(_of_device(device))
    found.append(_held("random", random))
    numpy_random = loaded_numpy_random()
    if numpy_random is not None:
        found.append(_held("numpy.random", numpy_random))
    # Distributions under names of their own share these global generators.
    shared = {id(torch.default_generator), id(getattr(random, "_inst", None)), *_numpy_globals(numpy_random)}
    found += [_held(name, generator) for name, generator in generators.items() if id(generator) not in shared]
    return tuple(found)


def states(streams: Iterable[Stream]) -> dict[str, Any]:
    """Name → state now, comparable."""
    return {stream.name: comparable(stream.state()) for stream in streams}


def _held(name: str, generator: Any) -> Stream:
    return Stream(name, lambda: generator_state(generator), lambda state: restore_generator(generator, state), False)


def _of_device(device: torch.device) -> Stream:
    module = torch.get_device_module(device)
    return Stream(
        f"torch {device}",
        lambda: module.get_rng_state(device),
        lambda state: module.set_rng_state(state, device),
        True,
    )


def _numpy_globals(numpy_random: Any) -> tuple[int, ...]:
    if numpy_random is None:
        return ()
    return (id(getattr(getattr(numpy_random, "mtrand", None), "_rand", None)),)
