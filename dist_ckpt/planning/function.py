"""Policies for a plain function: those that need no blocks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import EVERYTHING, OpRule, Region, SaveRule
from dist_ckpt.planning.options import with_options
from dist_ckpt.planning.planned import Target
from dist_ckpt.planning.selective import plan_selective
from dist_ckpt.policy import (
    BlockPolicy,
    FullPolicy,
    OffloadPolicy,
    PolicySpec,
    RecomputePolicy,
    SelectivePolicy,
    policy_from,
)
from dist_ckpt.wrap.function import recompute_function

Function = TypeVar("Function", bound=Callable[..., Any])
_OF_BLOCKS = ("blocks", "exclude", "min_bytes", "modules", "recompute_matmuls_of")
"""Options that are about modules inside a model."""


def recompute(function: Function, policy: PolicySpec = "full") -> Function:
    """A function that computes what the given one does, and recomputes it in backward.

    For a stretch of a training loop, a loss, or a method, where no module stands for what is to be recomputed. As in
    :func:`~dist_ckpt.apply`, generators are replayed and buffers of modules that it reaches are updated once.

    A module is a function too: what comes back calls it, and leaves it as it is. Its hooks lie inside then, and fire in
    the recompute as well.

    Args:
        policy: ``full``, ``selective`` or ``offload``, with the options that say nothing about modules.

    Raises:
        PlanError: another mode, an option about modules, or something that cannot be called.
    """
    if not callable(function):
        raise PlanError(f"a {type(function).__name__} cannot be called, so it cannot be recomputed")
    if isinstance(function, type):
        raise PlanError(f"{function.__name__} is a class: an instance of it is needed")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise PlanError(f"{function.__qualname__} runs after it has returned, so it cannot be recomputed")
    asked = policy_from(policy)
    if not isinstance(asked, (FullPolicy, SelectivePolicy, OffloadPolicy)):
        raise PlanError(f"ckpt.mode={asked.mode}: a function has no blocks. Valid: full, offload, selective")
    for field in dataclasses.fields(asked):
        if field.name in _OF_BLOCKS and getattr(asked, field.name) != field.default:
            raise PlanError(f"ckpt.{field.name}: a function has no modules to choose from")
    name = getattr(function, "__qualname__", type(function).__name__)
    region = _region(name, asked)
    return recompute_function(function, with_options(region, asked) if isinstance(asked, RecomputePolicy) else region)


def _region(name: str, policy: BlockPolicy) -> Region:
    if isinstance(policy, SelectivePolicy):
        return plan_selective(Target(nn.Module(), (name,)), policy).regions[0]
    rules = (OpRule("offload", EVERYTHING),) if isinstance(policy, OffloadPolicy) else ()
    return Region((name,), SaveRule(ops=rules))
