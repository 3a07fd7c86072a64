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
from threading import get_ident
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dist_ckpt.errors import PlanError
from dist_ckpt.guards.foreign import refuse_running_checkpoint
from dist_ckpt.guards.forward_state import ForwardState, buffers_of
from dist_ckpt.names import InPlaceWrapper, own_class
from dist_ckpt.plan import Region
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.oplevel import RULES, compiled_contexts
from dist_ckpt.wrap.region import CHECKED, first_forward_checked, inputs_kept_under, run_region
from dist_ckpt.wrap.segment import Segment, run_again
from dist_ckpt.wrap.span import Forward

_REGION = "_dist_ckpt_region"
_SEGMENT = "_dist_ckpt_segment"
_AGAIN = "_dist_ckpt_runs_again"
"""Threads in which a block's forward runs for its segment's recompute."""
_COMPILED = "_dist_ckpt_compiled_contexts"
_COMPILED_FORWARD = "_dist_ckpt_compiled_forward"
_UNCOMPILED = "_dist_ckpt_why_uncompiled"
_OFFLOADER = "_dist_ckpt_offloader"
_COPIED = frozenset({_SEGMENT, _OFFLOADER})
_ADDED = _COPIED | {_REGION, _AGAIN, _COMPILED, _COMPILED_FORWARD, _UNCOMPILED, CHECKED, RULES}
_CHECKPOINT_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) | {"preserve_rng_state"}
"""Keyword arguments that torch's checkpoint takes for itself, so that a block's own of that name must go around it."""


class Recomputed(InPlaceWrapper):
    """Mixed in before a module's own class by :func:`recompute_module` and :func:`join_segment`."""

    def extra_repr(self) -> str:
        marks = [super().extra_repr()]  # type: ignore[misc]
        if _SEGMENT in self.__dict__:
            segment, position = self.__dict__[_SEGMENT]
            marks.append(f"recomputed as {position + 1} of {len(segment.places)}")
        if _REGION in self.__dict__:
            region: Region = self.__dict__[_REGION]
            kept = ", ".join(map(str, region.save.ops))
            marks.append("recomputed" + (f": {kept}" if kept else ""))
        return ", ".join(filter(None, marks))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class made below has no importable name: pickle and deepcopy make the plain module, then this one of it.
        make, arguments, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        plain = tuple(own_class(self) if a is type(self) else a for a in arguments)  # type: ignore[arg-type]
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in _ADDED - _COPIED}
        return (rebuild, (make, plain, self.__dict__.get(_REGION), _SEGMENT in self.__dict__), *rest)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if _REGION in self.__dict__:
            _remember(self, self.__dict__[_REGION])  # type: ignore[arg-type]  # now that its modules are there


class SegmentBlock(Recomputed):
    """A block of a segment of several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _runs_again(self):  # through FSDP1's wrapper: hooks fire once, in the forward
            return self.forward(*args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _must_recompute(module: nn.Module) -> bool:
    """In eval or without gradients there is nothing to recompute for, and nothing is paid."""
    return module.training and torch.is_grad_enabled()


@functools.cache
def _recomputed_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)  # callers look at the signature to know what a block takes
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.forward, self)
        if not _must_recompute(self):
            return run(*args, **kwargs)
        region: Region = self.__dict__[_REGION]
        if torch.compiler.is_compiling():
            return _run_compiled(self, run, args, kwargs)
        refuse_running_checkpoint(self)
        return run_region(region, self, run, self.__dict__.get(_OFFLOADER), args, kwargs)

    return _stand_in(Recomputed, cls, forward)


def _run_compiled(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The forward as the compiler traces it, which knows torch's own checkpoint and nothing else."""
    if problem := module.__dict__[_UNCOMPILED]:
        _refuse(problem)
    if not _CHECKPOINT_OPTIONS.isdisjoint(kwargs):
        run, kwargs = functools.partial(run, **kwargs), {}
    return checkpoint(run, *args, use_reentrant=False, **module.__dict__[_COMPILED], **kwargs)


@torch.compiler.disable
def _refuse(problem: str) -> None:
    """Raises when the compiled code runs: an error that is raised while tracing has the compiler fall back silently,
    and compile what lies inside the region by itself."""
    raise PlanError(problem)


@functools.cache
def _segment_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.__dict__.get(_COMPILED_FORWARD) or functools.partial(cls.forward, self)
        if _runs_again(self) or not _must_recompute(self):
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():
            _refuse(
                f"a {cls.__name__} is part of a segment, whose blocks share one frame that compiled code does not "
                "see: do not compile it, or choose a mode that works block by block"
            )
        refuse_running_checkpoint(self)
        segment, position = cast(tuple[Segment, int], self.__dict__[_SEGMENT])
        region, offloader = segment.region, self.__dict__.get(_OFFLOADER)
        state = ForwardState(self, region.modules[position])
        again = functools.partial(_run_again, self, segment.places[position], run)
        forward = Forward(run, again, contexts=(lambda: state,))
        with first_forward_checked(region, self, region.modules[position]):
            out = segment.run(position, forward, inputs_kept_under(region, self, offloader), args, kwargs)
        state.forward_ends()
        return out

    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # The block's own forward; the frame that it shares with its neighbours is no business of the compiler.
        self.__dict__[_COMPILED_FORWARD] = torch.compile(functools.partial(cls.forward, self), *args, **kwargs)

    return _stand_in(SegmentBlock, cls, forward, compile=compile)


