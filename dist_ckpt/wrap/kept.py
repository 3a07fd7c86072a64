"""What an op-level region keeps of one forward, and gives back to its recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from dist_ckpt.compat import dispatch as torch_private
from dist_ckpt.compat.torch import bare_alias, version_witness
from dist_ckpt.memory.packed import Packed
from dist_ckpt.ops import Operator
from dist_ckpt.plan import Action
from dist_ckpt.wrap.offload import Offloader


class Alias:
    """A kept tensor: its memory without its graph, and the version that its content belongs to."""

    __slots__ = ("val", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.val = bare_alias(tensor)
        self.version = self.val._version

    @property
    def is_stale(self) -> bool:
        """Whether somebody has edited the tensor in place since it was kept."""
        return self.val._version != self.version

    def move_away(self) -> None:
        """Keeps a copy, because the tensor is about to be edited."""
        self.val = self.val.clone()
        self.version = self.val._version


class Away:
    """A kept tensor that waits elsewhere: with saved-tensor hooks, or in host memory."""

    __slots__ = ("val", "version", "witness")

    def __init__(self, val: Any, witness: Tensor | None) -> None:
        self.val = val
        """A handle of autograd's, or what an offloader returned."""
        self.witness = witness
        self.version = 0 if witness is None else witness._version

    @property
    def is_stale(self) -> bool:
        """As of an :class:`Alias`: hooks may hand the very tensor through, and autograd checks none of theirs."""
        return self.witness is not None and self.witness._version != self.version

    def get(self) -> Tensor:
        tensor: Tensor = self.val.get() if isinstance(self.val, Packed) else self.val.unpack()
        return tensor


class GeneratorState:
    """Where a random generator stood after a call that drew from it, for what draws next.

    The recompute does not run that call, so without this the next one would draw its numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = torch.get_rng_state() if device.type == "cpu" else _module(device).get_rng_state(device)

    def restore(self) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(self._state)
        else:
            _module(self._device).set_rng_state(self._state, self._device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


class Kept(NamedTuple):
    """The result of one call: the structure that the operator returned, with something to stand for each tensor."""

    out: Any
    generator: GeneratorState | None = None


class Place(NamedTuple):
    """Where a kept result stands, and what is to become of it."""

    op: Operator
    call: int
    action: Action
    packed: int
    """Tensors that the forward had saved for backward before the call."""


class Results(dict[Operator, list[Kept | None]]):
    """For each operator that a rule names, an entry a call: what is kept of it, or ``None`` to recompute it."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set()
        """Custom autograd Functions in whose forward a result was kept."""
        self.nodes = range(0)
        """Sequence numbers of the autograd nodes that the forward made."""
        self.recomputes = 0
        """Recomputes that run now. In a forward that runs a backward of its own they run under the forward's mode."""
        self._is_complete = False
        self._places: list[Place] = []
        self._by_storage: dict[int, list[Alias]] = {}
        self._indexed = 0

    def is_blind_to(self, function: str, made: int) -> bool:
        """Whether a custom Function whose node was made in this forward has nothing of it kept."""
        return made in self.nodes and function not in self.functions

    def skip(self, op: Operator) -> None:
        """Notes a call that is to be recomputed."""
        self.setdefault(op, []).append(None)

    def keep(self, op: Operator, action: Action, out: Any, packed: int, generator: GeneratorState | None) -> None:
        """Keeps the result of a call."""
        calls = self.setdefault(op, [])
        self._places.append(Place(op, len(calls), action, packed))
        calls.append(Kept(_each(_alias, out), generator))
        if not torch.is_grad_enabled() and (name := torch_private.running_function()):
            self.functions.add(name)

    def before_edit(self, tensors: Iterable[Any]) -> None:
        """To be called before an operator writes into tensors: what is kept of the same memory becomes a copy.

        So the recompute still gets the value from before the edit, and makes the edit itself.
        """
        for place in self._places[self._indexed :]:
            for alias in self._aliases(place):
                for storage in _storages(alias.val):
                    self._by_storage.setdefault(storage, []).append(alias)
        self._indexed = len(self._places)
        for tensor in tensors:
            for storage in _storages(tensor):
                for alias in self._by_storage.pop(storage, ()):
                    alias.move_away()

    def drop_unreached(self, packed: int) -> None:
        """Lets go of results of calls that come after the last tensor that backward needs.

        An early stop ends the recompute there, so it never asks for them: the last matrix product of an MLP, whose
        output is only added to the residual stream, is the common case.

        Args:
            packed: tensors that the whole forward has saved for backward.
        """
        for place in self._places:
            if place.packed == packed:
                self[place.op][place.call] = None

    def settle(self, frame: Any, offloader: Callable[[], Offloader]) -> None:
        """Ends the forward: what is to wait elsewhere goes there.

        Results go where everything goes that this forward's surroundings save for backward: through the saved-tensor
        hooks around it, if there are any. Those of an outer checkpoint have them recomputed.
        """
        self._is_complete = True
        places, self._places, self._by_storage = self._places, [], {}
        with torch_private.around_frame(frame) as around:
            for place in places:
                if around == "checkpoint" or (around == "other" and place.action == "save"):
                    self._replace(place, torch_private.packed)
                elif place.action == "offload":
                    self._replace(place, offloader().put)

    def _replace(self, place: Place, pack: Callable[[Tensor], Any]) -> None:
        entry = self[place.op][place.call]
        if entry is None or any(alias.is_stale for alias in self._aliases(place)):
            self[place.op][place.call] = None
            return

        self[place.op][place.call] = entry._replace(out=_each(lambda leaf: _packed(leaf, pack), entry.out))

    def _aliases(self, place: Place) -> Iterator[Alias]:
        entry = self[place.op][place.call]
        if entry is not None:
            yield from (leaf for leaf in tree_leaves(entry.out) if isinstance(leaf, Alias))

    def take(self) -> dict[Operator, list[Kept | None]]:
        """What a recompute is to hand out, each operator's last call first.

        A backward that frees its graph takes the results with it; another backward through the same region, where one
        is possible at all, recomputes them. So it does with those that were edited in place in the meantime.
        """
        # A forward may run a backward of its own, which is not the one that all this is for.
        is_retained = not self._is_complete or torch_private.graph_is_retained()
        taken: dict[Operator, list[Kept | None]] = {}
        for op, calls in self.items():
            taken[op] = [_restored(entry, is_retained) for entry in reversed(calls)]
            if not is_retained:
                calls[:] = [None] * len(calls)
        return taken


