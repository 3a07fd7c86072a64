"""What hangs on a name: the plain data, tensors and generators that a value leads to.

No property is read and no method of the user's called, so that looking changes nothing.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.generators import is_generator

LONG = 256
"""Of longer containers the first elements are followed, and the length counts."""
MOST_VALUES = 50_000
"""A walk that meets more ends there."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)


class Walk:
    """One pass over everything that hangs on some named values.

    Args:
        leave_out: ids of objects that are not entered: the model itself, whose modules are roots of their own.
    """

    def __init__(self, leave_out: frozenset[int] = frozenset()) -> None:
        self.leaves: dict[tuple[str, str], Any] = {}
        """(owner, path in it) → a plain value, a tensor, an array, or the kind and length of a container."""
        self.generators: dict[tuple[str, str], Any] = {}
        """(owner, path in it) → a random generator."""
        self.containers: list[Any] = []
        """Lists, dicts, sets, deques and objects with attributes, each once."""
        self.is_complete = True
        self._seen: dict[int, Any] = {}  # keeps what it names alive, so that an id stays one object's
        self._leave_out = leave_out

    def visit(self, owner: str, path: str, value: Any) -> None:
        """Follows one value."""
        if len(self.leaves) >= MOST_VALUES:
            self.is_complete = False
        elif isinstance(value, PLAIN):
            self.leaves[owner, path] = value if value == value else "nan"
        elif isinstance(value, Tensor) or is_array(value):
            self.leaves[owner, path] = value
        elif id(value) in self._seen or id(value) in self._leave_out:
            pass
        elif is_generator(value):
            self._seen[id(value)] = value
            self.generators[owner, path] = value
        elif isinstance(value, (functools.partial, types.MethodType)):
            self._seen[id(value)] = value
            parts = (value.args, value.keywords) if isinstance(value, functools.partial) else (value.__self__,)
            for number, part in enumerate(parts):
                self.visit(owner, f"{path}[{number}]", part)
        elif not isinstance(value, (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)):
            self._enter(owner, path, value)

    def _enter(self, owner: str, path: str, value: Any) -> None:
        self._seen[id(value)] = value
        is_mapping, is_sequence = isinstance(value, dict), isinstance(value, (list, tuple, collections.deque))
        is_set = isinstance(value, (set, frozenset))
        if is_mapping or is_sequence or is_set:
            self.leaves[owner, path] = f"{type(value).__name__} of {len(value)}"
            self.containers.append(value)
        if is_mapping:
            for key, item in list(dict.items(value))[:LONG]:
                self.visit(owner, f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[…]", item)
        elif is_sequence:
            for number, item in enumerate(list(value)[:LONG]):
                self.visit(owner, f"{path}[{number}]", item)
        elif is_set and all(isinstance(item, PLAIN) for item in value):
            self.leaves[owner, path] = f"{type(value).__name__} {sorted(map(repr, value))[:LONG]}"
        if type(value).__module__ == "itertools" and type(value).__name__ == "count":
            self.leaves[owner, path] = repr(value)
        attributes = attributes_of(value)
        if attributes is not None:
            self.containers.append(attributes)
            for name, item in list(attributes.items()):
                self.visit(owner, f"{path}.{name}", item)
        for name in _slots(type(value)):
            self.visit(owner, f"{path}.{name}", getattr(value, name, None))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of the user's own classes; None for those of torch and the standard library."""
    if is_foreign(type(value)) and not isinstance(value, (types.SimpleNamespace, nn.Module)):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def is_foreign(thing: Any) -> bool:
    """Whether a class or function belongs to Python, torch, numpy or DeepSpeed, which keep no state of a model."""
    package = (getattr(thing, "__module__", None) or "builtins").partition(".")[0]
    return package in ("torch", "numpy", "deepspeed", "dist_ckpt") or package in sys.stdlib_module_names


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array or scalar of plain numbers."""
    cls = type(value)
    return cls.__module__ == "numpy" and hasattr(value, "tobytes") and not getattr(value.dtype, "hasobject", True)


def _slots(cls: type) -> tuple[str, ...]:
    if is_foreign(cls):
        return ()
    found = (owner.__dict__.get("__slots__", ()) for owner in cls.__mro__)
    names = (name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
