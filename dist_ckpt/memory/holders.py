"""Tensors that Python can see, and who refers to them."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dist_ckpt.memory.storages import plain_parts

UNKNOWN = "unknown"
"""For a tensor that no Python object refers to."""

_DEEPEST = 4
"""Levels of containers that are looked through."""
_WIDEST = 1000
"""Objects at one level beyond which nobody would call them holders."""
_UNSHARED = 3
"""References to a dict that the frame has, a variable here, and the function that counts them."""


def visible_tensors(device: torch.device) -> Iterator[Tensor]:
    """Tensors on a device whose memory torch's allocator has given, as far as Python's collector knows them.

    Memory of others (numpy's, mapped files, memory that processes share) cannot be resized, which tells it apart.
    """
    for one in gc.get_objects():
        kind = type(one)  # isinstance would ask proxies what they stand for
        if not issubclass(kind, Tensor) or issubclass(kind, FakeTensor):
            continue
        if _is_allocated(one, device):
            yield one
        # A gradient that no Python code has read yet has no object of its own.
        if one.is_leaf and one.requires_grad and one.grad is not None and _is_allocated(one.grad, device):
            yield one.grad


def _is_allocated(tensor: Tensor, device: torch.device) -> bool:
    if tensor.device != device:
        return False
    try:
        parts = [part for part in plain_parts(tensor) if part.untyped_storage().nbytes()]
    except (NotImplementedError, RuntimeError):  # a kind of tensor that has no storage
        return False
    return bool(parts) and all(part.untyped_storage().resizable() for part in parts)


def visible_storages() -> frozenset[int]:
    """Addresses of storages that Python code has taken out of their tensors."""
    return frozenset(one.data_ptr() for one in gc.get_objects() if type(one) is torch.UntypedStorage)


def holders_of(tensors: Sequence[Tensor]) -> list[str]:
    """Who refers to each tensor, in words: ``list 'kept' in train.py:12 (train)``; ``unknown`` if nobody Python sees.

    A line is that at which a function is. The collector is asked once a level for all of them, which takes a while
    however few they are.
    """
    variables = _variables_by_id()
    found: dict[int, str] = {}
    frontier: dict[int, _Held] = {id(tensor): _Held(tensor, {id(tensor): ""}) for tensor in tensors}
    seen = {id(tensors), *frontier, *_ours()}
    for _ in range(_DEEPEST):
        for key in frontier.keys() & variables.keys():
            for tensor, within in frontier.pop(key).within.items():
                found[tensor] = f"{within}{variables[key]}"
        following: dict[int, _Held] = {}
        seen.update(id(held.__dict__) for held in frontier.values())
        for one in gc.get_referrers(*(held.what for held in frontier.values())):
            if id(one) in seen or isinstance(one, (FrameType, _Held)) or inspect.isgenerator(one):
                continue
            seen.add(id(one))
            inside = [frontier[id(part)] for part in gc.get_referents(one) if id(part) in frontier]
            names = {t: f"{_word(one, held.what)}{within}" for held in inside for t, within in held.within.items()}
            if isinstance(one, (list, tuple, dict, set)) and not _is_module(one):
                following[id(one)] = _Held(one, names)
            else:
                for tensor, name in names.items():
                    found.setdefault(tensor, name.rstrip())
        frontier = {key: held for key, held in following.items() if not held.within.keys() <= found.keys()}
        if not frontier or len(frontier) > _WIDEST:
            break
    for held in frontier.values():
        for tensor, name in held.within.items():
            found.setdefault(tensor, f"a {name.rstrip()}")
    return [found.get(id(tensor), UNKNOWN) for tensor in tensors]


class _Held:
    """Something on the way from tensors to who holds them."""

    def __init__(self, what: Any, within: dict[int, str]) -> None:
        self.what = what
        self.within = within
        """Tensor's id → what is between it and whoever holds this, in words."""


def _word(holder: Any, held: Any) -> str:
    """What a holder is, before what it is in turn held by."""
    if isinstance(holder, dict):
        key = next((key for key, value in holder.items() if value is held), None)
        return f"{holder['__name__']}.{key} " if _is_module(holder) else f"dict[{key!r}] "
    if isinstance(holder, (list, tuple, set)):
        return f"{type(holder).__name__} "
    attributes = getattr(holder, "__dict__", {})
    name = next((name for name, value in attributes.items() if value is held or attributes is held), None)
    return f"{type(holder).__name__}.{name} " if name else f"{type(holder).__name__} "


def _is_module(holder: Any) -> bool:
    return isinstance(holder, dict) and "__name__" in holder and "__spec__" in holder


def _variables_by_id() -> dict[int, str]:
    """What variables of running functions refer to, but for those of this package's measurement."""
    found: dict[int, str] = {}
    for frame in _frames():
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
        for name, value in _variables(frame).items():
            found.setdefault(id(value), f"{name!r} in {where}")
    return found


def _ours() -> Iterator[int]:
    """Ids of what the variables of this package's measurement refer to."""
    for frame in _frames(own=True):
        yield from map(id, _variables(frame).values())


def _frames(own: bool = False) -> Iterator[FrameType]:
    """All running functions, but for those of this package's measurement; or only those."""
    measuring = f"{__package__}."
    for frame in list(sys._current_frames().values()):
        now: FrameType | None = frame
        while now is not None:
            if now.f_globals.get("__name__", "").startswith(measuring) == own:
                yield now
            now = now.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """A function's variables, without leaving the function a copy of them, which would keep what it lets go of alive
    (before Python 3.13, ``f_locals`` is a dict that stays with the frame, and ``locals()`` returns that same dict)."""
    held = frame.f_locals
    found = dict(held)
    is_copy = type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(held) <= _UNSHARED:  # or somebody has kept what locals() returned
        held.clear()
    return found
