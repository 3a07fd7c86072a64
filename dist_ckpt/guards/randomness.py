"""Random numbers that no recompute replays: Python's, numpy's, and those of generators that a module holds.

torch's checkpoint puts back torch's global generators and no others. A forward that draws from another stream draws
something else in its recompute, and gradients are silently wrong.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dist_ckpt.errors import PlanError
from dist_ckpt.generators import comparable, generator_state, is_generator, loaded_numpy_random
from dist_ckpt.names import own_class


class Unreplayed:
    """The streams that a forward may draw from, as they were before it.

    Costs some 100 µs for a block, so it is for a region's first forward: what draws, draws then.

    Args:
        modules: those whose forwards run; looked at are their attributes and the names that their classes' code uses.
        functions: others that run.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Callable[..., Any]] = ()) -> None:
        self._before = [(*stream, comparable(generator_state(stream[1]))) for stream in _streams(modules, functions)]

    def refuse_draws(self, name: str) -> None:
        """To be called after the forward.

        Raises:
            PlanError: it drew from one of them.
        """
        for stream, generator, before in self._before:
            if comparable(generator_state(generator)) != before:
                raise PlanError(
                    f"the forward of {name} draws from {stream}, which no recompute replays: it would draw other "
                    "numbers and gradients would be wrong. Draw from torch's global generator, draw outside of what is "
                    "recomputed, or leave it out of the plan (ckpt.exclude)"
                )


def _streams(modules: Iterable[nn.Module], functions: Iterable[Callable[..., Any]]) -> Iterator[tuple[str, Any]]:
    yield "Python's random", random
    if (numpy_random := loaded_numpy_random()) is not None:
        yield "numpy.random", numpy_random
    held: dict[int, tuple[str, Any]] = {}
    code = dict.fromkeys(functions)
    for module in modules:
        own = own_class(module)
        code[own.forward] = None
        of_classes = [
            one for cls in own.__mro__ if cls.__module__.partition(".")[0] != "torch" for one in vars(cls).items()
        ]
        for name, value in (*of_classes, *vars(module).items()):
            held |= {id(g): (f"{own.__name__}.{name}", g) for g in _generators(value)}
    for function in code:
        for name, value in _names_used(function):
            held |= {id(g): (repr(name), g) for g in _generators(value)}
    for name, generator in held.values():
        if generator is not torch.default_generator:
            yield f"the generator {name}", generator


def _names_used(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Variables around a function and globals that its code names; none for what is not written in Python."""
    if inspect.isfunction(inspect.unwrap(function)):
        used = inspect.getclosurevars(inspect.unwrap(function))
        yield from {**used.globals, **used.nonlocals}.items()


def _generators(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _generators(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _generators(one)
    elif is_generator(value):
        yield value
