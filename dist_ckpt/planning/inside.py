"""Modules inside blocks, by a word or by a glob: what the modes that look into blocks share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from dist_ckpt.blocks import class_name, glob_match
from dist_ckpt.errors import PlanError, choices
from dist_ckpt.names import named_modules
from dist_ckpt.plan import fold_names
from dist_ckpt.planning.planned import Target
from dist_ckpt.policy import listed

_WORDS: Mapping[str, str] = {
    "attention": r"attn|attention",
    "mlp": r"mlp|feed_?forward|ffn|moe|experts",
    "chunk": r"chunk",
}
"""What a module's own name or class contains."""


def select_inside(target: Target, patterns: str | tuple[str, ...], key: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """The outermost modules inside the blocks that match any pattern, and how many modules each pattern matched.

    Args:
        patterns: ``attention``, ``mlp``, ``chunk``, ``block`` (the block itself), or globs over module names relative
            to the block. A module that is really named so wins over the word.
        key: the option that holds the patterns, for messages.

    Raises:
        PlanError: a pattern that matches nothing in any block.
    """
    patterns = listed(patterns)
    if not patterns:
        raise PlanError(f"ckpt.{key} is empty: name modules, or ask for mode 'none'")
    inside = {
        f"{block}.{name}": (name, module)
        for block, within in named_modules(target.model)
        if block in target.blocks
        for name, module in named_modules(within)
        if name
    }
    chosen: set[str] = set()
    matched: dict[str, int] = {}
    for pattern in patterns:
        found = {full for full, (name, _) in inside.items() if glob_match(name, pattern)}
        if not found and pattern in _WORDS:
            found = outermost({full for full, (name, module) in inside.items() if _is_a(pattern, name, module)})
        if not found and pattern == "block":
            found = set(target.blocks)
        if not found:
            raise PlanError(_nothing_found(key, pattern, target.blocks, [name for name, _ in inside.values()]))
        chosen |= found
        matched[f"{key}={pattern}"] = len(found)
    names = outermost(chosen)
    return tuple(name for name, _ in named_modules(target.model) if name in names), matched


def outermost(names: set[str]) -> set[str]:
    """Those names that lie inside no other of them."""
    return {name for name in names if not any(name.startswith(f"{other}.") for other in names)}


def _is_a(word: str, name: str, module: nn.Module) -> bool:
    """Whether a module is what the word says, by its own name or class; norms and dropouts around it are not."""
    computes = word == "chunk" or next(module.parameters(), None) is not None
    words = f"{name.rpartition('.')[2]} {class_name(module)}".lower()
    return computes and bool(re.search(_WORDS[word], words)) and not re.search(r"norm|drop", words)


def _nothing_found(key: str, pattern: str, blocks: tuple[str, ...], names: list[str]) -> str:
    where = f"inside the blocks {', '.join(fold_names(blocks))}"
    if pattern in _WORDS:
        what = f"ckpt.{key}: no {pattern} found {where}; name the modules, relative to the block"
    else:
        what = f"ckpt.{key}={pattern!r} matches no module {where}"
    others = [word for word in (*_WORDS, "block") if word != pattern]
    return f"{what}; {choices(pattern, dict.fromkeys([*names, *others]))}"
