"""How much memory a process may hold: what there is, what it holds, and a limit that can be lifted in need."""

from __future__ import annotations

import mmap
import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

_RESERVE_BYTES = 8 * 2**20
_NONE = resource.RLIM_INFINITY


class MemoryLimit:
    """A limit on what this process may hold; beyond it allocations fail, as they do where memory itself is used up.

    On the CPU it is the operating system's (the soft ``RLIMIT_DATA``), so whoever allocates runs into it: torch in
    forward, in backward and in collectives, and Python itself. It counts private writable memory whether touched or
    not, Python's and the libraries' own included. On an accelerator it is that of torch's allocator.

    As a context it is lifted as soon as an exception passes, before anybody has to allocate to deal with that.

    Args:
        device: that the process computes on.
        nbytes: ``None`` sets no limit. Lifting then only gives back a small reserve.
    """

    def __init__(self, device: torch.device, nbytes: int | None = None) -> None:
        self.device = device
        self.nbytes = nbytes
        self.start_bytes = held_bytes(device)
        """What the process held before; ``None`` where that cannot be said."""
        self.held_bytes: int | None = None
        """What it held when the limit was lifted."""
        # Never touched, so it takes no memory. Its end gives the few pages without which not even lifting might work.
        self._reserve = mmap.mmap(-1, _RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._fraction_before = 1.0
        if nbytes is None:
            return
        if device.type == "cuda":
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(device)
            torch.cuda.set_per_process_memory_fraction(min(nbytes / capacity_bytes(device), 1.0), device)
            return
        soft, hard = self._before
        given = [one for one in (soft, hard) if one != _NONE]
        resource.setrlimit(resource.RLIMIT_DATA, (min([nbytes, *given]), hard))

    def lift(self) -> None:
        """Sets what was before; more than once is no error. Works where nothing is left to allocate."""
        self._reserve.close()
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
        if self.nbytes is not None and self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.device)
        if self.held_bytes is None:
            self.held_bytes = held_bytes(self.device)

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.lift()


def held_bytes(device: torch.device) -> int | None:
    """What this process holds, as a limit counts it; ``None`` where nobody keeps count."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.current", 0))
    with suppress(OSError):
        found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def resident_bytes() -> int | None:
    """What this process holds of the machine's memory, which is what it has touched; ``None`` where the system does not
    say."""
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def capacity_bytes(device: torch.device) -> int:
    """Memory of the device; of the CPU that of the machine, or what this process's control groups leave of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_control_groups()])


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """The limits of this process's control groups and of those around them, of both versions of the interface."""
    limits = []
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            place = base / group.lstrip("/")
            for folder in (place, *place.parents):
                with suppress(OSError, ValueError):  # "max" is no limit
                    limits.append(int((folder / file).read_text(encoding="ascii")))
                if folder == base:
                    break
    return limits
