"""Saved bytes: what an autograd graph keeps for backward, read from the graph itself.

The usual way is a pair of saved-tensor hooks. Those switch off autograd's check for in-place edits, add an operation
to every saved tensor, and miss op-level caches. Walking the finished graph from its roots costs no operation, changes
nothing that autograd does, and sees what checkpoints keep, whoever made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.memory.packed import Packed
from dist_ckpt.memory.storages import Storages


@dataclass(frozen=True)
class SavedBytes:
    """What a graph keeps for backward, in bytes of distinct storages."""

    total: int
    inputs: int
    """Of the total: inputs of recomputed regions, where nothing else keeps them."""
    cached: int
    """Of the total: results in op-level caches, where nothing else keeps them."""
    offloaded: int = 0
    """Of the total, inputs and results among it: what waits in host memory. On the CPU, where that is the same memory,
    what was copied to wait; on an accelerator everything that lies on the host."""
    weight_copies: int = 0
    """Not of the total: low-precision copies of parameters that autocast made and backward keeps."""
    opaque: tuple[str, ...] = ()
    """Graph nodes that may keep more, out of Python's sight: in-place operations on views outside of recomputed
    regions (``CopySlices``), custom Functions in C++, and hooks that pack tensors into something else."""
    unseen: tuple[str, ...] = ()
    """Custom autograd Functions in regions with op rules in which no rule found anything to keep: what they compute
    outside of torch's dispatcher (a Triton kernel, numpy) no rule can see, so they are recomputed as they are."""
    is_released: bool = False
    """Whether a backward has gone through the graph already, after which it keeps nothing."""
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    """A tensor of each storage of the total, if asked for. They keep what they show alive."""

    @property
    def on_device(self) -> int:
        """The total without what is offloaded: what an accelerator holds, or would hold if this were one."""
        return self.total - self.offloaded


def saved_bytes(
    roots: Iterable[Tensor], resident: Iterable[Tensor], until: Iterable[Tensor] = (), tensors: bool = False
) -> SavedBytes:
    """Bytes kept for the backward of ``roots``, to be read after forward and before backward.

    Not counted: storages of ``resident`` (parameters, buffers, unsharded copies), autocast's low-precision copies of
    parameters, and the RNG states that checkpoints stash.

    Args:
        roots: the loss, or all outputs that backward starts from.
        resident: tensors that are alive anyway and accounted elsewhere.
        until: tensors at which to stop, so that only what lies between them and the roots is counted.
        tensors: hand out what was counted.
    """
    roots = list(roots)
    is_fake = any(isinstance(root, FakeTensor) for root in roots)
    walk = _Walk(Storages(resident), any(root.device.type != "cpu" for root in roots), is_fake)
    walk.visit([root.grad_fn for root in roots], {tensor.grad_fn for tensor in until})
    return SavedBytes(
        total=walk.kept.nbytes,
        inputs=walk.inputs,
        cached=walk.cached,
        offloaded=walk.offloaded,
        weight_copies=walk.weight_copies.nbytes,
        opaque=tuple(sorted(walk.opaque)),
        unseen=tuple(sorted(walk.unseen)),
        is_released=walk.is_released(),
        tensors=tuple(walk.tensors) if tensors else (),
    )


def kept_by_graphs(visible: Iterable[Tensor], resident: Iterable[Tensor]) -> SavedBytes:
    """What the graphs keep of which Python sees an end.

    A saved result has no Python object of its own, so that the collector knows nothing of it.

    Args:
        visible: tensors that Python sees.
        resident: tensors that are accounted elsewhere.
    """
    roots = [tensor for tensor in visible if tensor.grad_fn is not None]
    return saved_bytes(roots, resident, tensors=True) if roots else SavedBytes(0, 0, 0)


