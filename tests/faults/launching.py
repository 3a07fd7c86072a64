"""Starts the training program as its users do, in fresh processes, and says what came of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.trainer.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train.py"
FAULTY = Path(__file__).with_name("faulty_train.py")

TINY = ("model.n_layers=2", "model.d_model=32", "model.d_ff=48", "train.seq_len=32", "train.micro_batch=2")
"""Options of a model that is as good as any for how a run ends."""

_MARK = "DIST_CKPT_TEST_LAUNCH"


@dataclass(frozen=True)
class Finished:
    """A launch that has ended, with nothing left of it."""

    code: int
    """torchrun's, or the program's without it."""
    output: str
    """Of all processes, stdout and stderr together."""
    seconds: float
    cpu_s: float
    """What all its processes together have computed."""
    peak_rss_bytes: int
    """Memory of the largest process of this and all earlier launches: an upper bound."""
    cwd: Path

    @property
    def errors(self) -> list[str]:
        """The messages that are the program's own."""
        return re.findall(r"^error: (.*)", self.output, flags=re.MULTILINE)

    @property
    def worker_codes(self) -> dict[int, int]:
        """Rank to exit code, of those that torchrun reports as failed in its last start."""
        last = self.output.rpartition("\nFailures:")[2] if "\nFailures:" in self.output else self.output
        found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", last)
        return {int(rank): int(code) for rank, code in found}

    @property
    def first_code(self) -> int:
        """The exit code of the worker that failed first."""
        found = re.search(r"Root Cause.*?exitcode +: (-?\d+)", self.output, flags=re.DOTALL)
        assert found, self.output
        return int(found[1])

    def assert_no_traceback_of_ours(self) -> None:
        """torchrun has one of its own, of the process that started the workers."""
        frames = re.findall(r'File "(.*?)"', self.output)
        ours = [frame for frame in frames if "dist_ckpt" in frame or frame.endswith("train.py")]
        assert not ours, self.output

    def assert_quick(self, limit_s: float) -> None:
        """Ended in time on an idle machine; where others compute too, in proportionally more."""
        load = max(1.0, (os.getloadavg()[0] + 1) / (os.cpu_count() or 1))
        assert self.seconds < limit_s * load, f"{self.seconds:.1f} s at load {load:.1f}\n{self.output}"


def torchrun(
    *arguments: str,
    cwd: Path,
    ranks: int = 2,
    script: Path = TRAIN,
    max_restarts: int = 0,
    environment: dict[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Finished:
    """``torchrun --nproc_per_node RANKS SCRIPT ARGUMENTS`` in the folder ``cwd``."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(_free_port())]
    restarts = ["--max-restarts", str(max_restarts)] if max_restarts else []
    return run([sys.executable, *launcher, *restarts, str(script), *arguments], cwd, environment, timeout_s)


def alone(*arguments: str, cwd: Path, script: Path = TRAIN, terminal: bool = False) -> Finished:
    """``python SCRIPT ARGUMENTS``, without torchrun; with ``terminal`` as if a person watched."""
    return run([sys.executable, str(script), *arguments], cwd, terminal=terminal)


def faulty(fault: str, *, rank: int, step: int, starts: str = "first") -> tuple[str, ...]:
    """The first arguments of ``faulty_train.py``: which fault befalls which rank in which step of which starts."""
    return (fault, str(rank), str(step), starts)


def run(
    command: Sequence[str],
    cwd: Path,
    environment: dict[str, str] | None = None,
    timeout_s: float = 120.0,
    terminal: bool = False,
) -> Finished:
    """Runs a command to its end.

    Raises:
        AssertionError: it, or a process that it has started, is still there after ``timeout_s``; all are killed.
    """
    mark = uuid.uuid4().hex
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), _MARK: mark, **(environment or {})}
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    output, writes = _terminal() if terminal else os.pipe()
    start, cpu_s = time.monotonic(), _children_cpu_s()
    process = subprocess.Popen(
        command, cwd=cwd, env=inherited | added, stdin=subprocess.DEVNULL, stdout=writes, stderr=writes
    )
    os.close(writes)
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read, args=(output, chunks), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    seconds = time.monotonic() - start
    left = _kill(mark)
    process.wait()
    reader.join()
    text = b"".join(chunks).decode(errors="replace").replace("\r\n", "\n")
    assert not timed_out, f"not done after {timeout_s:g} s:\n{text}"
    assert not left, f"still there after the end: {left}\n{text}"
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Finished(process.returncode, text, seconds, _children_cpu_s() - cpu_s, peak_rss_bytes, cwd)


def exit_record(run_dir: Path) -> dict[str, Any]:
    """What ``exit.json`` says."""
    record: dict[str, Any] = json.loads((run_dir / "exit.json").read_text())
    return record


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    return read_json_lines(RunFolder(run_dir).metrics)


def trajectory(run_dir: Path) -> list[tuple[Any, ...]]:
    """Of each step what must not depend on how fast, or in how many parts, the run went."""
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m["tokens"]) for m in metrics(run_dir)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _terminal() -> tuple[int, int]:
    """A terminal of 120 columns: what it shows can be read from the first descriptor."""
    shown, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return shown, terminal


def _read(descriptor: int, chunks: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # how a terminal ends
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
    os.close(descriptor)


def _kill(mark: str) -> list[int]:
    """Kills every process that was started by the launch with this mark, and says which there were."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                found.append(int(folder.name))
        except OSError:  # gone, or not ours
            continue
    return found


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
