"""Tensors that Python can see, and who refers to them."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dist_ckpt.memory.storages import plain_parts

UNKNOWN = "unknown"
"""Of whom no Python object refers to."""

_DEEPEST = 4


def visible_tensors(device: torch.device) -> Iterator[Tensor]:
    """Tensors on a device whose memory torch's allocator has given, as far as Python's collector knows them.

    Memory of others (numpy's, mapped files, memory that processes share) cannot be resized, which tells it apart.
    """
    for one in gc.get_objects():
        kind = type(one)  # isinstance would ask proxies what they stand for
        if not issubclass(kind, Tensor) or issubclass(kind, FakeTensor) or one.device != device:
            continue
        try:
            parts = [part for part in plain_parts(one) if part.untyped_storage().nbytes()]
        except (NotImplementedError, RuntimeError):  # a kind of tensor that has no storage
            continue
        if parts and all(part.untyped_storage().resizable() for part in parts):
            yield one


def holder_of(tensor: Tensor) -> str:
    """Who refers to a tensor, in words: ``'kept' (list) in train.py:12 (train)``; ``unknown`` if nobody Python sees."""
    return _holder(tensor, {id(tensor), *_ours()}, 0) or UNKNOWN


def _holder(target: Any, seen: set[int], depth: int) -> str | None:
    for frame in _frames():
        for name, value in _variables(frame).items():
            if value is target and frame.f_code.co_filename != __file__:
                return f"{name!r} in {_where(frame)}"
    if depth == _DEEPEST:
        return None
    referrers = [one for one in gc.get_referrers(target) if id(one) not in seen and not isinstance(one, FrameType)]
    containers = [one for one in referrers if isinstance(one, (list, tuple, dict, set))]
    seen.update(map(id, (*referrers, referrers, containers)))
    for one in referrers:
        if isinstance(one, dict) and (owner := _owner_of_namespace(one)) is not None:
            attribute = _name_in(one, target)
            return owner if attribute is None else f"{owner}.{attribute}"
    for one in containers:
        if around := _holder(one, seen, depth + 1):
            return f"{type(one).__name__} {around}"
    if depth:
        return None
    if containers:
        return f"a {type(containers[0]).__name__}"
    for one in referrers:
        if not isinstance(one, (ModuleType, FunctionType)):
            return f"a {type(one).__name__}"
    return None


def _name_in(namespace: dict[Any, Any], target: Any) -> str | None:
    """A function of its own: a comprehension would make the target a closure's, which then is one more referrer."""
    for name, value in namespace.items():
        if value is target:
            return str(name)
    return None


def _owner_of_namespace(namespace: dict[Any, Any]) -> str | None:
    """The module or object whose variables a dict holds."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return str(namespace["__name__"])
    for one in gc.get_referrers(namespace):
        if getattr(one, "__dict__", None) is namespace:
            return type(one).__name__
    return None


def _ours() -> Iterator[int]:
    """Ids of what this package's measurement refers to in running functions, and of the variables it does so with."""
    for frame in _frames(own=True):
        variables = frame.f_locals
        yield id(variables)
        yield from map(id, variables.values())


def _frames(own: bool = False) -> Iterator[FrameType]:
    """All running functions, but for those of this package's measurement."""
    here = os.path.dirname(__file__)
    for frame in list(sys._current_frames().values()):
        now: FrameType | None = frame
        while now is not None:
            if (os.path.dirname(now.f_code.co_filename) == here) == own:
                yield now
            now = now.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """A function's variables, without leaving the function a copy of them, which would keep what it lets go of alive
    (before Python 3.13, ``f_locals`` is a dict that stays with the frame)."""
    held = frame.f_locals
    found = dict(held)
    if type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()
    return found


def _where(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
