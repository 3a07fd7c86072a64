"""The limit on a rank's memory that a run asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.errors import ConfigError
from dist_ckpt.memory.out_of_memory.limits import MemoryLimit, capacity_bytes, held_bytes
from dist_ckpt.memory.records import GIB

if TYPE_CHECKING:
    import torch

    from dist_ckpt.trainer.config import Config


def limit_memory(config: Config, device: torch.device) -> MemoryLimit:
    """Sets the limit, before there is a model; one that limits nothing if none is asked for.

    Raises:
        ConfigError: the process holds as much already, the device has less, or this system keeps no count.
    """
    train = config.train
    if train.memory_fraction is not None:
        option, nbytes = (
            f"train.memory_fraction={train.memory_fraction}",
            train.memory_fraction * capacity_bytes(device),
        )
    elif train.memory_limit_gib is not None:
        option, nbytes = f"train.memory_limit_gib={train.memory_limit_gib}", train.memory_limit_gib * GIB
    else:
        return MemoryLimit(device)
    held = held_bytes(device)
    if held is None:
        raise ConfigError(f"{option}: the memory of a process on the CPU is only limited on Linux; leave it null here")
    if nbytes <= held:
        raise ConfigError(
            f"{option}: {nbytes / GIB:.3f} GiB, and a rank holds {held / GIB:.3f} GiB before there is a model; give "
            "it more"
        )
    if nbytes > (capacity := capacity_bytes(device)):
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise ConfigError(f"{option}: {where} has {capacity / GIB:.3f} GiB; give at most that, or null")
    return MemoryLimit(device, int(nbytes))
