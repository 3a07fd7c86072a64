"""Mode ``selective_attention``: chosen modules inside each block are regions."""

from __future__ import annotations

import re

from torch import nn

from dist_ckpt.blocks import class_name, glob_match
from dist_ckpt.errors import PlanError, choices
from dist_ckpt.names import named_modules
from dist_ckpt.plan import Region, fold_names
from dist_ckpt.planning.planned import Planned
from dist_ckpt.policy import SelectiveAttentionPolicy


def plan_selective_attention(model: nn.Module, blocks: tuple[str, ...], policy: SelectiveAttentionPolicy) -> Planned:
    """The chosen modules of each block recompute whole; raises PlanError for a glob that matches nothing."""
    inside = {
        f"{block}.{name}": (name, module)
        for block, within in named_modules(model)
        if block in blocks
        for name, module in named_modules(within)
        if name
    }
    patterns = (policy.modules,) if isinstance(policy.modules, str) else policy.modules
    if not patterns:
        raise PlanError("ckpt.modules is empty: name modules, or ask for mode 'none'")
    chosen: set[str] = set()
    matched = {}
    for pattern in patterns:
        found = {
            full
            for full, (name, module) in inside.items()
            if (_is_attention(name, module) if pattern == "auto" else glob_match(name, pattern))
        }
        if not found:
            raise PlanError(_nothing_found(pattern, blocks, [name for name, _ in inside.values()]))
        chosen |= found
        matched[f"modules={pattern}"] = len(found)
    outermost = {name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)}
    return Planned(tuple(Region((name,)) for name in inside if name in outermost), matched)


def _is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module computes attention, by its own name or class; norms and dropouts around it do not."""
    has_parameters = next(module.parameters(), None) is not None
    words = f"{name.rpartition('.')[2]} {class_name(module)}".lower()
    return has_parameters and bool(re.search(r"attn|attention", words)) and not re.search(r"norm|drop", words)


def _nothing_found(pattern: str, blocks: tuple[str, ...], names: list[str]) -> str:
    where = f"inside the blocks {', '.join(fold_names(blocks))}"
    if pattern == "auto":
        what = f"ckpt.modules: no attention found {where}; name the modules, relative to the block"
    else:
        what = f"ckpt.modules={pattern!r} matches no module {where}"
    return f"{what}; {choices(pattern, dict.fromkeys(names))}"
