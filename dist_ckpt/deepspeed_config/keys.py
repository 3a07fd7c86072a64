"""How the tables of :mod:`~dist_ckpt.deepspeed_config.schema` describe a key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MOST = 2**63 - 1
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Kind:
    """What a value may be. ``accepts`` sees JSON values: True is no integer, and "2" no number."""

    described: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value
    """The value as DeepSpeed gets it."""


class Auto(Enum):
    """What the value ``"auto"`` of a key stands for."""

    run = "run"
    """The run's own option (:data:`~dist_ckpt.deepspeed_config.run.AGREEMENTS`), or what follows from several."""
    default = "default"
    """DeepSpeed's own choice: the key is left out."""
    off = "off"
    """False."""


BOOL = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a string", lambda value: isinstance(value, str))
TEXTS = Kind("a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
ANYTHING = Kind("", lambda value: True)
"""For what is refused whatever it is."""


def whole(least: int = 0, most: int = MOST) -> Kind:
    """A count: ``4``, and not ``4.0``."""
    return Kind(_bounded("a whole number", least, most), lambda v: type(v) is int and least <= v <= most)


def elements(least: int = 0, multiple: int = 1) -> Kind:
    """A number of elements, which is often written ``5e8``."""
    even = f" that is a multiple of {multiple}" if multiple > 1 else ""
    return Kind(
        f"{_bounded('a whole number', least, MOST)}{even}",
        lambda v: is_number(v) and v == int(v) and least <= v <= MOST and int(v) % multiple == 0,
        read=int,
    )


def number(least: float = 0.0, below: float = math.inf) -> Kind:
    """A finite number from ``least`` up to, and without, ``below``."""
    described = f"a number of at least {least:g}" + f" and below {below:g}" * (below < math.inf)
    return Kind(described, lambda v: is_number(v) and least <= v < below)


def pair(kind: Kind) -> Kind:
    """A list of two."""
    return Kind(
        f"a list of two, each {kind.described}",
        lambda v: isinstance(v, list) and len(v) == 2 and all(kind.accepts(one) for one in v),
    )


def one_of(*names: str | None) -> Kind:
    """One of these strings; None is JSON's null."""
    described = ", ".join(json.dumps(name) for name in names)
    return Kind(f"one of {described}", lambda v: (v is None or isinstance(v, str)) and v in names)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that a float can hold."""
    return type(value) in (int, float) and abs(value) < 2**1000


def _bounded(what: str, least: int, most: int) -> str:
    if most < MOST:
        return f"{what} from {least} to {most}"
    return f"{what} of at least {least}" if least else what


@dataclass(frozen=True)
class Key:
    """One key that DeepSpeed knows, and what becomes of it here."""

    kind: Kind = OBJECT
    inner: Mapping[str, Key] = field(default_factory=dict)
    """The keys of an object."""
    auto: Auto | None = None
    """None: ``"auto"`` means nothing here."""
    stages: tuple[int, ...] = STAGES
    """ZeRO stages at which it acts. At others DeepSpeed ignores it, so it is refused."""
    refused: str = ""
    """Why every value but the ``fine`` ones is refused, and what to do instead."""
    fine: tuple[Any, ...] = (False, None)
    """Values that ask for nothing, and so are taken (and left out) where others are refused. An object that is switched
    off, by ``"enabled": false`` or ``"device": "none"``, or that is empty is one of them."""
    required: str = ""
    """Why its section must have it, and what to write."""
    empty: str = ""
    """What to do instead of an object that asks for nothing."""
    renamed: str = ""
    """The key that took the place of this deprecated one."""
    moot: str = ""
    """What makes it needless: it is taken, left out, and said in the notes."""

    @property
    def offered(self) -> bool:
        """Whether there is a value that asks for something; other keys are listed to be refused with a reason."""
        return not self.renamed and (not self.refused or any(value not in (False, None) for value in self.fine))

    def is_fine(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        if isinstance(value, dict):
            return self.is_off(value)
        if isinstance(value, str):  # DeepSpeed takes names in any case
            return any(isinstance(f, str) and value.lower() == f.lower() for f in self.fine)
        return any(value == f and isinstance(value, bool) == isinstance(f, bool) for f in self.fine)

    def is_off(self, value: Mapping[str, Any]) -> bool:
        """Whether an object is switched off as a whole."""
        if None not in self.fine:
            return False
        switch, enabled = self.inner.get("enabled"), value.get("enabled")
        automatic = switch is not None and switch.auto is Auto.off and enabled == "auto"
        return not value or enabled is False or automatic or value.get("device") == "none"
