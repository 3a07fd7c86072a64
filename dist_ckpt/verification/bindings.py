"""Names outside of the model that its code uses: globals, variables of closures, class attributes.

A forward may count in a global or draw from a generator in a closure. The functions of the modules' own classes, their
helpers and the loss function are searched for the names that their code loads and stores.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dist_ckpt.generators import is_generator
from dist_ckpt.verification.reach import PLAIN, is_foreign

HELPER_DEPTH = 4
"""How many functions deep a forward's helpers are looked into."""

MISSING = object()
"""What a name that is not there is bound to."""

_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "deepspeed", "dist_ckpt"}


@dataclass(frozen=True)
class Binding:
    """One such name."""

    label: str
    place: tuple[int, str]
    """What tells two names apart: their namespace, and the name in it."""
    read: Callable[[], Any]
    write: Callable[[Any], None]
    """Binds the name to another value; ``MISSING`` removes it."""


def class_bindings(cls: type) -> Iterator[Binding]:
    """The names that the methods of a class use, and the data that the class keeps, with those of its bases.

    Classes of torch and Python keep no state of a model, and have none.
    """
    for owner in cls.__mro__:
        if is_foreign(owner):
            continue
        for name, value in list(vars(owner).items()):
            for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
                yield from function_bindings(getattr(function, "__func__", function))
            is_data = isinstance(value, (*PLAIN, Tensor, list, dict, set, collections.deque)) or is_generator(value)
            if is_data and not name.startswith("__"):
                yield _of_class(owner, name)


def function_bindings(function: Any) -> Iterator[Binding]:
    """The names that a function and its helpers use; none for anything else than a function of the user's."""
    yield from _bindings(function, set(), HELPER_DEPTH)


def _bindings(function: Any, seen: set[Any], depth: int) -> Iterator[Binding]:
    if not isinstance(function, types.FunctionType) or function in seen or is_foreign(function) or depth < 0:
        return
    seen.add(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if isinstance(_content(cell), types.FunctionType):  # what a decorator wraps
            yield from _bindings(_content(cell), seen, depth)
        else:
            label = f"variable {name!r} around {function.__qualname__}"
            yield Binding(label, (id(cell), ""), functools.partial(_content, cell), functools.partial(_fill, cell))
    loaded, stored, attributes = _names_in(function.__code__)
    for name in sorted(loaded | stored):
        value = function.__globals__.get(name, MISSING)
        if isinstance(value, types.FunctionType):
            yield from _bindings(value, seen, depth - 1)
        elif isinstance(value, types.ModuleType):
            yield from _of_module(value, attributes, seen, depth)
        elif isinstance(value, type):
            if not is_foreign(value) and not issubclass(value, nn.Module):
                yield from (_of_class(value, a) for a in sorted(attributes & vars(value).keys()) if _is_data(value, a))
        elif value is not MISSING or name in stored:
            yield _of_namespace(function.__globals__, name, function.__module__)


def _of_module(module: types.ModuleType, attributes: frozenset[str], seen: set[Any], depth: int) -> Iterator[Binding]:
    """What a function may use of a module that it names: helpers, and data in it."""
    if module.__name__.partition(".")[0] in _FOREIGN:
        return
    for name in sorted(attributes & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, types.FunctionType):
            yield from _bindings(value, seen, depth - 1)
        elif not isinstance(value, (type, types.ModuleType)):
            yield _of_namespace(vars(module), name, module.__name__)


def _of_namespace(names: dict[str, Any], name: str, module: str) -> Binding:
    def write(value: Any) -> None:
        if value is MISSING:
            names.pop(name, None)
        else:
            names[name] = value

    return Binding(f"global {name!r} of {module}", (id(names), name), lambda: names.get(name, MISSING), write)


def _of_class(cls: type, name: str) -> Binding:
    return Binding(
        f"class attribute {cls.__name__}.{name}",
        (id(cls), name),
        lambda: vars(cls).get(name, MISSING),
        lambda value: setattr(cls, name, value),
    )


def _is_data(cls: type, name: str) -> bool:
    value = vars(cls)[name]
    return not callable(value) and not isinstance(value, (property, classmethod, staticmethod))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _fill(cell: Any, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The globals that code loads, those that it stores, and the attributes that it names; of nested functions too."""
    loaded, stored, attributes = set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(name)
        elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored.add(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            attributes.add(name)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, inner in zip((loaded, stored, attributes), _names_in(constant), strict=True):
                names |= inner
    return frozenset(loaded), frozenset(stored), frozenset(attributes)
