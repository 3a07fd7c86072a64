"""Which module an autograd node belongs to, told from a graph alone: by the parameters around it.

Nothing has to be noted while the model runs, so it can be asked when something has gone wrong. Nodes that use a
parameter are known to be of its module; what lies between two of them is put down to what both are part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.compat import fsdp
from dist_ckpt.compat import torch as torch_private
from dist_ckpt.compat.torch import node_number
from dist_ckpt.memory.packed import Packed
from dist_ckpt.names import is_replicated, named_parameters, unwrapped_name

_VIEWS = (
    "T",
    "Transpose",
    "View",
    "Permute",
    "ReshapeAlias",
    "AsStrided",
    "Split",
    "SplitWithSizes",
    "Slice",
    "ToCopy",
)
"""Nodes between a parameter and its use, without their ending ``Backward0``."""


class GraphNames:
    """Names for the nodes of the graphs that lead to some tensors.

    Args:
        roots: losses, outputs, or whatever else has a graph.
        modules: of parameters, as autograd knows them, by ``id``; see :func:`modules_of_parameters`.
        containers: names of modules that have no forward of their own, such as lists.
    """

    def __init__(self, roots: Iterable[Tensor], modules: Mapping[int, str], containers: Set[str] = frozenset()) -> None:
        self._containers = containers
        self._nodes = _nodes(roots)
        self._users: dict[Any, list[Any]] = {}
        for node in self._nodes:
            for child in _children(node):
                self._users.setdefault(child, []).append(node)
        self._of: dict[Any, str | None] = {}
        self._frames: dict[int, str | None] = {}
        self._keepers: dict[int, tuple[Any, str]] = {}
        self._name(modules)
        self._note_keepers()

    def module(self, node: Any) -> str | None:
        """The module that made a node; ``""`` for the model itself, ``None`` where no parameter is near."""
        return self._of.get(node)

    def keeper(self, tensor: Tensor) -> tuple[str | None, str] | None:
        """The module and the node that keep a tensor's storage for backward; ``None`` if it was met in no graph."""
        found = self._keepers.get(torch_private.storage_id(tensor))
        if found is None:
            return None
        keeper, source = found
        return (self._frames.get(id(keeper)) if keeper not in self._of else self._of[keeper]), source

    def frames(self) -> list[tuple[Any, str | None]]:
        """The frames of checkpoints in the graphs, each with its module."""
        return [(frame, self._frames[id(frame)]) for frame in self._all_frames]

    def front(self, roots: Iterable[Tensor]) -> str | None:
        """The module at which a backward stands that has not come to its end.

        Nodes let go of what they have saved as soon as they are done, the ones made last come first.

        Args:
            roots: from which it started.
        """
        waiting = [node for node in _nodes(roots) if node in self._of and _holds_anything(node)]
        return self._of[max(waiting, key=node_number)] if waiting else None

    def _name(self, modules: Mapping[int, str]) -> None:
        used: dict[Any, list[str]] = {}
        """Node → modules of the parameters that it is given."""
        through: dict[Any, list[str]] = {}
        comes_from: dict[Any, str | None] = {}
        upwards = sorted(self._nodes, key=lambda node: -1 if hasattr(node, "variable") else node_number(node))
        for node in upwards:
            variable = getattr(node, "variable", None)
            if variable is not None:
                through[node] = [modules[id(variable)]] if id(variable) in modules else []
                continue
            children = _children(node)
            used[node] = [module for child in children for module in through.get(child, ())]
            is_view = node.name().removesuffix("Backward0").rpartition("::")[2] in _VIEWS
            is_parameter = is_view and children and all(through.get(child) for child in children)
            through[node] = used[node] if is_parameter else []
            before = [child for child in children if child in used and not through[child]]
            last = max(before, key=node_number, default=None)
            comes_from[node] = None if last is None else common_module(used[last]) if used[last] else comes_from[last]
        flows_to: dict[Any, str | None] = {}
        for node in reversed(upwards):
            users = [user for user in self._users.get(node, ()) if user in used]
            first = min(users, key=node_number, default=None)
            flows_to[node] = None if first is None else common_module(used[first]) if used[first] else flows_to[first]
            if node in used:
                self._of[node] = (
                    common_module(used[node]) if used[node] else self._between(comes_from[node], flows_to[node])
                )

    def _between(self, before: str | None, after: str | None) -> str | None:
        if before is None or after is None:
            return after if before is None else ""
        common = common_module([before, after])
        return after if common == "" or common in self._containers else common

    def _note_keepers(self) -> None:
        kinds: dict[type, torch_private.NodeKind] = {}
        frames: dict[int, Any] = {}
        packers: dict[int, list[str]] = {}
        for node in self._nodes:
            kind = kinds.setdefault(type(node), torch_private.NodeKind.of(type(node)))
            source = f"saved by {node.name().removeprefix('torch::autograd::')}"
            for handle in torch_private.saved_tensors(node, kind):
                frame = _frame_of(handle)
                if frame is None:
                    self._keep(handle, node, source)
                    continue
                frames[id(frame)] = frame
                if (module := self._of.get(node)) is not None:
                    packers.setdefault(id(frame), []).append(module)
        self._all_frames = list(frames.values())
        for key, frame in frames.items():
            modules = getattr(frame, "name", "").split(" + ") if getattr(frame, "name", "") else packers.get(key, [])
            self._frames[key] = common_module(modules) if modules else None
            for item in torch_private.frame_inputs(frame):
                self._keep(item, frame, "input of a recomputed region")
            for item in torch_private.frame_cache(frame):
                self._keep(item, frame, "kept by an op rule")

    def _keep(self, item: Any, keeper: Any, source: str) -> None:
        data = item.data if isinstance(item, torch_private.SavedTensor) else item
        tensor = data.held if isinstance(data, Packed) else data
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            self._keepers.setdefault(torch_private.storage_id(tensor), (keeper, source))


