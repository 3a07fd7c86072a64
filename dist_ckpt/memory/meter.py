"""The always-on measurement of a rank's memory, for any training loop.

::

    meter = MemoryMeter(model, optimizer)
    for step, batch in enumerate(batches):
        loss = loss_fn(model, batch)
        meter.after_forward(loss)              # before backward
        loss.backward()
        del loss
        memory = meter.boundary(step)          # before the optimizer step
        optimizer.step()

Nothing is added to the step itself: no operation, no collective, no synchronisation with the device. A deep step, which
is slower, records every allocation of one update::

    with meter.profile() as deep:
        ...                                    # one step, as above
    print(deep.memory.at_peak, deep.profile.holdings)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.errors import MeasureError
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.memory.ledger import Owner, ledger, owners_of, resident_of
from dist_ckpt.memory.profile.recording import DeepStep, Recording
from dist_ckpt.memory.records import MemoryReport, RankMemory


class MemoryMeter:
    """Measures one rank.

    Of a pipeline engine of DeepSpeed, ``activations`` stays None: its ``train_batch()`` leaves nobody a moment between
    forward and backward. This package's training program measures them.

    Args:
        model: the model as it is trained: plain, DDP, FSDP1 or FSDP2, or the engine of ``deepspeed.initialize``.
        optimizer: whose state counts as ``optimizer``; an engine of DeepSpeed knows its own.
        owners: replaces what is found in model and optimizer, for engines that hold memory elsewhere.
        stage: this rank's, of a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        owners: Callable[[], Iterable[Owner]] | None = None,
        stage: int | None = None,
    ) -> None:
        self._model = model
        self._stage = stage
        self._recording: Recording | None = None
        self._owners = owners or (lambda: owners_of(model, optimizer))
        self._activations: int | None = None
        self._offloaded = 0
        self.opaque: tuple[str, ...] = ()
        """Autograd nodes met so far that may keep more than ``activations`` says; see :class:`SavedBytes`."""
        self.unseen: tuple[str, ...] = ()
        """Custom autograd Functions met so far into which no op rule sees; see :class:`SavedBytes`."""

    def after_forward(self, *roots: Tensor) -> int:
        """Reads what the graph of ``roots`` keeps for backward, in bytes, and remembers the step's peak.

        On an accelerator, what waits in host memory is not among it.

        To be called after each forward and before its backward, with the loss (or with all outputs that backward
        starts from).

        Raises:
            ValueError: a root that is no tensor, has no graph, or has had its backward.
        """
        for root in roots:
            if not isinstance(root, Tensor) or root.grad_fn is None:
                raise ValueError(f"after_forward takes the loss, before backward; got {_describe(root)}")
        found = self._read_graph(roots)
        if found.is_released:
            raise ValueError(
                "after_forward takes the loss before backward, which has let go of all that its graph kept"
            )
        kept = found.total if roots[0].device.type == "cpu" else found.on_device
        self._activations = max(self._activations or 0, kept)
        self._offloaded = max(self._offloaded, found.offloaded)
        self.opaque = tuple(sorted({*self.opaque, *found.opaque}))
        self.unseen = tuple(sorted({*self.unseen, *found.unseen}))
        return kept

    def _read_graph(self, roots: Sequence[Tensor]) -> SavedBytes:
        resident = (tensor for _, _, tensor in resident_of(self._model))
        if self._recording is None:
            return saved_bytes(roots, resident)
        with self._recording.mark() as mark:
            found = saved_bytes(roots, resident, tensors=True)
            self._recording.after_forward(mark, roots, found.tensors)
        return found

    def boundary(self, step: int) -> RankMemory:
        """This rank's memory at the boundary of a step; the peaks start anew."""
        owners = list(self._owners())
        bytes_of = ledger(owners)
        device = next((tensor.device for _, _, tensor in owners), torch.device("cpu"))
        rank = dist.get_rank() if dist.is_initialized() else 0
        memory = RankMemory(
            rank=rank,
            device=str(device),
            step=step,
            params=bytes_of["params"],
            grads=bytes_of["grads"],
            optimizer=bytes_of["optimizer"],
            other=bytes_of["other"],
            activations=self._activations,
            offloaded=self._offloaded or None,
            stage=self._stage,
            **_allocator(device),
        )
        self.reset()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self._recording is not None:
            self._recording.boundary(memory)
        return memory

    @contextmanager
    def profile(self, inputs: object = (), history: Path | None = None) -> Iterator[DeepStep]:
        """Records all of the one update that is performed inside, ``after_forward`` and ``boundary`` among it.

        The update is slower, and what it computes is the same.

        Args:
            inputs: what the update is handed, in any nesting (its micro-batches). The arguments of the model are known
                without.
            history: on CUDA, the file into which the allocator's own history of the update is written, for
                https://pytorch.org/memory_viz.

        Raises:
            MeasureError: the step had no boundary; or, before it begins, a profiler is running already.
        """
        if self._recording is not None:
            raise MeasureError("MemoryMeter.profile() was called within its own with block")
        deep = DeepStep()
        self._recording = Recording(self._model, self._owners, inputs, history)
        try:
            with self._recording:
                yield deep
            self._recording.result(deep, self._stage)
        finally:
            self._recording = None

    def reset(self) -> None:
        """Starts a new step: forgets the peaks of saved bytes."""
        self._activations, self._offloaded = None, 0


def _describe(root: object) -> str:
    return "a tensor without a graph" if isinstance(root, Tensor) else f"a {type(root).__name__}"


def gather_report(memory: RankMemory) -> MemoryReport:
    """Every rank's memory, on every rank: one collective, outside the step."""
    if not dist.is_initialized():
        return MemoryReport(memory.step, (memory,))
    ranks: list[RankMemory | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, memory)
    return MemoryReport(memory.step, tuple(r for r in ranks if r is not None))


def _allocator(device: torch.device) -> dict[str, Any]:
    """The allocator's and driver's figures; nothing on a device that keeps none."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free, capacity = torch.cuda.mem_get_info(device)
    return {
        "live": stats["allocated_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "device_used": capacity - free,
        "non_torch": capacity - free - stats["reserved_bytes.all.current"],
        "capacity": capacity,
        "alloc_retries": stats["num_alloc_retries"],
    }
