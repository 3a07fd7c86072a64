"""One rank as a process: its place in the job, signals, process group, log and exit."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from dist_ckpt.trainer.exits import ExitCode

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """A rank's place in the job, from the environment that a launcher sets; a single rank without one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this machine."""
    restarts: int = 0
    """How often torchrun has restarted this job's workers."""
    is_launched: bool = False
    """Whether torchrun, or DeepSpeed's launcher, has started this process."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place:
        return Place(
            rank=int(environment.get("RANK", 0)),
            world_size=int(environment.get("WORLD_SIZE", 1)),
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", 1))),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
            is_launched="TORCHELASTIC_RUN_ID" in environment or "RANK" in environment,
        )


def without_launcher_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments without ``--local_rank=N``, which DeepSpeed's launcher appends; the environment says it too."""
    return [a for a in arguments if not re.fullmatch(r"--local[_-]rank=\d+", a)]


class Termination:
    """Notes a SIGTERM instead of ending the process; the loop asks for it between steps."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def start_process_group(place: Place, device_type: str) -> dist.Store:
    """Joins the ranks: gloo between CPUs, NCCL between GPUs; a single rank needs no network.

    Returns:
        A store for what ranks have to tell each other outside of collectives.
    """
    import torch
    import torch.distributed as dist

    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if device_type == "cuda":
        torch.cuda.set_device(place.local_rank)
    store: dist.Store = dist.HashStore()
    if place.is_launched:
        store = next(iter(dist.rendezvous("env://")))[0]
        store.set_timeout(dist.default_pg_timeout)
        # torchrun's default rendezvous keeps its store when it restarts the workers (torch 2.13): without a prefix of
        # its own, a start may read the addresses of the one before.
        store = dist.PrefixStore(f"start_{place.restarts}", store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    return store


def log_to(path: Path) -> None:
    """Sends this rank's log and warnings to a file of its own; only rank 0 writes to the console."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def leave(code: ExitCode) -> NoReturn:
    """Flushes all output and ends the process at once.

    Not ``sys.exit``: after ``torch.distributed.checkpoint`` was used, the interpreter sometimes aborts during shutdown
    ("terminate called without an active exception", torch 2.13), which would turn success into failure.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def leave_with_rank_zero(place: Place, code: ExitCode, say: Callable[[], None], patience_s: float = 10.0) -> NoReturn:
    """Ends a job in which every rank has found the same thing, which rank 0 prints once.

    torchrun kills all ranks as soon as one has failed, even rank 0 before it could print anything. So if ``code`` is
    not 0, the other ranks wait for the SIGTERM that follows when rank 0 has printed and exited.

    Args:
        patience_s: how long they wait. After that, rank 0 may not have found it, and the next rank prints it.
    """
    if place.rank != 0 and code is not ExitCode.DONE:
        signal.signal(signal.SIGTERM, lambda number, frame: leave(code))
        time.sleep(patience_s + 0.5 * (place.rank - 1))  # in turn: once one has printed, the others are terminated
    if place.rank == 0 or code is not ExitCode.DONE:
        say()
    leave(code)
