"""Tensors that Python can see, and who refers to them."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dist_ckpt.memory.storages import plain_parts

UNKNOWN = "unknown"
"""For a tensor that no Python object refers to."""

_DEEPEST = 10
"""Levels of containers and objects that are looked through: a module in a module takes three."""
_FEW = 300
"""Objects up to which the collector finds who refers to them faster than a look at everything does."""
_LONGEST = 60
"""Characters of a key."""
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
    storages = (one for one in gc.get_objects() if type(one) is torch.UntypedStorage)
    return frozenset(one.data_ptr() for one in storages if one.device.type != "meta")  # where FakeTensor's lie


def holders_of(tensors: Sequence[Tensor]) -> list[str]:
    """Who refers to each tensor, in words: ``list 'kept' in train.py:12 (train)``, or ``Linear.weight of variable 'old'
    in train.py:12 (train)``; ``unknown`` if nobody Python sees.

    A line is that at which a function is. The collector is asked once a level for all of them, which takes a while
    however few they are.
    """
    variables = _variables_by_id()
    found: dict[int, str] = {}
    unfinished: dict[int, str] = {}
    """Who is named where no variable leads to them."""
    frontier: dict[int, _Held] = {id(tensor): _Held(tensor, {id(tensor): ()}) for tensor in tensors}
    seen = {id(tensors), *frontier, *_ours()}
    passed: dict[int, set[int]] = {}
    """Holder's id → the tensors on whose way it is."""
    widest = max(_WIDEST, 4 * len(tensors))
    for _ in range(_DEEPEST):
        for key in frontier.keys() & variables.keys():
            for tensor, within in frontier.pop(key).within.items():
                found.setdefault(tensor, _phrase(within, variables[key]))
        following: dict[int, _Held] = {}
        seen.update(id(held.__dict__) for held in frontier.values())
        frontier = {key: held for key, held in frontier.items() if not held.within.keys() <= found.keys()}
        if not frontier or len(frontier) > widest:
            break
        for one in _referrers([held.what for held in frontier.values()]):
            if id(one) in seen or isinstance(one, (FrameType, _Held)) or inspect.isgenerator(one):
                continue
            inside = [frontier[id(part)] for part in gc.get_referents(one) if id(part) in frontier]
            met = passed.setdefault(id(one), set())
            chains = {
                tensor: _extended(one, held.what, within)
                for held in inside
                for tensor, within in held.within.items()
                if tensor not in met and tensor not in found
            }
            met.update(chains)
            if not chains:
                continue
            if _is_module(one) or inspect.isfunction(one):
                for tensor, chain in chains.items():
                    found.setdefault(tensor, _phrase(chain))
            else:
                following[id(one)] = _Held(one, chains)
                if not isinstance(one, (*_CONTAINERS, CellType)):
                    for tensor, chain in chains.items():
                        unfinished.setdefault(tensor, _phrase(chain))
        frontier = following
    for held in frontier.values():
        for tensor, chain in held.within.items():
            unfinished.setdefault(tensor, f"a {_phrase(chain)}")
    return [found.get(id(tensor), unfinished.get(id(tensor), UNKNOWN)) for tensor in tensors]


_NO_KEY = object()
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules, of which what is in them is spoken of as an attribute itself."""


@dataclass(frozen=True)
class _Step:
    """One holder on the way from a tensor to a variable."""

    word: str
    key: str | None = None
    """Under which a dict has it."""
    cell: int = 0
    """The id of a cell."""
    is_object: bool = False
    is_module: bool = False
    """Whether the object is an ``nn.Module``."""


class _Held:
    """Something on the way from tensors to who holds them."""

    def __init__(self, what: Any, within: dict[int, tuple[_Step, ...]]) -> None:
        self.what = what
        self.within = within
        """Tensor's id → what is between it and whoever holds this, the nearest first."""


def _referrers(held: list[Any]) -> Iterator[Any]:
    """Whatever refers to one of some objects."""
    if len(held) <= _FEW:
        yield from (one for one in gc.get_referrers(*held) if one is not held)
        return
    ids = set(map(id, held))  # the collector would compare each reference with each of them
    for one in gc.get_objects():
        if one is not held and any(id(part) in ids for part in gc.get_referents(one)):
            yield one


def _extended(holder: Any, held: Any, within: tuple[_Step, ...]) -> tuple[_Step, ...]:
    """The way to a tensor, with one more holder."""
    if isinstance(holder, dict):
        key = next((key for key, value in holder.items() if value is held), _NO_KEY)
        if key is _NO_KEY:
            return (*within, _Step("key of dict"))
        if _is_module(holder):
            return (*within, _Step(f"{holder['__name__']}.{key}"))
        return (*within, _Step(f"dict[{_key(key)}]", key if isinstance(key, str) else None))
    if isinstance(holder, _CONTAINERS):
        return (*within, _Step(type(holder).__name__))
    if isinstance(holder, CellType):
        return (*within, _Step("cell", cell=id(holder)))
    if inspect.isfunction(holder):
        closure = holder.__closure__
        if held is closure:
            names = dict(zip(map(id, closure), holder.__code__.co_freevars, strict=True))
            name = names.get(within[-2].cell) if len(within) > 1 else None
            if name is not None:
                return (*within[:-2], _Step(f"{name!r} in the closure of {holder.__qualname__}"))
        return (*within, _Step(f"function {holder.__qualname__}", is_object=True))
    return _of_object(holder, held, within)


def _of_object(holder: Any, held: Any, within: tuple[_Step, ...]) -> tuple[_Step, ...]:
    kind = type(holder).__name__
    attributes = getattr(holder, "__dict__", {})
    is_module = isinstance(holder, nn.Module)
    if attributes is held and within:
        name, before = within[-1].key, within[:-1]
        if is_module and name in _REGISTRIES and before:
            name, before = before[-1].key, before[:-1]
        return (*before, _Step(f"{kind}.{name}", is_object=True, is_module=is_module))
    name = next((name for name, value in attributes.items() if value is held), None)
    return (*within, _Step(f"{kind}.{name}" if name else kind, is_object=True, is_module=is_module))


def _phrase(within: Sequence[_Step], variable: str | None = None) -> str:
    """In words; of a module within modules it is not said in which."""
    told = [step for place, step in enumerate(within) if not (place and step.is_module and within[place - 1].is_module)]
    words = ""
    for place, step in enumerate(told):
        words += (" of " if told[place - 1].is_object else " ") * (place > 0) + step.word
    if variable is None:
        return words
    return f"{words} of variable {variable}" if told and told[-1].is_object else f"{words} {variable}".lstrip()


def _key(key: object) -> str:
    """A dict's key, without the values of a tensor."""
    if isinstance(key, Tensor):
        return f"{type(key).__name__} {' × '.join(map(str, key.shape)) or 'scalar'}"
    return repr(key)[:_LONGEST] if isinstance(key, (str, int, float, type(None))) else type(key).__name__


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
