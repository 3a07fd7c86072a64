"""The keys of a configuration: plain data into its dataclasses, with one message for a key that does not exist."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from dist_ckpt.errors import ConfigError, choices
from dist_ckpt.policy import POLICIES, Policy, policy_from
from dist_ckpt.typed import alternatives, field_types, shown

T = TypeVar("T")

_MESH = re.compile(
    r"((tp|cp|sp|ulysses|ring)|(tensor|context|sequence)(_model)?(_parallel(ism)?)?|parallel(ism)?(_\w+)?|(device_)?mesh)"
    r"(_(size|degree|dim|mesh|world_size))?"
)


def build(cls: type[T], data: Mapping[str, Any]) -> T:
    """A configuration from plain data; missing keys have their defaults.

    Raises:
        ConfigError: an unknown key, with the nearest valid one; whatever the dataclasses refuse.
        PlanError: as :func:`~dist_ckpt.policy.policy_from`.
    """
    return _section(cls, data, "", leaves(cls))


def leaves(cls: type, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Each key below a dataclass, dotted, with the types of its value; the policies are one section."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, hint in field_types(cls).items():
        if _is_policy(hint):
            for policy in POLICIES.values():
                found |= leaves(policy, f"{prefix}{name}.")
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= leaves(hint, f"{prefix}{name}.")
        else:
            found[prefix + name] = alternatives(hint)
    return found


def mesh_refusal(name: str) -> str | None:
    """The message if ``name`` asks for a tensor- or context-parallel mesh, else None."""
    if not _MESH.fullmatch(name.replace("-", "_").lower()):
        return None
    return "tensor/context parallel meshes are not supported; all ranks are data parallel"


def _section(cls: type[T], data: Any, where: str, known: Mapping[str, Any]) -> T:
    hints = field_types(cls)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={shown(data)}: is a section, not a value; its keys: {', '.join(sorted(hints))}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise ConfigError(f"{path}: {_unknown(str(key), hints, known)}")
        hint = hints[key]
        if _is_policy(hint):
            value = policy_from(value)
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            value = _section(hint, value, path, known)
        values[key] = value
    return cls(**values)


def _unknown(key: str, valid: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    elsewhere = [path for path in known if path.rpartition(".")[2] == key]
    near = f"did you mean {' or '.join(elsewhere)}?" if elsewhere else choices(key, valid)
    return mesh_refusal(key) or f"no such key; {near}"


def _is_policy(hint: Any) -> bool:
    return typing.get_origin(hint) is None and isinstance(hint, type) and issubclass(hint, Policy)
