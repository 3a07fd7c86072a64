"""Private parts of ``torch.autograd`` and ``torch.utils.checkpoint`` (tested with torch 2.13).

Two things are needed that torch has but does not publish: what an autograd graph keeps, read without hooks, and the
frame of a non-reentrant checkpoint with its op-level cache. Both are reached through attributes whose absence raises
:class:`UnsupportedTorch` instead of giving a wrong number.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


class UnsupportedTorch(RuntimeError):
    """This torch version lacks a private attribute that the package reads."""


SavedTensor: Any = torch._C._autograd.SavedTensor
"""A handle of something that autograd saves; its ``unpack()`` gives the tensor back."""


def bare_alias(tensor: Tensor) -> Tensor:
    """The same memory without a graph. In-place edits of either count in the version of both, beneath autograd too."""
    return _checkpoint._detach_helper(tensor)


def version_witness(tensor: Tensor) -> Tensor:
    """An empty tensor that counts the in-place edits of another one's memory, and keeps none of it."""
    witness = bare_alias(tensor)
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # which leaves the version counter
    return witness


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A reference that keeps no memory alive; while it lives, no other storage gets this one's address."""
    return StorageWeakRef(tensor.untyped_storage())


def referenced_storage(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """What such a reference refers to; ``None`` if it is gone."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return found


def storage_id(tensor: Tensor) -> int:
    """A number that only the tensor's storage has, as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def running_backward() -> int | None:
    """A number that only the backward that is running on this thread has, if one is."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Has the running backward call back when all its gradients are there; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is. ``to_local()`` would be an operation, a view."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class NodeKind:
    """What is to be read from autograd nodes of one type."""

    handles: tuple[str, ...]
    """Attributes that hold ``SavedTensor`` handles."""
    is_ctx: bool
    """The node of a custom Function in Python is its ctx, and some keep tensors as plain attributes of it."""
    is_opaque: bool | None
    """Whether such nodes may keep tensors that Python cannot see: custom Functions written in C++, and ``CopySlices``,
    which stands for an in-place operation on a view and hides that operation's own node. ``None`` where it depends on
    the node: unregistered C++ nodes share one type."""

    @staticmethod
    def of(kind: type) -> NodeKind:
        return NodeKind(
            handles=tuple(name for name in dir(kind) if name.startswith("_raw_saved_")),
            is_ctx=issubclass(kind, torch._C._FunctionBase),
            is_opaque=None if kind.__name__ == "CppFunction" else kind.__name__ == "CopySlices",
        )


def saved_tensors(node: Any, kind: NodeKind) -> Iterator[Any]:
    """What one autograd node keeps, without unpacking it: ``SavedTensor`` handles, and plain tensors."""
    for name in kind.handles:
        try:
            handle = getattr(node, name)
        except RuntimeError:  # a custom Function's, through which a backward has gone; others have empty handles then
            continue
        if isinstance(handle, tuple):  # TensorList arguments, and save_for_backward of a custom Function
            yield from (one for one in handle if one is not None)
        elif handle is not None:
            yield handle
    if kind.is_ctx:
        yield from (leaf for leaf in tree_leaves(node.__dict__) if isinstance(leaf, Tensor))


def is_released(node: Any, kind: NodeKind) -> bool:
    """Whether a backward has gone through a node and let go of what it kept; of one that kept nothing, nobody knows."""
    for name in kind.handles:
        try:
            handle = getattr(node, name)
            # What waits in hooks must not be unpacked, and has not been released: that ends the hooks too.
            if isinstance(handle, SavedTensor) and handle.data is None and handle.unpack_hook is None:
                getattr(node, name.replace("_raw_saved_", "_saved_"))
        except RuntimeError:  # what was never there is None instead
            return True
    return False


def is_opaque(node: Any, kind: NodeKind) -> bool:
    """Whether a node may keep tensors that Python cannot see."""
    return "CppNode" in node.name() if kind.is_opaque is None else kind.is_opaque


_SHARDING = ("torch.distributed.fsdp", "deepspeed.runtime.zero.parameter_offload")
"""Where the Functions are defined that sharding puts around modules."""


def custom_function(node: Any, kind: NodeKind) -> str | None:
    """The name of the custom Function that a node belongs to; ``None`` for torch's own nodes and those of sharding."""
    if kind.is_ctx:
        function = type(node)._forward_cls
        return None if function.__module__.startswith(_SHARDING) else str(function.__name__)
    return str(node.name()) if kind.is_opaque is None and is_opaque(node, kind) else None


def sequence_number() -> int:
    """The number that this thread's next autograd node gets."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number(node: Any) -> int:
    """The number of an autograd node; on one thread, nodes that are made later have larger ones."""
    return int(node._sequence_nr())


def keeps_less_on_fakes(node: Any) -> bool:
    """Whether a node's operator keeps less on fake tensors than on real ones: oneDNN's LSTM has an empty workspace
    there (torch/_meta_registrations.py, ``mkldnn_rnn_layer``)."""
    return bool(node.name() == "MkldnnRnnLayerBackward0")


def frame_of(handle: Any) -> Any | None:
    """The frame of the non-reentrant checkpoint that packed this saved tensor; ``None`` for other hooks."""
    return _frame_in(handle.unpack_hook)


def current_frame() -> Any:
    """The frame of the innermost non-reentrant checkpoint whose forward is running."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    frame = _frame_in(hooks[1]) if hooks else None
    if frame is None:
        raise UnsupportedTorch(f"torch {torch.__version__}: no checkpoint frame on the saved-tensor hook stack")
    return frame


def in_bare_backward() -> bool:
    """Whether a backward is running, outside the recompute of any non-reentrant checkpoint."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def running_frame() -> tuple[Any, Any] | None:
    """The innermost non-reentrant checkpoint that runs its forward or its recompute, and the backward of the latter.

    That is an id which tells the recomputes of two backwards apart, and ``None`` in a forward. The whole is ``None``
    outside of checkpoints, and under other saved-tensor hooks.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks:
        return None
    frame = _frame_in(hooks[1])
    if frame is not None:
        return frame, None
    pack = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])  # torch 2.13 hides it from the compiler
    if not getattr(pack, "__qualname__", "").startswith("_recomputation_hook.__init__"):
        return None
    frame = _captured(pack, "target_frame_ref")()
    return None if frame is None else (frame, _captured(pack, "gid"))


