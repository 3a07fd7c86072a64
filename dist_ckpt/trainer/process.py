"""One rank as a process: where it stands in the job, its signals, its process group and its end."""

from __future__ import annotations

import contextlib
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
    local_world_size: int = 1
    """Ranks on this machine."""
    restarts: int = 0
    """How often torchrun has started this job's workers anew."""
    under_torchrun: bool = False

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place:
        return Place(
            rank=int(environment.get("RANK", 0)),
            world_size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
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
    store: dist.Store = dist.HashStore()
    if place.under_torchrun:
        store = next(iter(dist.rendezvous("env://")))[0]
        store.set_timeout(dist.default_pg_timeout)
        # torchrun's default rendezvous keeps its store when it restarts the workers (torch 2.13): without a prefix of
        # its own, a rank may read there where another one listened before.
        store = dist.PrefixStore(f"start_{place.restarts}", store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)


def log_to(path: Path) -> None:
    """Sends this rank's log and warnings to its own file; the console is rank 0's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process at once, output flushed.

    Not ``sys.exit``: after distributed checkpoints some jobs abort while the interpreter shuts down ("terminate
    called without an active exception", torch 2.13), which would turn a good end into a bad one.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def leave_with_rank_zero(place: Place, code: ExitCode, say: Callable[[], None], patience_s: float = 10.0) -> NoReturn:
    """Ends a job in which every rank has found the same thing: rank 0 says it, once.

    torchrun kills all other ranks as soon as one has failed, rank 0 among them, which may still be starting. So with
    a code other than 0 the others wait for that until rank 0 has spoken and left.

    Args:
        patience_s: how long they wait. Then it may be that rank 0 has found nothing, and the next one speaks.
    """
    if place.rank != 0 and code is not ExitCode.DONE:
        signal.signal(signal.SIGTERM, lambda number, frame: leave(code))
        time.sleep(patience_s + 0.5 * (place.rank - 1))  # one after the other: the first to speak silences the rest
    if place.rank == 0 or code is not ExitCode.DONE:
        say()
    leave(code)
