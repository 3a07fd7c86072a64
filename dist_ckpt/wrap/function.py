"""A plain function that is recomputed in backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Region
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.region import run_region

Function = TypeVar("Function", bound=Callable[..., Any])


def recompute_function(function: Function, region: Region) -> Function:
    """The function, with what it saves for backward recomputed or offloaded as the region says.

    Modules that it is a method of, or that it closes over, are guarded as those of a region are: their buffers are as
    the forward found them and updated once, and with all of them in ``eval()`` nothing is recomputed.
    """
    modules = Reached(_modules_of(function))
    offloader = Offloader() if region.save.offloads else None

    # A module's attributes are no function's: __dict__ would come along.
    @functools.wraps(function, updated=() if isinstance(function, nn.Module) else functools.WRAPPER_UPDATES)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        is_eval = len(modules) > 0 and not any(module.training for module in modules)
        if is_eval or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise PlanError(
                f"{region.modules[0]} is recomputed, which compiled code does not see: compile inside of it"
            )
        return run_region(region, modules, function, offloader, args, kwargs, (function,))

    return cast(Function, recomputed)


class Reached(nn.ModuleList):
    """The modules that a function reaches."""


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Modules that a function is a method of, closes over, or has bound as arguments."""
    while isinstance(function, functools.partial):
        yield from (value for value in (*function.args, *function.keywords.values()) if isinstance(value, nn.Module))
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
    if inspect.isfunction(function):
        for value in inspect.getclosurevars(function).nonlocals.values():
            if isinstance(value, nn.Module):
                yield value
