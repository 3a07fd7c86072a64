"""What filled memory when an allocation failed, read from what is still there.

The error's traceback keeps the locals of every call that it has passed, and these keep the graphs, so little is gone
when it arrives: the operation's own temporaries, and gradients on their way through backward. Nothing has been noted
beforehand, so that a step costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat import stack
from dist_ckpt.compat import torch as torch_private
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.holders import holders_of, visible_tensors
from dist_ckpt.memory.ledger import Owner, in_precedence
from dist_ckpt.memory.out_of_memory.failure import (
    FailureSite,
    frames_of,
    is_library,
    out_of_memory_in,
    place_of,
    requested_bytes,
    step_begins,
    where,
)
from dist_ckpt.memory.out_of_memory.graph_names import GraphNames, common_module, modules_of_parameters
from dist_ckpt.memory.out_of_memory.limits import MemoryLimit, held_bytes
from dist_ckpt.memory.profile.step_profile import KINDS, ByKind, Holding, Kind, merge_holdings
from dist_ckpt.memory.storages import Storages, plain_parts
from dist_ckpt.names import module_names, named_buffers, named_parameters

_LISTED = 60
"""Holdings, and modules, that are listed one by one."""
_NAMED = 50
"""Tensors without an owner for which is looked who refers to them."""


@dataclass(frozen=True)
class PostMortem:
    """One rank that has run out of memory. Bytes throughout; ``None`` where nobody can say."""

    rank: int
    stage: int | None
    device: str
    step: int
    message: str
    """Of the failed allocation."""
    requested_bytes: int | None
    place: FailureSite
    limit_bytes: int | None
    """The run's limit on what the process may hold; ``None`` without one."""
    start_bytes: int | None
    """What the process held before there was a model."""
    held_bytes: int | None
    """What it held when the error arrived."""
    by_kind: ByKind
    """Bytes of tensors that are still there; every kind is there."""
    by_module: Mapping[str, ByKind]
    """The same for each module, heaviest first, ``""`` being the model itself; kinds without bytes are left out."""
    holdings: tuple[Holding, ...]
    """What is still there, heaviest first."""
    rest_bytes: int
    """Of holdings too small to be listed."""
    notes: tuple[str, ...]
    """What could not be found out, and why."""

    @property
    def tensor_bytes(self) -> int:
        return sum(self.by_kind.values())

    @property
    def unexplained_bytes(self) -> int | None:
        """Held, but neither before the model nor by tensors: the allocator's gaps, Python's objects, libraries."""
        if self.held_bytes is None or self.start_bytes is None:
            return None
        return self.held_bytes - self.start_bytes - self.tensor_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON data, the derived figures included; where it failed stands beside the rest."""
        data = dataclasses.asdict(self)
        derived = {"tensor_bytes": self.tensor_bytes, "unexplained_bytes": self.unexplained_bytes}
        return data | data.pop("place") | derived


def post_mortem(
    error: BaseException,
    model: nn.Module | None = None,
    owners: Callable[[], Iterable[Owner]] | None = None,
    *,
    rank: int = 0,
    stage: int | None = None,
    step: int = 0,
    limit: MemoryLimit | None = None,
) -> PostMortem:
    """Examines this process after a failed allocation, in the ``except`` clause that has caught it.

    It never raises: what cannot be found out is noted.

    Args:
        model: as it is trained; ``None`` if there was none yet.
        owners: of all lasting memory, such as ``lambda: owners_of(model, optimizer)``.
        step: the update that was running, from 1.
        limit: that was in force, and has been lifted.
    """
    cause = out_of_memory_in(error) or error
    device = limit.device if limit is not None else torch.device("cpu")
    held = limit.held_bytes if limit is not None and limit.held_bytes is not None else held_bytes(device)
    examination = _Examination(error, model, device)
    place = examination.place()
    with examination.trying("who owns parameters, gradients and optimizer states"):
        examination.see_owners(owners() if owners is not None else ())
    with examination.trying("what autograd keeps for backward"):
        examination.see_graphs()
    with examination.trying("what else Python refers to"):
        examination.see_the_rest()
    holdings = examination.holdings()
    listed = holdings[:_LISTED]
    return PostMortem(
        rank=rank,
        stage=stage,
        device=str(device),
        step=step,
        message=str(cause).strip().partition("\n")[0] or type(cause).__name__,
        requested_bytes=requested_bytes(cause),
        place=place,
        limit_bytes=limit.nbytes if limit is not None else None,
        start_bytes=limit.start_bytes if limit is not None else None,
        held_bytes=held,
        by_kind={kind: sum(h.nbytes for h in holdings if h.kind == kind) for kind in KINDS},
        by_module=_by_module(holdings),
        holdings=listed,
        rest_bytes=sum(h.nbytes for h in holdings[_LISTED:]),
        notes=tuple(examination.notes),
    )


class _Examination:
    """One look at a process; each storage counts where it is met first."""

    def __init__(self, error: BaseException, model: nn.Module | None, device: torch.device) -> None:
        self.notes: list[str] = []
        self._error = error
        self._model = model
        self._device = device
        self._seen = Storages()
        self._found: list[Holding] = []
        self._later: list[Owner] = []
        self._names: dict[nn.Module, str] = {}
        self._of_parameters: dict[int, str] = {}
        self._modules: set[str] = set()
        self._tensors_of_modules: set[str] = set()
        if model is not None:
            with self.trying("the names of modules"):
                self._names = module_names(model)
                self._of_parameters = modules_of_parameters(model)
                self._modules = set(self._names.values())
                self._tensors_of_modules = {name for name, _ in (*named_parameters(model), *named_buffers(model))}

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """A part of the examination that may fail: the model may be half built, or half gathered."""
        try:
            yield
        except Exception as problem:
            self.notes.append(f"{what} could not be found out: {type(problem).__name__}: {problem}")

    def place(self) -> FailureSite:
        """Where the allocation failed; in backward, which has no stack, as far as the graph tells it."""
        place = FailureSite("other", None, None, None)
        with self.trying("where the allocation failed"):
            place = place_of(self._error, self._names)
            if place.phase == "backward" and place.module is None:
                roots, _ = self._backward()
                return dataclasses.replace(place, module=self._graph_names(roots).front(roots))
        return place

    def see_owners(self, owners: Iterable[Owner]) -> None:
        found = in_precedence(owner for owner in owners if owner[2].device == self._device)
        first = [owner for owner in found if owner[0] != "communication"]
        self._later = found[len(first) :]  # activations come before it
        together = _names_by_storage((name, tensor) for _, name, tensor in first)
        for kind, _, tensor in first:
            names = together[_storage(tensor)]
            others = f" and {len(names) - 1} more in one buffer" if len(names) > 1 else ""
            modules = [module for name in names if (module := self._owner_of(name)) is not None]
            self._add(kind, common_module(modules) if modules else None, f"{names[0]}{others}", tensor)

    def see_graphs(self) -> None:
        roots = [tensor for tensor in visible_tensors(self._device) if _has_graph(tensor)]
        started, again = (list(map(id, one)) for one in self._backward())
        self._see_graph([tensor for tensor in roots if id(tensor) in started], "activations")
        self._see_graph([tensor for tensor in roots if id(tensor) in again], "recompute")
        self._see_graph(roots, "activations")

    def _see_graph(self, roots: Sequence[Tensor], kind: Kind) -> None:
        if not roots:
            return
        names = self._graph_names(roots)
        for tensor in saved_bytes(roots, (), tensors=True).tensors:
            if tensor.device == self._device:
                module, source = names.keeper(tensor) or (None, "kept for backward")
                self._add(kind, module, source, tensor)
        for frame, module in names.frames():
            for tensor in torch_private.frame_recomputed(frame):
                self._add("recompute", module, "recomputed for backward", tensor)

    def _backward(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the running backward has started from, and the tensors of calls within it, which run again."""
        started: list[Tensor] = []
        again: list[Tensor] = []
        for frame, _ in frames_of(self._error):
            if stack.runs_backward(frame):
                started += _tensors(stack.backward_roots(frame))
            elif started:
                again += _tensors(list(frame.f_locals.values()))
        return started, again

    def see_the_rest(self) -> None:
        for kind, name, tensor in self._later:
            self._add(kind, None, name, tensor)
        for kind, frame, number in self._calls():
            for name, value in list(frame.f_locals.items()):
                for tensor in _tensors(value):
                    if tensor.device == self._device:
                        self._add(kind, self._module_of(frame), f"{name!r} in {where(frame, number)}", tensor)
        by_storage = {_storage(t): t for t in visible_tensors(self._device) if t not in self._seen}
        unknown = sorted(by_storage.values(), key=lambda tensor: -Storages([tensor]).nbytes)
        del by_storage  # or it would be found to refer to them
        largest, rest = unknown[:_NAMED], unknown[_NAMED:]
        del unknown
        for tensor, holder in zip(largest, holders_of(largest), strict=True):
            self._add("unattributed", None, holder, tensor)
        for tensor in rest:
            self._add("unattributed", None, "not looked into", tensor)

    def _calls(self) -> list[tuple[Kind, FrameType, int]]:
        """The calls that the error has passed, and what their variables are for: those of the step go with it.

        Innermost first, and the model's own code before that of libraries, which has worse names for the same things.
        """
        frames = frames_of(self._error)
        first = step_begins(frames)
        calls: list[tuple[Kind, FrameType, int]] = [
            ("temporary" if place >= first else "unattributed", *one) for place, one in enumerate(frames)
        ]
        calls.reverse()
        return sorted(calls, key=lambda call: is_library(call[1].f_code.co_filename))

    def holdings(self) -> tuple[Holding, ...]:
        """What was met, put together where it is alike, heaviest first."""
        return merge_holdings(self._found)

    def _add(self, kind: Kind, module: str | None, source: str, tensor: Tensor) -> None:
        if added := self._seen.add(tensor):
            whole = tensor._base if tensor._base is not None else tensor
            dtype = str(whole.dtype).removeprefix("torch.")
            self._found.append(Holding(kind, module, source, tuple(whole.shape), dtype, added, 1))

    def _owner_of(self, name: str) -> str | None:
        """The module that has a parameter or buffer, or is FSDP1's unit; none for what an optimizer calls its own."""
        parent = name.rpartition(".")[0]
        return parent if name in self._tensors_of_modules or (parent and parent in self._modules) else None

    def _graph_names(self, roots: Iterable[Tensor]) -> GraphNames:
        lists = (nn.ModuleList, nn.ModuleDict)
        containers = {name for module, name in self._names.items() if isinstance(module, lists)}
        return GraphNames(roots, self._of_parameters, containers)

    def _module_of(self, frame: FrameType) -> str | None:
        owner = frame.f_locals.get("self")
        return self._names.get(owner) if isinstance(owner, nn.Module) else None


def _names_by_storage(owned: Iterable[tuple[str, Tensor]]) -> dict[int, list[str]]:
    """The names of all that lies in a storage: gradients in a bucket of DDP's, tied weights."""
    found: dict[int, list[str]] = {}
    for name, tensor in owned:
        names = found.setdefault(_storage(tensor), [])
        if (name := name.lstrip(".")) not in names:  # with a point in front, it is of the model itself
            names.append(name)
    return found


def _storage(tensor: Tensor) -> int:
    return torch_private.storage_id(plain_parts(tensor)[0])


def _tensors(value: object) -> list[Tensor]:
    """Those in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _has_graph(tensor: Tensor) -> bool:
    with suppress(RuntimeError):  # a view that was edited in place may not be asked
        return tensor.grad_fn is not None
    return False


def _by_module(holdings: Iterable[Holding]) -> dict[str, ByKind]:
    found: dict[str, Counter[Kind]] = {}
    for holding in holdings:
        if holding.module is not None:
            found.setdefault(holding.module, Counter())[holding.kind] += holding.nbytes
    heaviest = sorted(found, key=lambda module: -found[module].total())
    return {module: dict(found[module]) for module in heaviest[:_LISTED]}
