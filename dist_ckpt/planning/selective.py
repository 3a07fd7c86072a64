"""Mode ``selective``: each block is a region that keeps the results of chosen operations."""

from __future__ import annotations

from dist_ckpt.ops import resolve_op
from dist_ckpt.plan import OpRule, Region, SaveRule
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import SelectivePolicy

DEFAULT_SAVE = ("matmul", "convolution", "attention", "collective", "topk", "d2h")
"""What is expensive to recompute: arithmetic that grows faster than the bytes kept, and everything that communicates
or waits for the host. ``topk`` is kept because a routing that flips in the recompute changes gradients."""


def plan_selective(target: Target, policy: SelectivePolicy) -> Planned:
    """Every block recomputes all but what the rules keep; raises PlanError for an unknown operation."""
    names = DEFAULT_SAVE if policy.save is None else policy.save
    for name in names:
        resolve_op(name)
    # No model has every kind of operation, so single default rules may match nothing; what a user names must occur.
    rules = SaveRule(ops=tuple(OpRule("save", name, required=policy.save is not None) for name in names))
    return Planned(tuple(Region((block,), rules) for block in target.blocks))
