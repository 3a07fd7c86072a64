"""Private parts of torch that op-level recompute needs (tested with torch 2.13).

What an operator is, which module calls it, and saved-tensor hooks around a checkpoint that is running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import Function
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as _checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dist_ckpt.compat.torch import UnsupportedTorch, current_frame, running_frame

T = TypeVar("T")

UNCOUNTABLE_OPS: frozenset[Any] = frozenset(_checkpoint.SAC_IGNORED_OPS)
"""Operators that checkpointing itself runs, not equally often in forward and recompute."""

_CALL = nn.Module._call_impl.__code__
_APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]


def operator_names() -> list[str]:
    """Every operator that is registered, as ``aten::mm`` or ``aten::mm.out``."""
    return list(torch._C._dispatch_get_all_op_names())


def is_dispatched(op: OpOverload) -> bool:
    """Whether an operator is one of the dispatcher: TorchScript has others of its own, on plain numbers."""
    return torch._C._dispatch_has_kernel(op.name())


def is_decomposed(op: OpOverload) -> bool:
    """Whether an operator runs as others, which are all that a dispatch mode sees of it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def calling_module(known: Mapping[int, T]) -> T | None:
    """What ``known`` has, by ``id``, for the innermost module of it that this thread is calling.

    Read from Python's own stack: it is right whatever raised before, needs no hook on any module, and costs nothing
    when it isn't asked for. A module whose ``forward`` is called directly, past ``__call__``, counts as its caller.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found = known.get(id(frame.f_locals["self"]))
            if found is not None:
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def traced_module(known: Mapping[int, T]) -> T | None:
    """The same for the operator that a compiler is tracing: dynamo notes the modules of each, outermost first."""
    stack = fx_traceback.current_meta.get("nn_module_stack") or {}
    for key in reversed(stack):
        number = str(key).partition("@")[0]
        found = known.get(int(number)) if number.isdigit() else None
        if found is not None:
            return found
    return None


def running_function() -> str | None:
    """The innermost custom autograd Function in Python whose forward this thread runs, by its class's name."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return str(frame.f_locals["cls"].__name__)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def graph_is_retained() -> bool:
    """Whether the graph may be asked again for what it is asked for now.

    It may in a backward with ``retain_graph`` or ``create_graph``, and where somebody looks at saved tensors outside of
    any backward.
    """
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class around_frame:  # entered in each forward: as a generator it would cost twice as much
    """Sets aside the hooks of the checkpoint that is running, so that those around it pack what is saved.

    Entering it tells whose those are: ``checkpoint`` (another one's, in its forward or recompute), ``other``, or
    ``None`` if there are none.

    Raises:
        UnsupportedTorch: the hooks on top are not the frame's.
    """

    def __init__(self, frame: Any) -> None:
        if current_frame() is not frame:
            raise UnsupportedTorch(f"torch {torch.__version__}: another's hooks lie over those of the checkpoint")

    def __enter__(self) -> str | None:
        autograd = torch._C._autograd
        self._own = autograd._top_saved_tensors_default_hooks(True)
        autograd._pop_saved_tensors_default_hooks()
        if not autograd._top_saved_tensors_default_hooks(True):
            return None
        return "other" if running_frame() is None else "checkpoint"

    def __exit__(self, *exception: object) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(*self._own)


def packed(tensor: Tensor) -> Any:
    """A handle of a tensor as autograd would save it here: through the hooks that are active."""
    return _checkpoint._make_saved_tensor(tensor, is_output=False)


def checked_contexts(decide: Callable[..., Any], check: Callable[[], None]) -> Any:
    """torch's selective-checkpoint contexts for compiled code, with a check when the traced forward ends."""
    caching, cached = create_selective_checkpoint_contexts(decide)

    class Checked(type(caching)):  # type: ignore[misc]
        def __exit__(self, *exception: Any) -> None:
            super().__exit__(*exception)
            if exception[0] is None:
                check()

    caching.__class__ = Checked
    return caching, cached
