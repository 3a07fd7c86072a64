"""Arguments that a region's forward changes: a recompute would find them changed, and compute something else.

The usual one is a key/value cache, which grows by another copy of the block's keys in the recompute (transformers
issues 28056, 34928). One that is overwritten in place would change gradients without any error.

Lists, tuples and dictionaries are not looked at: the recompute gets them anew, with what was in them. Nor are tensors,
whose edits autograd finds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.errors import PlanError
from dist_ckpt.names import own_class

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type)
_GUARDED_ELSEWHERE = (Tensor, nn.Module)


class Arguments:
    """The objects that a region's forward was given, as they were before it.

    Costs a look at each argument where all of them are tensors, numbers, strings or plain containers of these.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._before = [
            (where, found, list(_walk(found, set()))) for where, value in given for found in _objects(value)
        ]

    def refuse_changes(self, forward: Callable[..., Any]) -> None:
        """To be called after the forward.

        Raises:
            PlanError: it has changed one of its arguments, which the message names.
        """
        for where, value, before in self._before:
            if not _same(before, list(_walk(value, set()))):
                raise PlanError(
                    f"the forward of a recomputed {_name(forward)} changes its argument "
                    f"{_argument_name(forward, where)!r} ({type(value).__name__}), so that its recompute would find it "
                    "changed. Switch a key/value cache off in training (config.use_cache = False, or use_cache=False "
                    "in the call), let the block return what it computes, or leave it out of the plan"
                )


def _objects(value: Any) -> Iterator[Any]:
    """What in an argument could be changed and is no plain container."""
    if isinstance(value, tuple) or type(value) in (list, dict):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _objects(inside)
    elif not isinstance(value, (*_UNCHANGING, *_GUARDED_ELSEWHERE)) and not callable(value):
        yield value


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    """All that is reachable from a value, flat: tensors with their version, containers with their size."""
    yield value
    if isinstance(value, Tensor):
        yield 0 if value.is_inference() else value._version
    if isinstance(value, (*_UNCHANGING, *_GUARDED_ELSEWHERE)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        yield len(value)
        for key, inside in value.items():
            yield key
            yield from _walk(inside, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield len(value)
        for inside in value:
            yield from _walk(inside, seen)
    slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
    for name in (*getattr(value, "__dict__", {}), *slots):
        yield from _walk(getattr(value, name, None), seen)


def _same(before: list[Any], after: list[Any]) -> bool:
    """Objects by identity, as both lists keep them alive; numbers and strings, which are made anew, by value."""
    return len(before) == len(after) and all(
        one is other or (type(one) is type(other) and isinstance(one, _UNCHANGING) and one == other)
        for one, other in zip(before, after, strict=True)
    )


def _name(forward: Callable[..., Any]) -> str:
    owner = forward.args[0] if isinstance(forward, functools.partial) and forward.args else None
    return own_class(owner).__name__ if isinstance(owner, nn.Module) else getattr(forward, "__qualname__", "function")


def _argument_name(forward: Callable[..., Any], where: int | str) -> str:
    if isinstance(where, str):
        return where
    names = list(inspect.signature(forward).parameters)
    return names[min(where, len(names) - 1)]
