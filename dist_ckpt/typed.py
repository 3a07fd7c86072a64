"""Dataclasses that hold what their annotations say, whether Python, YAML or a command line filled them in."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Union

from dist_ckpt.errors import ConfigError, DistCkptError, choices


class Choice(str, Enum):
    """A value with a fixed set of names. It compares, prints and formats as its name."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as ``Annotated[int, Range(least=1)]``; ``least`` and ``most`` are inside."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def problem(self, value: Any) -> str | None:
        """The bound that ``value`` violates, as a message says it; None for a value in range."""
        if self.least is not None and value < self.least:
            return f"at least {self.least}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return f"at most {self.most}" if self.most is not None and value > self.most else None


Size = Annotated[int, Range(least=1, below=2**31)]
"""A count of things; the bound catches slips of the keyboard before they become allocations."""
Interval = Annotated[int, Range(least=0, below=2**31)]
"""A count that may be none."""
Positive = Annotated[float, Range(above=0)]


class Checked:
    """Base of dataclasses whose fields are checked, and converted where that is safe, on construction.

    Fields are ``int``, ``float``, ``bool``, ``str``, :class:`Choice`, ``tuple[str, ...]``, ``tuple[int, ...]``, another
    class, or a union of these; numbers may have a :class:`Range`. A whole number becomes a float, a name its
    :class:`Choice`, and a list a tuple, each where it is wanted.

    Raises:
        DistCkptError: of the subclass's ``error``; it names the key and what would be valid.
    """

    _section: ClassVar[str] = ""
    _error: ClassVar[type[DistCkptError]] = ConfigError

    def __init_subclass__(cls, section: str | None = None, error: type[DistCkptError] | None = None) -> None:
        """``section`` precedes the keys in messages; both are inherited."""
        cls._section, cls._error = section or cls._section, error or cls._error

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            where = f"{self._section}.{name}" if self._section else name
            value = _checked(where, getattr(self, name), hint, self._error)
            object.__setattr__(self, name, value)  # also in frozen dataclasses
        self.check()

    def check(self) -> None:
        """What no single field can tell."""


def field_types(cls: type) -> dict[str, Any]:
    """Field name to type, ranges included."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself; without ranges."""
    return tuple(kind for kind, _ in _ranged(hint))


def shown(value: Any) -> str:
    """A value as YAML has it; text that would read as something else is in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    ambiguous = isinstance(value, str) and re.fullmatch(r"\s*|null|true|false|[-+.]*\d.*", value)
    return value if isinstance(value, str) and not ambiguous else repr(value)


def _ranged(hint: Any) -> list[tuple[Any, Range]]:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return [typing.get_args(k) if typing.get_origin(k) is Annotated else (k, Range()) for k in kinds]


def _checked(where: str, value: Any, hint: Any, error: type[DistCkptError]) -> Any:
    kinds = _ranged(hint)
    or_null = ", or null" if any(kind is type(None) for kind, _ in kinds) else ""
    for kind, limits in kinds:
        converted = _converted(value, kind)
        if not _is(converted, kind) or (or_null and isinstance(value, str) and value.lower() == "none"):
            continue
        finite = not isinstance(converted, float) or math.isfinite(converted)
        if problem := limits.problem(converted) if finite else "finite":
            raise error(f"{where}={shown(value)}: must be {problem}{or_null}")
        return converted
    kind = kinds[0][0]
    if isinstance(kind, type) and issubclass(kind, Choice):
        raise error(f"{where}={shown(value)}: {choices(str(value), [*kind.__members__, *['null'] * bool(or_null)])}")
    hint_text = " (null is written null)" if or_null and str(value).lower() == "none" else ""
    wanted = " or ".join(_described(k) for k, _ in kinds)
    raise error(f"{where}={shown(value)}: must be {wanted}{hint_text}")


def _converted(value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf
    if typing.get_origin(kind) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    if isinstance(kind, type) and issubclass(kind, Choice) and isinstance(value, str) and value in kind.__members__:
        return kind(value)
    return value


def _is(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(v, typing.get_args(kind)[0]) for v in value)
    exact = kind in (int, float, bool, str, type(None))  # True is no int here
    return type(value) is kind if exact else isinstance(value, kind)


def _described(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "a list of integers" if typing.get_args(kind)[0] is int else "a list of strings"
    names = {int: "an integer", str: "a string", bool: "true or false", float: "a number", type(None): "null"}
    return names.get(kind) or f"a {kind.__name__}"
