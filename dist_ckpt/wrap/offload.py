"""Saved tensors that wait in host memory until backward needs them.

::

    offloader = Offloader()                  # one for all regions of a model
    with offloader.hooks(block):             # what autograd saves in here is copied to the host
        y = block(x)

A copy holds the value from the time of saving, so later in-place edits of the original do not matter; on an
accelerator, one that comes before the copy is known to be done raises in backward. What is not copied is watched
instead, as autograd does where no hooks are: an edit between forward and backward raises. Edits that torch's version
counters do not see (``.data``, collectives) are seen here no more than there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.errors import PlanError
from dist_ckpt.memory.activations import is_weight_copy
from dist_ckpt.memory.packed import Packed
from dist_ckpt.memory.storages import Storages
from dist_ckpt.wrap.hosted import HostCopies, Hosted

MIN_BYTES = 2**16
"""Smaller tensors stay where they are: a copy of this size takes as long to start as to do."""
AHEAD_BYTES = 2**29
"""How much may be on its way at a time: to the host in forward, and back ahead of its use in backward."""


class Watched(Packed):
    """A tensor that stays where it is."""

    __slots__ = ("_is_weight_copy", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf itself: its ``data`` may be exchanged before backward, as sharding does. Of others an alias: the tensor
        # itself would hold the graph that holds it.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._is_weight_copy = is_weight_copy(tensor)

    @property
    def held(self) -> Tensor:
        return self._tensor

    @property
    def is_weight_copy(self) -> bool:
        return self._is_weight_copy

    def get(self) -> Tensor:
        if self._tensor._version != self._version:  # in autograd's own words, which users know to search for
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}], which was not offloaded, is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class Offloader:
    """Moves saved tensors to host memory and back: one for all regions of a model.

    A copy or pickle of it is a fresh one with the same settings: what waits belongs to a graph, not to a model. It
    knows no modules around, whose buffers are then offloaded where regions save them, to no harm and no use.

    Args:
        min_bytes: tensors of less stay where they are.
        ahead_bytes: how much may be on its way to the host at a time, and how much may come back before it is needed.
            It is taken on the device on top of what the plan says.
        around: modules outside of all regions, whose buffers regions are given: tables of rotary angles, masks.
    """

    def __init__(
        self, min_bytes: int = MIN_BYTES, ahead_bytes: int = AHEAD_BYTES, around: Iterable[nn.Module] = ()
    ) -> None:
        self._settings = (min_bytes, ahead_bytes)
        self._min_bytes = min_bytes
        self._copies = HostCopies(ahead_bytes)
        # Weakly: one of them is the model, which holds this.
        self._around = [weakref.ref(module) for module in around if module._buffers]

    def _buffers_around(self) -> Iterator[Tensor]:
        for module in filter(None, (ref() for ref in self._around)):
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    def __reduce__(self) -> Any:
        return Offloader, self._settings

    def hooks(self, *modules: nn.Module) -> saved_tensors_hooks:
        """A context, to be entered once, in which every tensor that autograd saves waits in host memory.

        Left where they are: parameters, buffers, views of either, autocast's copies of parameters, tensors of less than
        ``min_bytes``, tensors that lie in host memory already if the modules are on an accelerator, and tensors without
        plain strided memory (sparse, quantized, subclasses). A DTensor's local part is offloaded.

        Args:
            modules: whose parameters and buffers to look for; parameters of others are known by their type.

        Raises:
            PlanError: called in code that is being compiled. Compiled code inside the context is right.
        """
        if torch.compiler.is_compiling():
            raise PlanError(
                "a region that offloads what it saves is called in compiled code, which saves nothing before all of it "
                "has run: compile what is inside the region, or choose a policy without offload"
            )
        return _Hooks(self, modules)

    def put(self, tensor: Tensor) -> Packed:
        """Copies a tensor to host memory, unless it is small or has no plain memory; views of one storage share a copy.

        Returns:
            What gives it back: ``get()``, any number of times.
        """
        local = local_tensor(tensor)
        if not _has_plain_memory(local):
            return Watched(tensor)
        whole = local.untyped_storage().nbytes() // local.itemsize
        start, stop = _span(local)
        # Views of one storage share a copy of it. But one that spans a small part of something large (a batch's rows of
        # a whole data set) is copied alone.
        if 2 * (stop - start) > whole:
            start, stop = 0, whole
        if (stop - start) * local.itemsize < self._min_bytes:
            return Watched(tensor)
        return Hosted(self._copies, self._copies.copy_of(tensor, start, stop), tensor, start)

    def settle(self) -> None:
        """Lets go of all originals that are still being copied."""
        self._copies.settle()


class _Hooks(saved_tensors_hooks):
    """The context. Autograd keeps its pack hook as long as the graph, so it holds no module once it has ended."""

    def __init__(self, offloader: Offloader, modules: tuple[nn.Module, ...]) -> None:
        super().__init__(self._pack, _unpack)
        self._offloader = offloader
        self._modules = modules
        self._resident = Storages()
        self._on_accelerator = False

    def __enter__(self) -> None:
        lasting = [local_tensor(tensor) for module in self._modules for tensor in _lasting(module)]
        self._on_accelerator = any(tensor.device.type not in ("cpu", "meta") for tensor in lasting)
        self._resident = Storages((*lasting, *self._offloader._buffers_around()))
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._modules, self._resident = (), Storages()
        if exception[0] is not None:
            self._offloader.settle()

    @torch._disable_dynamo
    def _pack(self, tensor: Tensor) -> Packed:
        local = local_tensor(tensor)
        stays = (
            (self._on_accelerator and local.device.type == "cpu")
            # FSDP's unsharded parameters are Parameters (FSDP2), or views of its flat one (FSDP1).
            or isinstance(tensor, nn.Parameter)
            or isinstance(tensor._base, nn.Parameter)
            or is_weight_copy(tensor)
            or (_has_plain_memory(local) and local in self._resident)
        )
        return Watched(tensor) if stays else self._offloader.put(tensor)


@torch._disable_dynamo
def _unpack(packed: Packed) -> Tensor:
    return packed.get()


def _lasting(root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


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