def _restored(entry: Kept | None, is_retained: bool) -> Kept | None:
    if entry is None or any(isinstance(leaf, (Alias, Away)) and leaf.is_stale for leaf in tree_leaves(entry.out)):
        return None

    def tensor_of(leaf: Any) -> Any:
        if isinstance(leaf, Alias):
            # The recompute gives the tensor that it gets a graph, so one that is handed out again stays bare.
            return bare_alias(leaf.val) if is_retained else leaf.val
        # A view of a copy that others share would let no operation edit its result in place.
        return bare_alias(leaf.get()) if isinstance(leaf, Away) else leaf

    return entry._replace(out=_each(tensor_of, entry.out))


def _packed(leaf: Any, pack: Callable[[Tensor], Any]) -> Any:
    """What stands for a tensor once it waits elsewhere; the alias itself if it does not."""
    if not isinstance(leaf, Alias) or is_traceable_wrapper_subclass(leaf.val):
        return leaf
    held = pack(leaf.val)
    if isinstance(held, Packed) and not held.in_host_memory:  # too small for it
        return leaf
    # A copy that is done at once does not change with its original.
    is_copied = isinstance(held, Packed) and leaf.val.device.type == "cpu"
    return Away(held, None if is_copied else version_witness(leaf.val))


def _alias(leaf: Any) -> Any:
    return Alias(leaf) if isinstance(leaf, Tensor) else leaf


def _each(function: Callable[[Any], Any], out: Any) -> Any:
    """The structure with a function applied to each leaf; most operators return one tensor."""
    return tree_map(function, out) if isinstance(out, (tuple, list)) else function(out)


def _storages(tensor: Any) -> Iterator[int]:
    """The addresses of what a tensor's content lies in; several for a subclass that wraps others."""
    if isinstance(tensor, (list, tuple)):
        for one in tensor:
            yield from _storages(one)
    elif isinstance(tensor, Tensor):
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                yield from _storages(getattr(tensor, name))
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()._cdata


def given(places: Iterable[tuple[int, str]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of a call at some places, by position and name."""
    for position, name in places:
        yield args[position] if position < len(args) else kwargs.get(name)
