"""Copies between a device and host memory: the only part of offloading that knows devices.

Two ways, with one interface: copies that are done when the call returns, for the CPU and for fake tensors, and copies
on streams of their own for CUDA. All tensors here are flat: one dimension, dense.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass
class Waiting:
    """A copy in host memory, made or on its way."""

    host: Tensor
    device: torch.device
    """Where it belongs."""
    stream: Any = None
    """The stream that made the original, on which backward will ask for it."""
    written: Any = None
    """The event after which the copy is complete; ``None``: it is."""
    was_edited: bool = False
    """The original was edited in place while it was being read, so that the copy may hold anything."""


@dataclass
class Fetched:
    """A copy that comes back to its device."""

    tensor: Tensor
    version: int
    stream: Any = None
    """The stream in whose order the memory is reused."""
    arrives: Any = None
    """The event after which the tensor can be read on that stream; ``None``: now."""
    was_edited: bool = False
    """See :class:`Waiting`."""


class Transfer(Protocol):
    """Moves flat tensors between one device and host memory."""

    looks_ahead: bool
    """Whether a fetch that is started early saves anything."""

    def out(self, source: Tensor) -> Waiting:
        """Starts a copy to host memory; the source's memory is free for others as soon as the caller lets go of it
        and the copy is done."""

    def back(self, waiting: Waiting) -> Fetched:
        """Starts a copy back to the device."""

    def arrived(self, fetched: Fetched) -> Tensor:
        """The tensor, for use on the current stream, which waits for it; the host does not.

        Raises:
            RuntimeError: the original was edited in place while it was being read.
        """

    def drop(self, fetched: Fetched) -> None:
        """Called before a fetched tensor is let go of, read or not."""

    def settle(self) -> None:
        """Lets go of everything that is still on its way to host memory."""


class Synchronous:
    """Every copy is done when its call returns."""

    looks_ahead = False

    def out(self, source: Tensor) -> Waiting:
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        return Waiting(host.copy_(source), source.device)

    def back(self, waiting: Waiting) -> Fetched:
        tensor = torch.empty(waiting.host.shape, dtype=waiting.host.dtype, device=waiting.device)
        tensor.copy_(waiting.host)
        return Fetched(tensor, tensor._version)

    def arrived(self, fetched: Fetched) -> Tensor:
        return fetched.tensor

    def drop(self, fetched: Fetched) -> None:
        pass

    def settle(self) -> None:
        pass


class Streams:
    """Copies on two streams of their own, through pinned memory that torch's host allocator reuses.

    No tensor is marked with ``record_stream``, except across streams of the user's: the allocator frees such memory
    when the *host* next looks at its events, so a host that runs ahead of the device would find none free and take
    more. Instead each side waits for the other's events, and memory is reused in stream order, however far ahead the
    host is.

    Args:
        device: an accelerator whose module in torch has streams and events: CUDA, XPU.
        limit_bytes: what may be on its way to host memory at a time. Beyond that the forward waits for the oldest copy,
            on the device: kernels that are launched ahead would otherwise take memory that nothing bounds.
    """

    looks_ahead = True

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._module = self._streams_of(device)
        self._device = device
        self._limit_bytes = limit_bytes
        self._outward, self._inward = self._module.Stream(device), self._module.Stream(device)
        # What is still being read, with its version: its memory must not be reused before.
        self._leaving: deque[tuple[Tensor, int, Waiting]] = deque()

    def out(self, source: Tensor) -> Waiting:
        self._release(self._limit_bytes - source.nbytes)
        stream = self._module.current_stream(self._device)
        host = self._pinned(source)
        self._outward.wait_stream(stream)
        with self._module.stream(self._outward):
            self._copy(host, source)
            written = self._outward.record_event()
        waiting = Waiting(host, self._device, stream, written)
        self._leaving.append((source, source._version, waiting))
        return waiting

    def back(self, waiting: Waiting) -> Fetched:
        self._release(self._limit_bytes, waiting)
        with self._module.stream(waiting.stream):
            tensor = torch.empty(waiting.host.shape, dtype=waiting.host.dtype, device=self._device)
        # The memory comes from that stream's pool, and what it has launched so far may still use it. It has also waited
        # for the copy out to be done, when the original was let go of.
        self._inward.wait_stream(waiting.stream)
        with self._module.stream(self._inward):
            self._copy(tensor, waiting.host)
            arrives = self._inward.record_event()
        return Fetched(tensor, tensor._version, waiting.stream, arrives, waiting.was_edited)

    def arrived(self, fetched: Fetched) -> Tensor:
        stream = self._module.current_stream(self._device)
        stream.wait_event(fetched.arrives)
        if stream != fetched.stream:
            fetched.tensor.record_stream(stream)
        if fetched.was_edited:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation while "
                f"it was on its way to host memory ({fetched.tensor.numel()} elements of {fetched.tensor.dtype}): do "
                "not edit it, or do not offload this region"
            )
        return fetched.tensor

    def drop(self, fetched: Fetched) -> None:
        fetched.stream.wait_event(fetched.arrives)

    def settle(self) -> None:
        self._release(0)

    def _release(self, limit_bytes: int, needed: Waiting | None = None) -> None:
        """Lets go of originals: of those that are read already, of the oldest until the rest is within a limit, and of
        all up to the one whose copy is needed."""
        leaving_bytes = sum(source.nbytes for source, _, _ in self._leaving)
        is_needed = any(waiting is needed for _, _, waiting in self._leaving)
        while self._leaving:
            source, version, waiting = self._leaving[0]
            if not waiting.written.query():
                if leaving_bytes <= limit_bytes and not is_needed:
                    return
                waiting.stream.wait_event(waiting.written)
            is_needed = is_needed and waiting is not needed
            waiting.was_edited = source._version != version
            self._leaving.popleft()
            leaving_bytes -= source.nbytes

    # What only a real device can do, for tests to replace.

    @staticmethod
    def _streams_of(device: torch.device) -> Any:
        return torch.get_device_module(device)

    @staticmethod
    def _pinned(source: Tensor) -> Tensor:
        return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)

    @staticmethod
    def _copy(target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


def transfer_for(tensor: Tensor, limit_bytes: int) -> Transfer:
    """The way to move tensors of this one's device."""
    if isinstance(tensor, FakeTensor) or tensor.device.type not in ("cuda", "xpu"):
        return Synchronous()
    return Streams(tensor.device, limit_bytes)
