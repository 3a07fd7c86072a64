"""What CUDA's caching allocator tells of itself (read in torch 2.13; tried on a double, not yet on a device)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MAX_ENTRIES = 1_000_000
"""Allocations and frees that are kept: the last ones."""


def allocated_blocks(device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of all that the device's allocator has given out; nothing on the CPU, which keeps no list.

    Bytes are those of whole blocks, as in the profiler's events and in ``memory_allocated`` (c10/cuda/
    CUDACachingAllocator.cpp, ``malloc``).
    """
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    found = []
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        if segment["device"] != index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.append((address, block["size"]))
            address += block["size"]
    return found


@contextmanager
def history_written(device: torch.device, path: Path | None) -> Iterator[None]:
    """Writes the history of CUDA's allocator within the context, for https://pytorch.org/memory_viz.

    Also where the context is left by an error: running out of memory is when it is wanted most.

    Args:
        path: the pickle file; ``None`` writes nothing, and so does the CPU.
    """
    if path is None or device.type != "cuda":
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(
        device=device, stacks="python", max_entries=_MAX_ENTRIES, clear_history=True
    )
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
