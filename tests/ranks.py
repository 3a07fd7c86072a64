"""Long-lived groups of ranks for distributed tests.

Importing torch costs seconds a process, so tests do not start processes of their own: they borrow a group,
one a world size, and run module-level functions on it.

    def total(rank: int, world_size: int, value: int) -> int:
        tensor = torch.tensor([value + rank])
        dist.all_reduce(tensor)
        return int(tensor)

    def test_total(ranks: RankGroups) -> None:
        assert ranks(2).run(total, 1) == [3, 3]

The processes are forked from a server that has imported torch, so that a group starts in a fraction of a
second. Each has one thread, gloo over loopback as its default process group, the environment that torchrun
would have given it, and its output in a file. Whatever goes wrong on one rank, the group is killed and the
next run starts a fresh one: a test that fails never makes another hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

START_TIMEOUT_S = 90.0
GRACE_S = 1.0
"""How long the other ranks may take to report too once one has failed."""
LOG_TAIL_CHARS = 6000
PRELOAD = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "tests.ranks",
)
"""What the fork server imports: none of it starts a thread or touches a device, so forking stays safe."""


@dataclass(frozen=True)
class RankFailure:
    """What became of one rank in a run that failed."""

    kind: Literal["raised", "died", "waiting"]
    """raised: ``text`` is its traceback; died: the process ended; waiting: busy when the group was killed."""
    text: str
    output: str = ""
    """The end of what the rank wrote on stdout and stderr; for a waiting rank also where it stood."""


class RankError(RuntimeError):
    """A run that failed on at least one rank; ``failures`` maps each such rank to what became of it."""

    def __init__(self, what: str, failures: Mapping[int, RankFailure]) -> None:
        self.failures = dict(failures)
        parts = [what]
        for rank, failure in sorted(self.failures.items()):
            parts.append(f"---- rank {rank} {failure.kind} ----\n{failure.text.rstrip()}")
            if failure.output.strip():
                parts.append(f"---- rank {rank} wrote ----\n{failure.output.rstrip()}")
        super().__init__("\n".join(parts))


@dataclass
class _Members:
    """The processes of a running group, in rank order, and what belongs to them."""

    processes: list[BaseProcess]
    connections: list[Connection]
    store: dist.TCPStore


class RankGroup:
    """``world_size`` processes that run functions together; started by the first run and after a failure."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        self.world_size = world_size
        self.pids: tuple[int, ...] = ()
        """The processes now running; empty when the group is not."""
        self._members: _Members | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._log_starts = [0] * world_size

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> list[T]:
        """Runs ``fn(rank, world_size, *args)`` on every rank and returns the results in rank order.

        ``fn`` must be a module-level function; arguments and results travel by pickle. Every run starts
        with the same seed; what it changes of environment, directory and signal handlers is put back.

        Raises:
            RankError: a rank raised, ended, or was not done after ``timeout_s`` seconds; the group is gone.
        """
        request = pickle.dumps((fn, args))
        name = getattr(fn, "__qualname__", repr(fn))
        if self._members is None:
            self._start()
        members = self._members
        assert members is not None
        self._log_starts = [path.stat().st_size for path in self._log_paths()]
        try:
            for connection in members.connections:
                # A rank that has died between two runs is reported by _collect, like one that dies in a run.
                with contextlib.suppress(BrokenPipeError):
                    connection.send_bytes(request)
            replies = self._collect(name, timeout_s)
        except BaseException:
            self.close()
            raise
        if any(subgroups for _, subgroups in replies):
            # Each costs sockets and threads, and the test has their handles, not we; a new group is cheap.
            self.close()
        return [result for result, _ in replies]

    def outputs(self) -> list[str]:
        """What each rank has written on stdout and stderr in the last run, in rank order."""
        texts = []
        for path, start in zip(self._log_paths(), self._log_starts, strict=True):
            texts.append(path.read_bytes()[start:].decode(errors="replace") if path.exists() else "")
        return texts

    def close(self) -> None:
        """Ends every process of the group and what they have started, at once; a later run starts it anew."""
        members, self._members, self.pids = self._members, None, ()
        if members is None:
            return
        for process in members.processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # also reaches a rank that is not yet the leader of its process group
        for process in members.processes:
            process.join()
        for connection in members.connections:
            connection.close()

    def remove(self) -> None:
        """Closes the group and deletes its log files."""
        self.close()
        self._folder.cleanup()

    def _log_paths(self) -> list[Path]:
        return [Path(self._folder.name) / f"rank_{rank}.log" for rank in range(self.world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        members = _Members([], [], store)
        self._members = members
        self._log_starts = [0] * self.world_size
        try:
            for rank, log in enumerate(self._log_paths()):
                log.write_bytes(b"")
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(rank, self.world_size, store.port, theirs, str(log)),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                members.connections.append(ours)
                process.start()
                members.processes.append(process)
                theirs.close()
            self.pids = tuple(process.pid for process in members.processes if process.pid is not None)
            self._collect("the start", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _collect(self, name: str, timeout_s: float) -> list[Any]:
        """One reply of every rank, in rank order; after the first failure the others get GRACE_S."""
        members = self._members
        assert members is not None
        replies: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        pending = set(range(self.world_size))
        deadline = time.monotonic() + timeout_s
        while pending:
            by_object: dict[Any, int] = {members.connections[rank]: rank for rank in pending}
            by_object.update({members.processes[rank].sentinel: rank for rank in pending})
            ready = {by_object[found] for found in wait(list(by_object), max(0.0, deadline - time.monotonic()))}
            if not ready:
                break
            for rank in ready:
                pending.discard(rank)
                try:
                    # A rank may send its reply and end: what has arrived counts first.
                    if not members.connections[rank].poll():
                        raise EOFError
                    ok, payload = pickle.loads(members.connections[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    members.processes[rank].join(GRACE_S)
                    text = f"the process ended with exit code {members.processes[rank].exitcode}"
                    failures[rank] = RankFailure("died", text)
                    continue
                if ok:
                    replies[rank] = payload
                else:
                    failures[rank] = RankFailure("raised", payload)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures and not pending:
            return [replies[rank] for rank in range(self.world_size)]
        if failures:
            what = f"{name} failed on rank {', '.join(map(str, sorted(failures)))} of {self.world_size}"
        else:
            what = f"{name} was not done after {timeout_s:g} s on rank {', '.join(map(str, sorted(pending)))}"
        for rank in pending:
            failures[rank] = RankFailure("waiting", "still busy")
        raise RankError(what, self._with_outputs(failures))

    def _with_outputs(self, failures: Mapping[int, RankFailure]) -> dict[int, RankFailure]:
        """The failures with each rank's output; who is still busy is first asked to write where it stands."""
        members = self._members
        assert members is not None
        waiting = [rank for rank, failure in failures.items() if failure.kind == "waiting"]
        for rank in waiting:
            pid = members.processes[rank].pid
            if pid is not None and members.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        if waiting:
            time.sleep(0.3)
        outputs = self.outputs()
        return {
            rank: RankFailure(failure.kind, failure.text, outputs[rank][-LOG_TAIL_CHARS:])
            for rank, failure in failures.items()
        }


class RankGroups:
    """The groups of one test session, by world size: ``ranks(4)``."""

    def __init__(self) -> None:
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, world_size: int) -> RankGroup:
        """The group of that many ranks, made when first asked for."""
        if world_size not in self._groups:
            self._groups[world_size] = RankGroup(world_size)
        return self._groups[world_size]

    def close(self) -> None:
        """Ends every group."""
        for group in self._groups.values():
            group.remove()
        self._groups.clear()


def _work(rank: int, world_size: int, store_port: int, connection: Connection, log: str) -> None:
    """The life of one rank: join the group, then answer requests until killed."""
    os.setsid()  # so that close() also reaches what a test has started
    _write_to(log)
    _end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store_port),
        OMP_NUM_THREADS="1",
    )
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # the host's own name need not resolve
    try:
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    gc.freeze()  # torch's own objects: the collection after each run need not look at them
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_reply(rank, world_size, request))


def _reply(rank: int, world_size: int, request: bytes) -> bytes:
    """Runs one request: (True, (result, process groups left behind)) or (False, traceback), pickled."""
    before = dist.get_pg_count()
    try:
        with _restored():
            fn, args = pickle.loads(request)
            torch.manual_seed(0)
            random.seed(0)
            reply = pickle.dumps((True, (fn(rank, world_size, *args), dist.get_pg_count() - before)))
    except BaseException:  # SystemExit and pytest's own outcomes too: only the parent may end this process
        return pickle.dumps((False, traceback.format_exc()))
    gc.collect()  # hooks and wrappers make cycles; one test's models must not count in the next one's memory
    return reply


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Puts back what a test may change for the whole process."""
    environment, directory, threads = dict(os.environ), os.getcwd(), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.stdout.flush()
        sys.stderr.flush()


def _write_to(log: str) -> None:
    """Sends stdout and stderr to the file ``log``; on SIGUSR1 or a crash also each thread's stack."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _end_with_parent() -> None:
    """Ends this process, and what it has started, once the one that asked for it has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()
