"""Private parts of torch's profiler (tested with torch 2.13): every allocation of a span of time, under the operations
that made it.

``torch.profiler`` publishes times per operation, but neither addresses nor the tree of operations, both of which its
own memory view reads from the same place (torch/profiler/_memory_profiler.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType, _RecordFunctionFast, _TensorMetadata
from torch.autograd import profiler as _profiler

from dist_ckpt.errors import MeasureError

_TURN = threading.Lock()
"""The profiler and the file of stderr are the process's: two threads that take them at once have it crash."""


@dataclass(frozen=True)
class TensorInput:
    """A tensor that an operation was given."""

    address: int
    """Of its storage."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Op:
    """An operation, or whatever else was recorded as one, :func:`span` included. Times are nanoseconds."""

    name: str
    start: int
    end: int
    parent: int
    """Position of the operation within which it ran; -1 for none."""
    sequence: int | None = None
    """The number that autograd's next node had when a forward operation ran; a node's own number in backward."""
    inputs: tuple[TensorInput, ...] = ()


@dataclass(frozen=True)
class Change:
    """An allocation, or a free, which has a negative number of bytes."""

    at: int
    """Nanoseconds."""
    address: int
    nbytes: int
    op: int
    """Position of the operation within which it happened; -1 for none."""


@dataclass(frozen=True)
class Trace:
    """What was recorded, in order of time; an operation comes after the one within which it ran."""

    ops: tuple[Op, ...]
    changes: tuple[Change, ...]
    """On one device."""


class Recorder:
    """Records what the calling thread does, and what autograd and collectives do for it, until :meth:`stop`.

    Raises:
        MeasureError: a profiler is running already.
    """

    def __init__(self) -> None:
        with _TURN:
            if _is_taken():
                raise MeasureError(
                    "a profiler is running already, and torch has room for one: end it before this step, or record "
                    "the step without MemoryMeter.profile()"
                )
            self._profile = _profiler.profile(use_kineto=True, profile_memory=True, record_shapes=True)
            before = torch.empty(1)
            with _quiet():
                self._profile.__enter__()
                del before  # the CPU's allocator warns of the first of 1000 that it has not seen made

    def stop(self) -> None:
        """Records nothing more; a second call does nothing."""
        if self._profile.kineto_results is None:
            with _TURN, _quiet():
                self._profile.__exit__(None, None, None)

    def trace(self, device: torch.device) -> Trace:
        """What was recorded, with the changes of a device's memory; after :meth:`stop`."""
        assert self._profile.kineto_results is not None
        ops: list[Op] = []
        changes: list[Change] = []
        pending = [(event, -1) for event in reversed(self._profile.kineto_results.experimental_event_tree())]
        while pending:
            event, parent = pending.pop()
            if event.tag == _EventType.Allocation:
                fields: Any = event.extra_fields
                if fields.device.type == device.type and (device.index is None or fields.device.index == device.index):
                    changes.append(Change(event.start_time_ns, fields.ptr, fields.alloc_size, parent))
                continue
            place = parent
            if event.tag == _EventType.TorchOp:
                place = len(ops)
                ops.append(_op(event, parent))
            pending.extend((child, place) for child in reversed(event.children))
        return Trace(tuple(ops), tuple(sorted(changes, key=lambda change: change.at)))


def is_recorded() -> bool:
    """Whether a profiler records what this thread does; what autograd's threads do for it too."""
    return torch.autograd._profiler_enabled()


def _is_taken() -> bool:
    """Whether a profiler runs, or is warming up: to start another one then has the process crash when it goes on."""
    return is_recorded() or any(
        issubclass(type(one), _profiler.profile) and one.entered and one.kineto_results is None
        for one in gc.get_objects()
    )


def _op(event: Any, parent: int) -> Op:
    fields = event.extra_fields
    inputs = tuple(
        TensorInput(address, tuple(one.sizes), dtype_name(one.dtype))
        for given in fields.inputs
        for one in (given if isinstance(given, list) else (given,))  # collectives are given lists of tensors
        if type(one) is _TensorMetadata and (address := one.storage_data_ptr) is not None
    )
    sequence = fields.sequence_number
    # Operations without one have -1; nodes that ran out of order, AccumulateGrad, the largest number there is.
    return Op(
        event.name, event.start_time_ns, event.end_time_ns, parent, sequence if 0 <= sequence < 2**62 else None, inputs
    )


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def span(name: str) -> AbstractContextManager[Any]:
    """Shows in the recording as an operation of this name, without being one that torch dispatches."""
    context: AbstractContextManager[Any] = _RecordFunctionFast(name)
    return context


@contextmanager
def calls_marked(names: Mapping[nn.Module, str], called: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
    """Shows each call of these modules as an operation of the given name, its hooks included.

    No hooks are used, of which a compiled module's guards would take notice, and nothing is dispatched, so that no
    dispatch mode sees anything.

    Args:
        called: gets a module and its arguments before each call.
    """
    usual = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return usual(self, *args, **kwargs)
        name = names.get(self)
        if name is None or not is_recorded():  # another thread's call
            return usual(self, *args, **kwargs)
        called(self, args, kwargs)
        with _RecordFunctionFast(name):
            return usual(self, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = usual  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the profiler writes on stderr whatever the log level; others' lines are kept.

    That is a line of kineto's whenever it starts and stops, and the warning of c10/core/CPUAllocator.cpp.
    """
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        usual = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(usual, 2)
            os.close(usual)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:") and b"] Memory block of unknown size was allocated" not in line:
                    os.write(2, line)