def recomputing_frame() -> tuple[Any, Any] | None:
    """The frame whose recompute is running, and its backward; also below the forward of a frame inside of it.

    The hooks of that inner frame hide those of the outer one, which is found on Python's stack instead: torch starts a
    recompute in a hook that knows both.
    """
    caller = sys._getframe(1)
    while caller is not None:
        code = caller.f_code
        if code.co_name == "unpack_hook" and code.co_filename == _checkpoint.__file__ and "gid" in caller.f_locals:
            return caller.f_locals["frame"], caller.f_locals["gid"]
        caller = caller.f_back  # type: ignore[assignment]
    return None


def runs_forward(frame: Any) -> bool:
    """Whether a frame's forward has not ended yet."""
    return not frame.forward_completed


def failed_frame(error: BaseException) -> Any | None:
    """The frame whose recompute did not fit its forward, of a ``CheckpointError``; ``None`` for other errors."""
    trace = error.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("self"), _checkpoint._CheckpointFrame):
            return names["self"]
        if isinstance(names.get("target_frame"), _checkpoint._CheckpointFrame):
            return names["target_frame"]
        trace = trace.tb_next
    return None


@contextmanager
def compared_by(compare: Callable[[Callable[[Tensor], Any], Tensor], Any]) -> Iterator[None]:
    """While active, checkpoints compare what ``compare(usual, tensor)`` returns for each tensor they save.

    ``usual`` is the function that the checkpoint would have called: it extracts shape, dtype and device, or nothing.
    torch looks these up by the name of a ``determinism_check`` when a frame is made (torch/utils/checkpoint.py), and
    has no way to hand over a function.
    """
    table = _checkpoint._allowed_determinism_checks_to_fns
    usual = dict(table)
    table.update({name: functools.partial(compare, function) for name, function in usual.items()})
    try:
        yield
    finally:
        table.update(usual)


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees an operation, so that looking at a tensor counts for none of them."""
    return _disable_current_modes()


def _frame_in(hook: Any) -> Any | None:
    """Frames live in the closures of the hooks that ``_checkpoint_hook`` makes (torch/utils/checkpoint.py)."""
    if not getattr(hook, "__qualname__", "").startswith("_checkpoint_hook.__init__"):
        return None
    if "unpack_hook" in hook.__code__.co_freevars:  # with an error callback it wraps the one that holds the frame
        hook = _captured(hook, "unpack_hook")
    return _captured(hook, "frame")


def _captured(function: Any, name: str) -> Any:
    """The value that a function's closure has for a variable, ``None`` where it was never assigned.

    Raises:
        UnsupportedTorch: the closure has no such variable, so this torch is built otherwise.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name not in cells:
        raise UnsupportedTorch(f"torch {torch.__version__}: {function.__qualname__} holds no {name!r}")
    try:
        return cells[name].cell_contents
    except ValueError:
        return None


