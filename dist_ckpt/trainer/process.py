"""One rank as a process: where it stands in the job, its signals, its process group and its end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dist_ckpt.trainer.exits import ExitCode


@dataclass(frozen=True)
class Place:
    """A rank's place in the job, as torchrun tells it; one rank without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    restarts: int = 0
    max_restarts: int = 0
    under_torchrun: bool = False

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place:
        return Place(
            rank=int(environment.get("RANK", 0)),
            world_size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            max_restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)),
            under_torchrun="TORCHELASTIC_RUN_ID" in environment or "RANK" in environment,
        )


class Termination:
    """Whether a SIGTERM came. The step in progress ends first; the loop asks."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def start_process_group(place: Place, device_type: str) -> None:
    """Joins the ranks: gloo between CPUs, NCCL between GPUs; a single rank needs no network."""
    import torch
    import torch.distributed as dist

    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if device_type == "cuda":
        torch.cuda.set_device(place.local_rank)
    if place.under_torchrun:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def log_to(path: Path) -> None:
    """Sends this rank's log to its own file; the console is rank 0's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process at once, output flushed.

    Not ``sys.exit``: after distributed checkpoints some jobs abort while the interpreter shuts down ("terminate
    called without an active exception", torch 2.13), which would turn a good end into a bad one.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_together(
    place: Place, code: ExitCode, say: Callable[[], None], patience_s: float = 8.0, speak_up: bool = False
) -> NoReturn:
    """Ends a job in which every rank found the same thing: rank 0 says it, once.

    torchrun kills all other ranks as soon as one has left. So rank 0 leaves first, once it has spoken, and the others
    wait for that.

    Args:
        patience_s: how long the others wait before they leave by themselves.
        speak_up: whether a rank that waited in vain says it: rank 0 may not have found it after all.
    """
    if place.rank != 0:
        signal.signal(signal.SIGTERM, lambda number, frame: leave(code))
        time.sleep(patience_s)
        if not speak_up:
            leave(code)
    say()
    leave(code)
