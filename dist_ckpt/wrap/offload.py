"""Saved tensors that wait in host memory until backward needs them.

::

    offloader = Offloader()                  # one for all regions of a model
    with offloader.hooks(block):             # what autograd saves in here is copied to the host
        y = block(x)

A copy holds the value from the time of saving, so later in-place edits of the original do not matter. What is not
copied is watched instead, as autograd does where no hooks are: an edit between forward and backward raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.errors import PlanError
from dist_ckpt.memory.activations import is_weight_copy
from dist_ckpt.memory.packed import Packed
from dist_ckpt.memory.storages import Storages
from dist_ckpt.wrap.transfer import Fetched, Transfer, transfer_for

MIN_BYTES = 2**16
"""Smaller tensors stay on the device: to start a copy takes longer than to do it."""
AHEAD_BYTES = 2**29
"""How much may be on its way at a time, to the host in forward and ahead of its use in backward."""


class Kept(Packed):
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_version", "_weight_copy")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf itself: its ``data`` may be exchanged until backward, as sharded parameters do. Of others an alias: the
        # tensor itself would hold the graph that holds it.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._weight_copy = is_weight_copy(tensor)

    @property
    def held(self) -> Tensor:
        return self._tensor

    @property
    def is_weight_copy(self) -> bool:
        return self._weight_copy

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}], which was not offloaded, is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class HostCopy:
    """A flat tensor's copy in host memory, for everything that was saved of it."""

    def __init__(self, source: Tensor, transfer: Transfer) -> None:
        self.transfer = transfer
        self.waiting = transfer.out(source)
        self.fetched: Fetched | None = None
        self.was_asked_for = False
        self.place = 0
        # Copies are found by the address of what they are copies of, which must not become another's meanwhile.
        self._source = torch_private.weak_storage(source)

    @property
    def nbytes(self) -> int:
        return self.waiting.host.nbytes

    def fetch(self) -> Fetched:
        """Starts the way back, unless it is on it; anew where somebody edited what came back before."""
        if self.fetched is not None and self.fetched.tensor._version != self.fetched.version:
            self.let_go()
        if self.fetched is None:
            self.fetched = self.transfer.back(self.waiting)
        return self.fetched

    def let_go(self) -> None:
        """Frees what is on the device; the copy on the host stays."""
        if self.fetched is not None:
            self.transfer.drop(self.fetched)
        self.fetched, self.was_asked_for = None, False

    __del__ = let_go


class HostView(Packed):
    """A tensor as a view of a copy in host memory."""

    __slots__ = ("_copy", "_offloader", "_offset", "_outer", "_size", "_stride")

    def __init__(self, offloader: Offloader, copy: HostCopy, tensor: Tensor, start: int) -> None:
        local = local_tensor(tensor)
        self._offloader, self._copy = offloader, copy
        self._size, self._stride, self._offset = local.size(), local.stride(), local.storage_offset() - start
        self._outer: tuple[Any, ...] | None = None
        if isinstance(tensor, DTensor):
            self._outer = (type(tensor), *tensor.__tensor_flatten__(), tensor.size(), tensor.stride())

    @property
    def held(self) -> Tensor:
        return self._copy.waiting.host

    @property
    def in_host_memory(self) -> bool:
        return True

    def get(self) -> Tensor:
        local = self._offloader._restore(self._copy).as_strided(self._size, self._stride, self._offset)
        if self._outer is None:
            return local
        kind, names, spec, size, stride = self._outer
        return kind.__tensor_unflatten__(dict.fromkeys(names, local), spec, size, stride)


Offloaded = Packed
"""What :meth:`Offloader.put` returns."""