class Frame(_checkpoint._CheckpointFrame):
    """The frame of a non-reentrant checkpoint whose forward may run in several parts.

    torch opens and closes a frame in one call. Here its hooks can be entered again, so that blocks of one segment run
    where their model calls them.

    Args:
        name: of what is recomputed, for messages.
        recompute: called with the kept inputs, in the order of :meth:`keep`. It must not refer to the frame, which
            would keep the inputs alive until Python's cycle collector runs.
        check: compare shape, dtype and device of what is recomputed.
    """

    def __init__(self, name: str, recompute: Callable[..., None], early_stop: bool, check: bool) -> None:
        if not hasattr(_checkpoint._CheckpointFrame, "save_inputs"):
            raise UnsupportedTorch(f"torch {torch.__version__}: checkpoint frames keep their inputs elsewhere")
        forced = _checkpoint._enable_checkpoint_early_stop  # set_checkpoint_early_stop(), a context of torch's
        metadata = _checkpoint._allowed_determinism_checks_to_fns["default" if check else "none"]
        super().__init__(recompute, early_stop if forced is None else forced, None, metadata)
        self.name = name
        self.caches: list[Mapping[Any, Any]] = []
        """Op-level caches of the parts."""
        self._watched: list[tuple[Tensor, int]] = []

    def keep(self, tensor: Tensor) -> int:
        """Keeps an input as autograd would, checked for in-place edits, and returns its position."""
        self.saved_args.append(_checkpoint._make_saved_tensor(tensor, is_output=False))
        # Autograd checks nothing that hooks have packed. Those of a checkpoint around this one keep the very tensor
        # while they recompute, so an edit after this forward would be one of its input.
        if running_frame() is not None and type(tensor) in (Tensor, torch.nn.Parameter):
            self._watched.append((version_witness(tensor), tensor._version))
        return len(self.saved_args) - 1

    def get_inputs(self) -> list[Any]:
        """The inputs again.

        Raises:
            RuntimeError: one was edited in place since.
        """
        if any(witness._version != version for witness, version in self._watched):
            raise RuntimeError(
                f"an argument of {self.name} has been modified by an inplace operation before its recompute, inside a "
                "region around it"
            )
        try:
            inputs: list[Any] = super().get_inputs()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):  # autograd has no type for it
                raise
            raise RuntimeError(f"an argument of {self.name} was edited before its recompute: {error}") from error
        return inputs

    def check_recomputed_tensors_match(self, gid: Any) -> None:
        try:
            super().check_recomputed_tensors_match(gid)
        except _checkpoint.CheckpointError as error:
            raise _checkpoint.CheckpointError(
                f"the recompute of {self.name} does otherwise than its forward; verify(model, batch, loss_fn, plan) "
                f"says where and why. {error}"
            ) from error

    @contextmanager
    def part(self) -> Iterator[None]:
        """Runs one part of the forward: what it saves for backward is dropped, to be recomputed."""
        self.forward_completed = False
        with _checkpoint._checkpoint_hook(self):
            yield
        self.forward_completed = True

    @property
    def was_recomputed(self) -> bool:
        return any(self.is_recomputed.values())


def frame_packed_count(frame: Any) -> int:
    """How many tensors the frame's forward has saved for backward so far."""
    return len(frame.weak_holders)


def frame_saved_count(frame: Any, backward: Any) -> int:
    """How many tensors a frame's forward, or its recompute in a ``backward``, has saved so far."""
    return frame_packed_count(frame) if backward is None else int(frame.recomp_counter[backward])


def frame_stops_early(frame: Any) -> bool:
    """Whether the recompute ends at the last tensor that backward needs."""
    return bool(frame.early_stop)


def frame_inputs(frame: Any) -> Iterator[Any]:
    """What a frame keeps to run again: ``SavedTensor`` handles of positional tensors, tensors of keyword ones."""
    if not hasattr(frame, "saved_args"):
        raise UnsupportedTorch(f"torch {torch.__version__}: checkpoint frames keep their inputs elsewhere")
    for leaf in tree_leaves(frame.saved_args):
        if isinstance(leaf, (Tensor, SavedTensor)):
            yield leaf
    if isinstance(frame, Frame):
        return
    kwargs = _captured(frame.recompute_fn, "kwargs") or {}
    yield from (leaf for leaf in tree_leaves(kwargs) if isinstance(leaf, Tensor))


def frame_recomputed(frame: Any) -> Iterator[Tensor]:
    """What a frame's recompute has made so far and backward has not used yet."""
    for tensors in frame.recomputed.values():
        yield from (tensor for tensor in tensors.values() if isinstance(tensor, Tensor))


def is_unseen(frame: Any, function: str, made: int) -> bool:
    """Whether a custom Function ran in the forward of a frame's op-level region without anything of it being kept.

    Args:
        made: the sequence number of the node that it made.
    """
    caches = frame.caches if isinstance(frame, Frame) else ()
    return any(cache.is_blind_to(function, made) for cache in caches if hasattr(cache, "is_blind_to"))


def frame_cache(frame: Any) -> Iterator[Any]:
    """What a frame's op-level cache holds, if it has one: torch's own, or one of :mod:`dist_ckpt.wrap.oplevel`.

    Tensors, and whatever else stands for one.
    """
    if isinstance(frame, Frame):
        caches = frame.caches
    else:
        caches = [getattr(_captured(frame.recompute_fn, "recompute_context"), "storage", None) or {}]
    for cache in caches:
        for entries in cache.values():
            for entry in entries.values() if isinstance(entries, dict) else entries:
                yield from (getattr(leaf, "val", leaf) for leaf in tree_leaves(entry))
