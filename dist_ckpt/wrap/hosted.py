"""Copies in host memory, each shared by all views of its storage, and how backward gets them back in time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.memory.packed import Packed
from dist_ckpt.wrap.transfer import Fetched, Transfer, transfer_for


class HostCopy:
    """A flat tensor's copy in host memory, for everything that was saved of it.

    What comes back for one view stays for the others, as long as any of them is still to be asked for: that is how
    long autograd would have kept the original.
    """

    def __init__(self, source: Tensor, root: Tensor, transfer: Transfer) -> None:
        self.fetched: Fetched | None = None
        self.was_asked_for = False
        self.place = 0
        """When it was packed, among the copies that may be fetched ahead."""
        self.transfer = transfer
        self.waiting = transfer.out(source)
        # Copies are found by addresses, which may become another's meanwhile: of the first that is noticed, the second
        # is kept from it.
        self.root = weakref.ref(root)
        self._storage = torch_private.weak_storage(source)

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

    def __del__(self) -> None:
        self.let_go()


class HostCopies:
    """All copies of one model that are alive. It holds none of them: graphs and op-level caches do.

    Args:
        ahead_bytes: how much may be on its way at a time, out, or back before it is asked for.
    """

    def __init__(self, ahead_bytes: int) -> None:
        self._ahead_bytes = ahead_bytes
        self._transfers: dict[tuple[torch.device, bool], Transfer] = {}
        self._found: weakref.WeakValueDictionary[Any, HostCopy] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[HostCopy]] = []  # as they were packed: backward asks for the last one first
        self._on_device: weakref.WeakSet[HostCopy] = weakref.WeakSet()
        self._backward: int | None = None

    def copy_of(self, tensor: Tensor, start: int, stop: int) -> HostCopy:
        """The copy of a part of a tensor's storage, made now unless it was made since that was edited last.

        Args:
            start, stop: which part, in elements of the tensor's type.
        """
        local = local_tensor(tensor)
        # Only a tensor and its views are known to share a version counter. Other aliases have their own, and are edited
        # unseen by this one: the gates of a recurrent cell are (``unsafe_chunk`` in aten/src/ATen/native/RNN.cpp).
        root = tensor if tensor._base is None else tensor._base
        key = (id(root), local.untyped_storage()._cdata, tensor._version, local.dtype, start, stop)
        copy = self._found.get(key)
        if copy is None or copy.root() is not root:
            source = local.detach().as_strided((stop - start,), (1,), start)
            copy = self._found[key] = HostCopy(source, root, self._transfer_of(source))
        if copy.transfer.looks_ahead:
            self._queue(copy)
        return copy

    def settle(self) -> None:
        """Lets go of all originals."""
        for transfer in self._transfers.values():
            transfer.settle()

    def restore(self, copy: HostCopy) -> Tensor:
        """A copy's content, flat, on its device; whatever is needed next is on its way when this returns.

        Raises:
            RuntimeError: the original was edited in place before the copy was done.
        """
        backward = torch_private.running_backward()
        if backward is None:  # somebody looks at a saved tensor: nothing would tell when to free it
            return copy.transfer.arrived(copy.transfer.back(copy.waiting))
        if self._backward != backward:
            self._end_backward()  # of one that raised, or around this one
            self._backward = backward
            torch_private.at_end_of_backward(self._end_backward)
        fetched = copy.fetch()
        copy.was_asked_for = True
        self._on_device.add(copy)
        if copy.transfer.looks_ahead:
            self._look_ahead(copy)
        return copy.transfer.arrived(fetched)

    def _transfer_of(self, tensor: Tensor) -> Transfer:
        kind = (tensor.device, isinstance(tensor, FakeTensor))
        if kind not in self._transfers:
            self._transfers[kind] = transfer_for(tensor, self._ahead_bytes)
        return self._transfers[kind]

    def _queue(self, copy: HostCopy) -> None:
        """Notes that a copy was packed last; one that was packed before is needed sooner now."""
        if len(self._order) > 2 * len(self._found) + 64:  # mostly of copies that are gone
            alive = sorted({one for ref in self._order if (one := ref()) is not None}, key=lambda one: one.place)
            self._order = [weakref.ref(one) for one in alive]
            for place, one in enumerate(alive):
                one.place = place
        copy.place = len(self._order)
        self._order.append(weakref.ref(copy))

    def _look_ahead(self, copy: HostCopy) -> None:
        """Starts what was packed before a copy, as far as the limit allows."""
        ahead = self._ahead_bytes - sum(one.nbytes for one in self._on_device if not one.was_asked_for)
        for earlier in self._before(copy):
            ahead -= earlier.nbytes
            if ahead < 0:
                break
            earlier.fetch()
            self._on_device.add(earlier)

    def _before(self, copy: HostCopy) -> Iterator[HostCopy]:
        """What was packed before a copy and is not on the device, the last one first."""
        for place in range(copy.place - 1, -1, -1):
            earlier = self._order[place]()
            if earlier is not None and earlier.fetched is None:
                yield earlier

    def _end_backward(self) -> None:
        """What a backward brought back and is still there would only be needed by another one."""
        for copy in self._on_device:
            copy.let_go()
        self._on_device.clear()
        self._backward = None


class Hosted(Packed):
    """A tensor as a view of a copy in host memory."""

    __slots__ = ("_copies", "_copy", "_offset", "_outer", "_size", "_stride")

    def __init__(self, copies: HostCopies, copy: HostCopy, tensor: Tensor, start: int) -> None:
        """A view of ``copy``, whose first element is the storage's element ``start``."""
        local = local_tensor(tensor)
        self._copies, self._copy = copies, copy
        self._size, self._stride, self._offset = local.size(), local.stride(), local.storage_offset() - start
        self._outer: tuple[Any, ...] | None = None
        if local is not tensor:
            names, spec = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(tensor, name) for name in names}  # the local part, and from torch 2.13 on the mesh
            others = {name: None if part is local else part for name, part in parts.items()}
            self._outer = (type(tensor), others, spec, tensor.size(), tensor.stride())

    @property
    def held(self) -> Tensor:
        return self._copy.waiting.host

    @property
    def in_host_memory(self) -> bool:
        return True

    def get(self) -> Tensor:
        local = self._copies.restore(self._copy).as_strided(self._size, self._stride, self._offset)
        if self._outer is None:
            return local
        kind, others, spec, size, stride = self._outer
        parts = {name: local if part is None else part for name, part in others.items()}
        return kind.__tensor_unflatten__(parts, spec, size, stride)
