"""Finding a model's blocks, in any model.

A block is one of the model's repeated layers. All names here are the modules' own, as ``named_modules()`` of the
plain model gives them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from dist_ckpt.errors import PlanError, choices
from dist_ckpt.names import named_children, named_modules, own_class, unwrap


def find_blocks(model: nn.Module, spec: str | tuple[str, ...] = "auto") -> tuple[str, ...]:
    """Names of the model's blocks, in the order of registration.

    Args:
        spec: ``auto``, a class name, a glob over module names (see :func:`glob_match`), or several of these.

    Raises:
        PlanError: a pattern that matches nothing; the message lists the classes that do occur.
    """
    specs = (spec,) if isinstance(spec, str) else spec
    if not specs:
        raise PlanError("ckpt.blocks is empty: name blocks, or ask for mode 'none'")
    found: set[str] = set()
    for one in specs:
        names = set(_repeated_layers(model)) if one == "auto" else _named_or_classed(model, one)
        if not names:
            raise PlanError(_nothing_found(model, one))
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


def _repeated_layers(model: nn.Module) -> Iterator[str]:
    """Composite children of one class that a ``ModuleList``, ``ModuleDict`` or ``Sequential`` repeats, outermost first.

    A list of plain operations (``Sequential(Linear, ReLU, Linear)``) has no blocks: recomputing a single operation
    saves nothing. A list with one composite child counts, so that a model of depth one is no special case.
    """

    def visit(module: nn.Module, prefix: str) -> Iterator[str]:
        children = [(f"{prefix}{name}", child) for name, child in named_children(module)]
        blocks: set[str] = set()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            kinds = Counter(own_class(child) for _, child in children if _is_layer(child))
            repeated = {k for k, n in kinds.items() if n > 1 or (len(children) == 1 and prefix)}
            blocks = {name for name, child in children if own_class(child) in repeated and _is_layer(child)}
        for name, child in children:
            if name in blocks:
                yield name
            else:
                yield from visit(child, f"{name}.")

    yield from visit(unwrap(model), "")


def _is_layer(module: nn.Module) -> bool:
    """A layer is made of other modules, computes something itself, and has parameters."""
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    has_children = next(module.children(), None) is not None
    return has_children and not is_container and next(module.parameters(), None) is not None


def _named_or_classed(model: nn.Module, spec: str) -> set[str]:
    modules = [(name, module) for name, module in named_modules(model) if name]
    by_class = {name for name, module in modules if class_name(module) == spec}
    return by_class or {name for name, _ in modules if glob_match(name, spec)}


def _inside(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in others for i in range(1, len(parts)))


def _nothing_found(model: nn.Module, spec: str) -> str:
    modules = [module for name, module in named_modules(model) if name]
    composite = [module for module in modules if next(module.children(), None) is not None]
    counts = Counter(class_name(module) for module in composite or modules)
    classes = ", ".join(f"{name} ({n})" for name, n in counts.most_common(12)) or "(the model has no submodules)"
    if spec == "auto":
        return (
            f"no blocks found in {class_name(unwrap(model))}: it has no list of repeated composite layers. "
            f"Name them with ckpt.blocks: a class name or a glob over module names. Classes in the model: {classes}"
        )
    return (
        f"ckpt.blocks={spec!r} matches no module of {class_name(unwrap(model))}, by class or by name; "
        f"{choices(spec, counts)} (how often: {classes})"
    )