class Offloader:
    """Moves saved tensors to host memory and back: one for all regions of a model.

    A copy or pickle of it is a fresh one with the same settings: what waits belongs to a graph, not to a model.

    Args:
        min_bytes: smaller tensors stay where they are.
        ahead_bytes: how much may be on its way to the host at a time, and how much may come back before it is needed.
    """

    def __init__(self, min_bytes: int = MIN_BYTES, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._min_bytes, self._ahead_bytes = min_bytes, ahead_bytes
        self._transfers: dict[tuple[torch.device, bool], Transfer] = {}
        self._copies: weakref.WeakValueDictionary[Any, HostCopy] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[HostCopy]] = []  # as they were packed; backward asks for the last one first
        self._on_device: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._backward: int | None = None

    def __reduce__(self) -> Any:
        return Offloader, (self._min_bytes, self._ahead_bytes)

    def hooks(self, *modules: nn.Module) -> saved_tensors_hooks:
        """A context in which every tensor that autograd saves waits in host memory.

        Left where they are: parameters, buffers, views of either, autocast's copies of parameters, tensors of less than
        ``min_bytes``, tensors that lie in host memory already if the modules are on an accelerator, and tensors without
        plain strided memory (sparse, quantized, subclasses). A DTensor's local part is offloaded.

        Args:
            modules: whose parameters and buffers to look for; parameters of others are known by their type.

        Raises:
            PlanError: called in code that is being compiled.
        """
        if torch.compiler.is_compiling():
            raise PlanError(
                "a region that offloads what it saves is in compiled code, where nothing is saved until the whole has "
                "run: do not compile it, or choose a policy without offload"
            )
        lasting = [local_tensor(t) for t in _lasting(modules)]
        resident = Storages(lasting)
        on_accelerator = any(t.device.type not in ("cpu", "meta") for t in lasting)

        def pack(tensor: Tensor) -> Packed:
            stays = on_accelerator and tensor.device.type == "cpu"
            return Kept(tensor) if stays or _is_resident(tensor, resident) else self.put(tensor)

        return saved_tensors_hooks(pack, _get)

    def put(self, tensor: Tensor) -> Offloaded:
        """Copies a tensor to host memory, unless it is small or has no plain memory; views of one storage share a copy.

        Returns:
            What gives it back: ``get()``, any number of times.
        """
        local = local_tensor(tensor)
        if not _has_plain_memory(local) or (is_traceable_wrapper_subclass(tensor) and local is tensor):
            return Kept(tensor)
        whole = local.untyped_storage().nbytes() // local.itemsize
        start, stop = _span(local)
        # Views of one storage share a copy of it. But one that spans a small part of something large (a batch's rows of
        # a whole data set) is copied alone.
        if (stop - start) * 2 > whole:
            start, stop = 0, whole
        if (stop - start) * local.itemsize < self._min_bytes:
            return Kept(tensor)
        # The version tells whether the content is still that of an earlier copy.
        key = (local.untyped_storage()._cdata, tensor._version, local.dtype, start, stop)
        copy = self._copies.get(key)
        if copy is None:
            source = local.detach().as_strided((stop - start,), (1,), start)
            copy = self._copies[key] = HostCopy(source, self._transfer_of(source))
        if copy.transfer.looks_ahead:
            self._queue(copy)
        return HostView(self, copy, tensor, start)

    def _transfer_of(self, tensor: Tensor) -> Transfer:
        kind = (tensor.device, isinstance(tensor, FakeTensor))
        if kind not in self._transfers:
            self._transfers[kind] = transfer_for(tensor, self._ahead_bytes)
        return self._transfers[kind]

    def _queue(self, copy: HostCopy) -> None:
        """Notes that a copy was packed last; one that was packed before is needed sooner now."""
        if len(self._order) > 2 * len(self._copies) + 64:
            alive = sorted({found for ref in self._order if (found := ref()) is not None}, key=lambda one: one.place)
            self._order = [weakref.ref(one) for one in alive]
            for place, one in enumerate(alive):
                one.place = place
        copy.place = len(self._order)
        self._order.append(weakref.ref(copy))

    def _restore(self, copy: HostCopy) -> Tensor:
        """A copy's content, back on its device."""
        backward = torch_private.running_backward()
        if backward is None:  # somebody looks at a saved tensor: nothing would tell when to free it
            return copy.transfer.arrived(copy.transfer.back(copy.waiting))
        if self._backward != backward:
            self._let_go()  # of a backward that raised
            self._backward = backward
            torch_private.at_end_of_backward(self._let_go)
        fetched = copy.fetch()
        copy.was_asked_for = True
        self._on_device.add(copy)
        if copy.transfer.looks_ahead:
            ahead = self._ahead_bytes - sum(c.nbytes for c in self._on_device if not c.was_asked_for)
            for earlier in self._before(copy):
                if earlier.nbytes > ahead:
                    break
                ahead -= earlier.nbytes
                earlier.fetch()
                self._on_device.add(earlier)
        return copy.transfer.arrived(fetched)

    def _before(self, copy: HostCopy) -> Iterator[HostCopy]:
        """What was packed before a copy and is not on the device, the last one first."""
        for place in range(copy.place - 1, -1, -1):
            earlier = self._order[place]()
            if earlier is not None and earlier.fetched is None:
                yield earlier

    def _let_go(self) -> None:
        """A backward has ended: what it brought back and is still there would only be needed by another one."""
        for copy in self._on_device:
            copy.let_go()
        self._on_device.clear()
        self._backward = None


def _get(packed: Packed) -> Tensor:
    return packed.get()


def _lasting(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    for root in modules:
        for module in root.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    yield tensor


def _is_resident(tensor: Tensor, resident: Storages) -> bool:
    """Whether a tensor is a parameter or buffer, a view of one, or autocast's copy of one.

    FSDP's unsharded parameters are Parameters (FSDP2), or views of its flat one (FSDP1).
    """
    return (
        isinstance(tensor, nn.Parameter)
        or isinstance(tensor._base, nn.Parameter)
        or (_has_plain_memory(local_tensor(tensor)) and local_tensor(tensor) in resident)
        or is_weight_copy(tensor)
    )


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor is a plain strided one, so that its bytes are all there is to it."""
    return (
        type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The elements of its storage between which a tensor lies: [start, stop)."""
    start = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + reach + 1