class _Walk:
    """One pass over a graph; frames of checkpoints are visited once however many of their tensors are met."""

    def __init__(self, resident: Storages, on_accelerator: bool, is_fake: bool) -> None:
        self.resident = resident
        self.on_accelerator = on_accelerator
        self.is_fake = is_fake
        self.kept = Storages()
        self.weight_copies = Storages()
        self.inputs = self.cached = self.offloaded = 0
        self.opaque: set[str] = set()
        self.unseen: set[str] = set()
        self._visited: set[Any] = set()
        self.tensors: list[Tensor] = []
        self._kinds: dict[type, torch_private.NodeKind] = {}
        self._frames: dict[int, Any] = {}

    def visit(self, nodes: list[Any], beyond: Set[Any] = frozenset()) -> None:
        pending = list({node for node in nodes if node is not None} - beyond)
        seen = {*pending, *beyond}
        self._visited = seen
        frames: list[Any] = []
        functions: list[tuple[str, int]] = []
        while pending:
            node = pending.pop()
            kind = self._kinds.get(type(node))
            if kind is None:
                kind = self._kinds[type(node)] = torch_private.NodeKind.of(type(node))
            for handle in torch_private.saved_tensors(node, kind):
                self._keep(handle, frames)
            if torch_private.is_opaque(node, kind) or (self.is_fake and torch_private.keeps_less_on_fakes(node)):
                self.opaque.add(node.name().removeprefix("torch::autograd::"))
            if function := torch_private.custom_function(node, kind):
                functions.append((function, torch_private.node_number(node)))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        # Frames last: what the graph keeps itself is not the frames' doing. The list grows: frames nest.
        for frame in frames:
            for item in torch_private.frame_inputs(frame):
                self.inputs += self._keep(item, frames)
        for frame in frames:
            self.cached += sum(self._keep(item, frames) for item in torch_private.frame_cache(frame))
            self.unseen |= {name for name, made in functions if torch_private.is_unseen(frame, name, made)}

    def is_released(self) -> bool:
        """Whether a backward has gone through what was visited; asked only where nothing is kept, as it takes time."""
        kinds = self._kinds
        nodes = (node for node in self._visited if type(node) in kinds)
        return not self.kept.nbytes and any(torch_private.is_released(node, kinds[type(node)]) for node in nodes)

    def _add(self, item: Any) -> int:
        """Counts a tensor, or what stands for one; anything else is nothing."""
        tensor = item.held if isinstance(item, Packed) else item
        if not isinstance(tensor, Tensor):
            return 0
        if item.is_weight_copy if isinstance(item, Packed) else is_weight_copy(tensor):
            self.weight_copies.add(tensor, unless_in=self.resident)
            return 0
        added = self.kept.add(tensor, unless_in=self.resident)
        if added:
            self.tensors.append(tensor)
        if (isinstance(item, Packed) and item.in_host_memory) or (self.on_accelerator and tensor.device.type == "cpu"):
            self.offloaded += added
        return added

    def _keep(self, item: Any, frames: list[Any]) -> int:
        """Counts one saved tensor or handle; a handle of a checkpoint leads to its frame instead."""
        if not isinstance(item, torch_private.SavedTensor):
            return self._add(item)
        if item.unpack_hook is None or isinstance(item.data, Packed):
            return self._add(item.data)
        frame = torch_private.frame_of(item)
        if frame is not None:
            if id(frame) not in self._frames:
                self._frames[id(frame)] = frame
                frames.append(frame)
            return 0
        # Somebody else's hooks (save_on_cpu, quantization): what they packed is what is kept.
        tensors = [leaf for leaf in tree_leaves(item.data) if isinstance(leaf, Tensor)]
        if not tensors:
            self.opaque.add(f"tensors packed by {getattr(item.unpack_hook, '__qualname__', 'unknown')} hooks")
        return sum(self._add(tensor) for tensor in tensors)


_AUTOCAST_DTYPES = frozenset({torch.bfloat16, torch.float16})
_CAST = "ToCopyBackward0"
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0", "ReshapeAliasBackward0"})


def is_weight_copy(tensor: Tensor) -> bool:
    """Whether a tensor is a cast copy of a parameter, as autocast makes, or a view of such a copy."""
    if tensor.dtype not in _AUTOCAST_DTYPES:
        return False
    node, cast = tensor.grad_fn, False
    while node is not None and (node.name() == _CAST or node.name() in _VIEWS):
        cast = cast or node.name() == _CAST
        node = node.next_functions[0][0]
    return cast and isinstance(getattr(node, "variable", None), nn.Parameter)