def modules_of_parameters(model: nn.Module) -> dict[int, str]:
    """The module of each parameter as autograd knows it: unsharded copies and flat ones among them, by ``id``."""
    found = {id(parameter): name.rpartition(".")[0] for name, parameter in named_parameters(model)}
    root: nn.Module = model.module if is_replicated(model) else model  # type: ignore[assignment]
    for prefix, module in root.named_modules():
        flat = fsdp.fsdp1_flat_parameter(module)
        if flat is not None:
            found[id(flat)] = unwrapped_name(prefix)
        for name, copy in fsdp.fsdp2_copies(module):
            found[id(copy)] = unwrapped_name(name).rpartition(".")[0]
    return found


def _nodes(roots: Iterable[Tensor]) -> list[Any]:
    pending = list({root.grad_fn for root in roots if root.grad_fn is not None})
    found = dict.fromkeys(pending)
    while pending:
        for child in _children(pending.pop()):
            if child not in found:
                found[child] = None
                pending.append(child)
    return list(found)


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _holds_anything(node: Any) -> bool:
    handles = list(torch_private.saved_tensors(node, torch_private.NodeKind.of(type(node))))
    return any(getattr(handle, "data", None) is not None for handle in handles)


def _frame_of(handle: Any) -> Any | None:
    packed = isinstance(handle, torch_private.SavedTensor) and handle.unpack_hook is not None
    return torch_private.frame_of(handle) if packed and not isinstance(handle.data, Packed) else None


def common_module(modules: Iterable[str]) -> str:
    """The innermost module that all of some modules are, or are part of.

    >>> common_module(["layers.0.attention.wq", "layers.0.attention.wo"])
    'layers.0.attention'
    """
    first, *others = [module.split(".") for module in modules]
    for other in others:
        same = [a == b for a, b in zip(first, other, strict=False)]
        first = first[: same.index(False) if False in same else len(same)]
    return ".".join(first)
