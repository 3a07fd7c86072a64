"""Sources of random numbers: torch's, Python's, and numpy's, which are known by name so that nothing imports it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    """Whether a value is a source of random numbers of its own."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    return type(value).__module__.startswith("numpy.random") and type(value).__name__ in ("Generator", "RandomState")


def loaded_numpy_random() -> Any | None:
    """The module ``numpy.random``; ``None`` for who has not loaded it, and so draws nothing from it."""
    return sys.modules.get("numpy.random")


def generator_state(generator: Any) -> Any:
    """The state of a generator, or of the modules ``random`` and ``numpy.random``."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def restore_generator(generator: Any, state: Any) -> None:
    """Puts a generator back to an earlier :func:`generator_state`."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def comparable(state: Any) -> Any:
    """A state as plain data that is equal where the generator would go on alike."""
    if isinstance(state, torch.Tensor):
        return tuple(state.tolist()) if state.numel() % 8 else tuple(state.view(torch.int64).tolist())
    if isinstance(state, Mapping):
        return tuple((key, comparable(value)) for key, value in state.items())
    if isinstance(state, tuple):
        is_plain = len(state) > 100 and type(state[0]) is int  # Python's own: 625 numbers
        return state if is_plain else tuple(map(comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
