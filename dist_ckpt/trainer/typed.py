"""Plain data, as YAML and the command line give it, into typed dataclasses; each mistake has one message."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, Union

from dist_ckpt.errors import ConfigError, choices
from dist_ckpt.policy import POLICIES, Policy, policy_from

T = TypeVar("T")

_MESH = re.compile(
    r"((tp|cp|sp|ulysses|ring)|(tensor|context|sequence)(_model)?(_parallel(ism)?)?|parallel(ism)?(_\w+)?|(device_)?mesh)"
    r"(_(size|degree|dim|mesh|world_size))?"
)


def build(cls: type[T], data: Mapping[str, Any]) -> T:
    """A ``cls``, whose fields are scalars, enums, policies or dataclasses; missing keys have their defaults.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type; the nearest valid one is suggested.
        PlanError: as :func:`~dist_ckpt.policy.policy_from`.
    """
    return _section(cls, data, "", leaves(cls))


def leaves(cls: type, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Each key below a dataclass, dotted, with the types of its value; the policies are one section."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, hint in field_types(cls).items():
        key = prefix + name
        if _is_policy(hint):
            for policy in POLICIES.values():
                found |= leaves(policy, f"{key}.")
        elif dataclasses.is_dataclass(hint):
            found |= leaves(typing.cast(type, hint), f"{key}.")
        else:
            found[key] = alternatives(hint)
    return found


def field_types(cls: type) -> dict[str, Any]:
    """Field name to type."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def mesh_refusal(name: str) -> str | None:
    """What to say where ``name`` asks for a tensor- or context-parallel mesh, else None."""
    if not _MESH.fullmatch(name.replace("-", "_").lower()):
        return None
    return "tensor/context parallel meshes are not supported; all ranks are data parallel"


def _is_policy(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Policy)


def _section(cls: type[T], data: Any, where: str, known: Mapping[str, Any]) -> T:
    hints = field_types(cls)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={_shown(data)}: is a section, not a value; its keys: {', '.join(sorted(hints))}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise ConfigError(f"{path}: {_unknown(str(key), hints, known)}")
        hint = hints[key]
        if _is_policy(hint):
            values[key] = policy_from(value)
        elif dataclasses.is_dataclass(hint):
            values[key] = _section(typing.cast(type, hint), value, path, known)
        else:
            values[key] = _scalar(path, value, alternatives(hint))
    return cls(**values)


def _unknown(key: str, valid: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    if refusal := mesh_refusal(key):
        return refusal
    elsewhere = [path for path in known if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"no such key; did you mean {' or '.join(elsewhere)}?"
    return f"no such key; {choices(key, valid)}"


def _scalar(where: str, value: Any, wanted: tuple[Any, ...]) -> Any:
    """``value``, checked. Conversions: a whole number where a float is wanted, a name to its enum member."""
    optional = type(None) in wanted
    if value is None and optional:
        return None
    for hint in wanted:
        if issubclass(hint, Enum):
            if isinstance(value, str) and value in hint.__members__:
                return hint(value)
        elif hint is float and type(value) in (int, float):
            if not math.isfinite(value):
                raise ConfigError(f"{where}={value}: must be finite{', or null' * optional}")
            return float(value)
        elif type(value) is hint and not (hint is str and optional and value.lower() == "none"):
            return value
    hint = wanted[0]
    if issubclass(hint, Enum):
        valid = [*hint.__members__, *["null"] * optional]
        raise ConfigError(f"{where}={_shown(value)}: {choices(str(value), valid)}")
    name = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[hint]
    hint_text = " (null is written null)" if optional and str(value).lower() == "none" else ""
    raise ConfigError(f"{where}={_shown(value)}: must be {name}{' or null' * optional}{hint_text}")


def _shown(value: Any) -> str:
    """A value as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) and value.strip() else repr(value)
