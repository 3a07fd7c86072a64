"""Finding a model's blocks, in any model.

A block is one of the model's repeated layers. All names here are the modules' own, as ``named_modules()`` of the
plain model gives them.
"""

from __future__ import annotations

import re
from collections import Counter

from torch import nn

from dist_ckpt.errors import PlanError, choices
from dist_ckpt.layers import repeated_layers
from dist_ckpt.names import named_modules, own_class, unwrap


def find_blocks(model: nn.Module, spec: str | tuple[str, ...] = "auto", key: str = "blocks") -> tuple[str, ...]:
    """Names of the model's blocks, in the order of registration.

    Args:
        spec: ``auto``, a class name, a glob over module names (see :func:`glob_match`), or several of these.
        key: the option that holds them, for messages.

    Raises:
        PlanError: a pattern that matches nothing; the message lists the classes that do occur.
    """
    specs = (spec,) if isinstance(spec, str) else spec
    if not specs:
        raise PlanError(f"ckpt.{key} is empty: name blocks, or ask for mode 'none'")
    found: set[str] = set()
    for one in specs:
        names = repeated_layers(model) if one == "auto" else _named_or_classed(model, one)
        if not names:
            raise PlanError(_nothing_found(model, one, key))
        found |= names
    return tuple(name for name, _ in named_modules(model) if name in found and not _inside(name, found))


def glob_match(name: str, pattern: str) -> bool:
    """Whether a dotted module name matches a glob: ``*`` and ``?`` stay within one level, ``**`` crosses levels."""
    regex = "".join(
        {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}.get(token) or re.escape(token)
        for token in re.split(r"(\*\*|\*|\?)", pattern)
        if token
    )
    return re.fullmatch(regex, name) is not None


def class_name(module: nn.Module) -> str:
    """The module's class as its author named it."""
    return own_class(module).__name__


def _named_or_classed(model: nn.Module, spec: str) -> set[str]:
    modules = [(name, module) for name, module in named_modules(model) if name]
    by_class = {name for name, module in modules if class_name(module) == spec}
    return by_class or {name for name, _ in modules if glob_match(name, spec)}


def _inside(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in others for i in range(1, len(parts)))


def _nothing_found(model: nn.Module, spec: str, key: str) -> str:
    modules = [module for name, module in named_modules(model) if name]
    composite = [module for module in modules if next(module.children(), None) is not None]
    counts = Counter(class_name(module) for module in composite or modules)
    classes = ", ".join(f"{name} ({n})" for name, n in counts.most_common(12)) or "(the model has no submodules)"
    if spec == "auto":
        return (
            f"no blocks found in {class_name(unwrap(model))}: it has no list of repeated composite layers. "
            f"Name them with ckpt.{key}: a class name or a glob over module names. Classes in the model: {classes}"
        )
    return (
        f"ckpt.{key}={spec!r} matches no module of {class_name(unwrap(model))}, by class or by name; "
        f"{choices(spec, counts)} (how often: {classes})"
    )
