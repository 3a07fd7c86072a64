"""A module that recomputes its forward.

The module is not put into a wrapper: it gets a subclass of its own class, as FSDP2 does it. Names, ``state_dict``
keys, ``isinstance`` and the class's name stay what they were; a deep copy is an independent model that still
recomputes. Hooks of the module lie outside its ``forward``, so they run once, and a sharding hook (FSDP2's unshard)
never falls inside the region, where it would shift the positions of an op-level cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dist_ckpt.errors import PlanError
from dist_ckpt.guards.forward_state import ForwardState, buffers_of
from dist_ckpt.names import InPlaceWrapper, own_class
from dist_ckpt.plan import Region
from dist_ckpt.wrap.oplevel import compiled_contexts, eager_contexts

_REGION = "_dist_ckpt_region"
_COMPILED = "_dist_ckpt_compiled_contexts"
_CHECKPOINT_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) | {"preserve_rng_state"}
"""Keyword arguments that torch's checkpoint takes for itself, so that a block's own of that name must go around it."""


class Recomputed(InPlaceWrapper):
    """Mixed in before a module's own class by :func:`recompute_module`."""

    def extra_repr(self) -> str:
        region: Region = self.__dict__[_REGION]
        kept = ", ".join(map(str, region.save.ops))
        mark = "recomputed" + (f": {kept}" if kept else "")
        return ", ".join(filter(None, (super().extra_repr(), mark)))  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class made below has no importable name: pickle and deepcopy make the plain module, then this one of it.
        make, arguments, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        plain = tuple(own_class(self) if a is type(self) else a for a in arguments)  # type: ignore[arg-type]
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in (_REGION, _COMPILED)}
        return (rebuild, (make, plain, self.__dict__[_REGION]), *rest)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _remember(self, self.__dict__[_REGION])  # type: ignore[arg-type]  # now that its modules are there


@functools.cache
def _recomputed_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)  # callers look at the signature to know what a block takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.forward, self)
        # In eval or without gradients there is nothing to recompute for, and nothing is paid.
        if not (self.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        if not _CHECKPOINT_OPTIONS.isdisjoint(kwargs):
            run, kwargs = functools.partial(run, **kwargs), {}
        region: Region = self.__dict__[_REGION]
        if torch.compiler.is_compiling():
            if self.__dict__[_COMPILED] is None:
                raise PlanError(
                    f"a recomputed {cls.__name__} has buffers, and compiled code would not recompute with the values "
                    "that its forward found: do not compile it, or leave it out of the plan"
                )
            return checkpoint(run, *args, use_reentrant=False, **self.__dict__[_COMPILED], **kwargs)
        contexts = eager_contexts(region) if region.save.ops else (nullcontext(), None)
        state = ForwardState(self, contexts[1])
        out = checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (contexts[0], state), **kwargs)
        state.forward_ends()
        return out

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Recomputed, cls), {**names, "forward": forward})


def rebuild(make: Callable[..., nn.Module], arguments: tuple[Any, ...], region: Region) -> nn.Module:
    """Makes a pickled or copied module that recomputes; pickles name this function."""
    return recompute_module(make(*arguments), region)


def _remember(module: nn.Module, region: Region) -> None:
    module.__dict__[_REGION] = region
    # Made now, because a compiler that traces the forward cannot look up operators by name.
    options = {"context_fn": compiled_contexts(region)} if region.save.ops else {}
    is_filled = "_modules" in module.__dict__  # not yet, while a copy is being made
    has_buffers = is_filled and any(not isinstance(owner, _BatchNorm) for _, owner, _, _ in buffers_of(module))
    module.__dict__[_COMPILED] = None if has_buffers else options


def recompute_module(module: nn.Module, region: Region) -> nn.Module:
    """Makes a module recompute its forward in backward, in place.

    Args:
        region: what is kept; its ``modules`` are not looked at.

    Returns:
        The same object, so that it can serve as ``checkpoint_wrapper_fn`` of ``apply_activation_checkpointing``.
    """
    assert not is_recomputed(module), "checked by apply_plan"
    _remember(module, region)
    module.__class__ = _recomputed_class(type(module))  # type: ignore[arg-type]
    return module


def restore_module(module: nn.Module) -> None:
    """Undoes :func:`recompute_module`.

    Raises:
        PlanError: the module was sharded since, by FSDP2, whose class stands before this one.
    """
    stand_in, *bases = type(module).__bases__
    if stand_in is not Recomputed:
        raise PlanError(f"a {own_class(module).__name__} was sharded since: remove its plan before sharding")
    module.__class__ = bases[0]
    del module.__dict__[_REGION], module.__dict__[_COMPILED]


def compiles(module: nn.Module) -> bool:
    """Whether every module in it that recomputes may do so in compiled code: none has buffers of its own to replay."""
    return all(m.__dict__[_COMPILED] is not None for m in module.modules() if is_recomputed(m))


def is_recomputed(module: nn.Module) -> bool:
    """Whether a plan has made this very module recompute."""
    return isinstance(module, Recomputed)
