"""Policy → Plan: a file a mode, each a pure function of the model's module names and the policy."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dist_ckpt.blocks import find_blocks
from dist_ckpt.names import named_modules
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.planning.every_k import plan_every_k
from dist_ckpt.planning.full import plan_full
from dist_ckpt.planning.planned import Planned
from dist_ckpt.planning.selective import plan_selective
from dist_ckpt.planning.selective_attention import plan_selective_attention
from dist_ckpt.policy import (
    BlockPolicy,
    EveryKPolicy,
    FullPolicy,
    Policy,
    SelectiveAttentionPolicy,
    SelectivePolicy,
    policy_from,
)

Planner = Callable[[nn.Module, tuple[str, ...], Any], Planned]
"""(model, names of its blocks, policy) → regions and matches."""

_PLANNERS: Mapping[type[Policy], Planner] = types.MappingProxyType(
    {
        FullPolicy: plan_full,
        EveryKPolicy: plan_every_k,
        SelectivePolicy: plan_selective,
        SelectiveAttentionPolicy: plan_selective_attention,
    }
)


def make_plan(model: nn.Module, policy: str | Mapping[str, Any] | Policy | None) -> Plan:
    """The plan that a policy means for a model. The model is only looked at, and may live on the meta device.

    Args:
        policy: a mode name, a mapping with ``mode`` (a dict or an OmegaConf node), a policy object, or ``None``.

    Raises:
        PlanError: an unknown mode or option; blocks or patterns that match nothing.
    """
    asked = policy_from(policy)
    if not isinstance(asked, BlockPolicy):
        return Plan(policy=asked.to_dict())
    blocks = find_blocks(model, asked.blocks)
    planned = _PLANNERS[type(asked)](model, blocks, asked)
    covered = tuple(name for region in planned.regions for name in region.modules)
    specs = (asked.blocks,) if isinstance(asked.blocks, str) else asked.blocks
    matched = {f"blocks={spec}": len(find_blocks(model, spec)) for spec in specs} | dict(planned.matched)
    return Plan(
        blocks=blocks,
        regions=planned.regions,
        matched=tuple(matched.items()),
        repairs=_repairs(model, covered),
        unmatched=tuple(b for b in blocks if not any(c == b or c.startswith(f"{b}.") for c in covered)),
        policy=asked.to_dict(),
    )


def _repairs(model: nn.Module, covered: tuple[str, ...]) -> tuple[str, ...]:
    """What the regions put right by themselves; see :mod:`dist_ckpt.guards.forward_state`."""
    owners = {
        f"{name}.{prefix}".strip(".")
        for name, module in named_modules(model)
        if name in covered
        for prefix, inside in named_modules(module)
        if any(buffer is not None for buffer in inside._buffers.values())
    }
    ordered = tuple(name for name, _ in named_modules(model) if name in owners)
    return tuple(f"buffers of {name} are as its forward found them, and updated once" for name in fold_names(ordered))
