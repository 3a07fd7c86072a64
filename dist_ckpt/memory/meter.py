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

Nothing is added to the step itself: no operation, no collective, no synchronisation with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.ledger import Owner, ledger, owners_of, resident_of
from dist_ckpt.memory.records import MemoryReport, RankMemory


class MemoryMeter:
    """Measures one rank.

    Of a pipeline engine of DeepSpeed, ``activations`` stays None: its ``train_batch()`` leaves nobody a moment between
    forward and backward. This package's training program measures them.

    Args:
        model: the model as it is trained: plain, DDP, FSDP1 or FSDP2, or the engine of ``deepspeed.initialize``.
        optimizer: whose state counts as ``optimizer``; an engine of DeepSpeed knows its own.
        owners: replaces what is found in model and optimizer, for engines that hold memory elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        owners: Callable[[], Iterable[Owner]] | None = None,
    ) -> None:
        self._model = model
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
            ValueError: a root that is no tensor, or has no graph.
        """
        for root in roots:
            if not isinstance(root, Tensor) or root.grad_fn is None:
                raise ValueError(f"after_forward takes the loss, before backward; got {_describe(root)}")
        found = saved_bytes(roots, (tensor for _, _, tensor in resident_of(self._model)))
        kept = found.total if roots[0].device.type == "cpu" else found.on_device
        self._activations = max(self._activations or 0, kept)
        self._offloaded = max(self._offloaded, found.offloaded)
        self.opaque = tuple(sorted({*self.opaque, *found.opaque}))
        self.unseen = tuple(sorted({*self.unseen, *found.unseen}))
        return kept

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
            **_allocator(device),
        )
        self.reset()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return memory

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
        "capacity": capacity,
        "alloc_retries": stats["num_alloc_retries"],
    }