def _runs_again(module: Any) -> bool:
    return get_ident() in module.__dict__.get(_AGAIN, ())


def _run_again(module: nn.Module, place: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    threads: set[int] = module.__dict__.setdefault(_AGAIN, set())
    threads.add(get_ident())
    try:
        return run_again(place, module, run, args, kwargs)
    finally:
        threads.discard(get_ident())


def _stand_in(kind: type, cls: type[nn.Module], forward: Callable[..., Any], **others: Any) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (kind, cls), {**names, "forward": forward, **others})


def rebuild(
    make: Callable[..., nn.Module], arguments: tuple[Any, ...], region: Region | None, in_segment: bool
) -> nn.Module:
    """Makes a pickled or copied module that recomputes; pickles name this function."""
    module = make(*arguments)
    if region is not None:
        recompute_module(module, region)
    if in_segment:  # which one is in its state
        module.__class__ = _segment_class(type(module))  # type: ignore[arg-type]
    return module


def _remember(module: nn.Module, region: Region) -> None:
    module.__dict__[_REGION] = region
    # Made now, because a compiler that traces the forward cannot look up operators by name.
    options: dict[str, Any] = {"preserve_rng_state": region.preserve_rng_state}
    if region.save.ops and not region.save.offloads_everything:
        options["context_fn"] = compiled_contexts(region, module)
    module.__dict__[_COMPILED] = options
    is_filled = "_modules" in module.__dict__  # not yet, while a copy is being made
    module.__dict__[_UNCOMPILED] = _why_uncompiled(module, region) if is_filled else None


def _why_uncompiled(module: nn.Module, region: Region) -> str | None:
    """Why a module must not recompute in compiled code, if it must not."""
    remedy = "do not compile it, or leave it out of the plan"
    if any(not isinstance(owner, _BatchNorm) for _, owner, _, _ in buffers_of(module)):
        return (
            f"a recomputed {own_class(module).__name__} has buffers, and compiled code would not recompute with the "
            f"values that its forward found: {remedy}"
        )
    if region.save.offloads:
        return (
            f"a {own_class(module).__name__} offloads what it saves, which compiled code has no moment for: {remedy}, "
            "or choose a policy without offload"
        )
    return None


def recompute_module(module: nn.Module, region: Region, offloader: Offloader | None = None) -> nn.Module:
    """Makes a module recompute its forward in backward, in place.

    Args:
        region: what is kept; its ``modules`` are not looked at.
        offloader: the model's, where the region offloads.

    Returns:
        The same object, so that it can serve as ``checkpoint_wrapper_fn`` of ``apply_activation_checkpointing``.
    """
    assert _REGION not in module.__dict__, "checked by apply_plan"
    _remember(module, region)
    if offloader is not None:
        module.__dict__[_OFFLOADER] = offloader
    module.__class__ = _recomputed_class(type(module))  # type: ignore[arg-type]
    return module


def join_segment(module: nn.Module, segment: Segment, position: int, offloader: Offloader | None = None) -> None:
    """Makes a module recompute as one block of a segment, in place; after a region of its own, if it has one."""
    assert _SEGMENT not in module.__dict__, "checked by apply_plan"
    if offloader is not None:
        module.__dict__[_OFFLOADER] = offloader
    module.__dict__[_SEGMENT] = (segment, position)
    module.__class__ = _segment_class(type(module))  # type: ignore[arg-type]


def restore_module(module: nn.Module) -> None:
    """Undoes :func:`recompute_module` and :func:`join_segment`.

    Raises:
        PlanError: the module was sharded since, by FSDP2, whose class stands before this one.
    """
    while is_recomputed(module):
        stand_in, *bases = type(module).__bases__
        if not issubclass(stand_in, Recomputed):
            raise PlanError(f"a {own_class(module).__name__} was sharded since: remove its plan before sharding")
        module.__class__ = bases[0]
    for name in _ADDED:
        module.__dict__.pop(name, None)


def why_uncompiled(module: nn.Module) -> str | None:
    """Why the modules in it that recompute must not do so in compiled code, if one of them must not."""
    return next((m.__dict__[_UNCOMPILED] for m in module.modules() if m.__dict__.get(_UNCOMPILED)), None)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a plan has made this very module recompute."""
    return isinstance(module, Recomputed)
