"""Forwards that are recomputed: one, or several that follow each other and are recomputed as one.

A part of a span is one forward. It runs where its caller calls it, so a model's own loop stays in charge; what it
saves for backward is dropped. The recompute runs the parts in order. Where a part was given what an earlier part
returned, it gets that again; everything else that a part was given is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from dist_ckpt.compat.torch import Frame, version_witness, weak_storage
from dist_ckpt.guards.ambient import Ambient
from dist_ckpt.guards.arguments import Arguments
from dist_ckpt.plan import Region


@dataclass(frozen=True)
class Kept:
    """An argument that the frame keeps."""

    position: int
    is_detached: bool = False
    """It needs a gradient and was kept without its graph."""


@dataclass(frozen=True)
class Made:
    """An argument that an earlier part returned."""

    part: int
    leaf: int


@dataclass
class Part:
    """One forward, and how to run it again."""

    run: Callable[..., Any]
    spec: TreeSpec
    arguments: Sequence[Any]
    """Leaves of (args, kwargs): :class:`Kept`, :class:`Made`, or no tensor and then itself."""
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]]
    """What the recompute runs under, outermost first."""
    outputs: list[Handle] = field(default_factory=list)


class Handle:
    """Recognizes a tensor, without keeping it or its memory alive.

    A sharding hook may put an alias in a tensor's place, after which nobody holds the tensor itself (FSDP2 and ZeRO-3
    pass a block's inputs and outputs through autograd functions), so it is the same memory with the same contents that
    counts, not the same object.
    """

    def __init__(self, leaf: Any) -> None:
        is_tensor = isinstance(leaf, Tensor) and not leaf.is_inference()
        self._tensor = weakref.ref(leaf) if is_tensor else None
        self._version = leaf._version if is_tensor else 0
        self._look: tuple[Any, ...] | None = None
        if is_tensor and _is_plain(leaf):
            self._witness, self._storage, self._look = version_witness(leaf), weak_storage(leaf), _look(leaf)

    def matches(self, other: Tensor) -> bool:
        """Whether ``other`` is this tensor, unedited, and needs a gradient as it does."""
        if self._tensor is not None and self._tensor() is other:
            return other._version == self._version
        if self._look is None or self._witness._version != self._version:
            return False
        return _is_plain(other) and not other.is_inference() and _look(other) == self._look


def _is_plain(tensor: Tensor) -> bool:
    """What a subclass does with its storage is its own affair."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """What tensors have in common that are the same memory, seen alike."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
    )


class Replay:
    """A frame's recompute function. It knows the parts, not the frame: see :class:`~dist_ckpt.compat.torch.Frame`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.kept: list[tuple[Handle, Kept]] = []

    def __call__(self, *inputs: Tensor) -> None:
        made: list[list[Any]] = []
        for part in self.parts:
            args, kwargs = tree_unflatten([_resolve(a, inputs, made) for a in part.arguments], part.spec)
            made.append(tree_leaves(_under(part.contexts, part.run, args, kwargs)))

    def find(self, leaf: Tensor) -> Made | Kept | None:
        """Where a tensor comes from, as far as this span knows."""
        for number, part in enumerate(self.parts):
            for position, handle in enumerate(part.outputs):
                if handle.matches(leaf):
                    return Made(number, position)
        return next((kept for handle, kept in self.kept if handle.matches(leaf)), None)


def _resolve(argument: Any, inputs: Sequence[Tensor], made: Sequence[Sequence[Any]]) -> Any:
    if isinstance(argument, Made):
        return made[argument.part][argument.leaf]
    if isinstance(argument, Kept):
        tensor = inputs[argument.position]
        return tensor.detach().requires_grad_() if argument.is_detached else tensor
    return argument


def _under(
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]], run: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    if not contexts:
        return run(*args, **kwargs)
    with contexts[0]():
        return _under(contexts[1:], run, args, kwargs)


def new_frame(region: Region) -> Frame:
    """A frame without parts."""
    return Frame(" + ".join(region.modules), Replay(), region.early_stop, region.determinism_check == "default")


@dataclass(frozen=True)
class Forward:
    """A forward, and what it needs to run now and again."""

    run: Callable[..., Any]
    again: Callable[..., Any]
    """The same for the recompute, where sharded parameters may have to be gathered."""
    during: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """What it runs under now."""
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = ()
    """What its recompute runs under, outermost first."""


def run_part(
    frame: Frame,
    region: Region,
    forward: Forward,
    keeping: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a forward as the next part of a span and returns what it returns.

    Args:
        keeping: what its inputs are kept under.
    """
    replay: Replay = frame.recompute_fn
    leaves, spec = tree_flatten((args, dict(kwargs)), is_leaf=_is_leaf)
    ambient = Ambient((leaf for leaf in leaves if isinstance(leaf, Tensor)), region.preserve_rng_state)
    with keeping:
        arguments = [_keep(frame, replay, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    part = Part(forward.again, spec, arguments, (ambient.again, *forward.contexts))
    replay.parts.append(part)
    given = Arguments(args, kwargs)
    with frame.part(), forward.during:
        out = forward.run(*args, **kwargs)
    given.refuse_changes(forward.run)
    ambient.refuse_draws(" + ".join(region.modules))
    part.outputs = [Handle(leaf) for leaf in tree_leaves(out)]
    return out


def _keep(frame: Frame, replay: Replay, leaf: Tensor) -> Made | Kept:
    found = replay.find(leaf)
    if found is None:
        # A later part's argument may be computed from what an earlier part returned. Kept with its graph it would
        # hold that part's nodes, which hold this frame: a cycle that only backward would break.
        is_detached = bool(replay.parts) and leaf.grad_fn is not None
        found = Kept(frame.keep(leaf.detach() if is_detached else leaf), is_detached)
        replay.kept.append((Handle(leaf), found))
    return found


def _is_leaf(node: Any) -> bool:
    """Only plain containers are taken apart: a cache or a dataclass must stay the object that it is."""
    return not isinstance(node, tuple) and type(node) not in (list, dict)
