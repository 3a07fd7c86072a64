"""An allocation that failed: whether an error is about one, how much was asked for, and where the step was."""

from __future__ import annotations

import errno
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from torch import nn

from dist_ckpt.compat import stack

_TEXTS = re.compile(
    r"DefaultCPUAllocator: |^std::bad_alloc$|CUDA (driver )?error: out of memory|Cuda failure \d* ?'out of memory'"
)
"""torch 2.13 has a type for torch's allocator on CUDA alone. The CPU's raises a plain RuntimeError that names it; C++'s
own, gloo's buffers among what it serves, one that says ``std::bad_alloc``."""
_ASKED = re.compile(r"to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

FailurePhase = Literal[
    "setup", "forward", "loss", "recompute", "backward", "optimizer", "evaluation", "saving", "other"
]
"""Where in a run an allocation failed. ``recompute`` is a part of backward; ``optimizer`` includes clipping."""


@dataclass(frozen=True)
class FailureSite:
    """Where an allocation failed, as far as the stack says it."""

    phase: FailurePhase
    module: str | None
    """Name in the plain model of the innermost module that was running, or whose parameters were being gathered or
    reduced; ``""`` is the model itself."""
    collective: str | None
    """The one that was being prepared or run."""
    line: str | None
    """The line of code that was running, outside of torch."""


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """The failed allocation that an error is, or that it is the consequence of on this rank; ``None`` without one.

    Of several the first that failed: dealing with one often needs memory too.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    found = None
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        found = one if _is_out_of_memory(one) else found
        seen.add(id(one))
        # torch.compile hides the error of the code that it traces.
        pending += [None if one.__suppress_context__ else one.__context__, one.__cause__]
        pending.append(getattr(one, "inner_exception", None))
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    from_torch = type(error) is RuntimeError or isinstance(error, (torch.AcceleratorError, torch.distributed.DistError))
    return from_torch and _TEXTS.search(str(error)) is not None


def requested_bytes(error: BaseException) -> int | None:
    """What an allocation was to have, by its error; ``None`` where the message does not say it.

    >>> requested_bytes(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has …"))
    1610612736
    """
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2].lower()])


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """Frames and line numbers from where an error was caught to where the allocation failed, outermost first."""
    cause = out_of_memory_in(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    if cause is not None and cause is not error:
        frames += traceback.walk_tb(cause.__traceback__)
    return frames


def place_of(error: BaseException, names: Mapping[nn.Module, str]) -> FailureSite:
    """Where an allocation failed.

    Args:
        names: of the model's modules, in the plain model.
    """
    phase: FailurePhase = "other"
    module = collective = line = None
    for frame, number in frames_of(error):
        phase = _phase(phase, frame)
        if stack.runs_backward(frame):  # by whichever module: what it is doing says who is called from there
            module = None
        module = next((names[m] for m in _modules(frame) if m in names), module)
        collective = collective or _collective(frame)
        if not is_library(frame.f_code.co_filename):
            text = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()
            line = where(frame, number) + (f": {text}" if text else "")
    if phase == "optimizer" and module == "":
        module = None  # DeepSpeed's engine, which is a module, steps it
    return FailureSite(phase, module, collective, line)


def where(frame: FrameType, number: int) -> str:
    """A place in code, in words.

    Args:
        number: of the line.
    """
    return f"{frame.f_code.co_name} ({'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{number})"


def step_begins(frames: Sequence[tuple[FrameType, int]]) -> int:
    """Position of the outermost call that belongs to the step; their number if none does."""
    phase: FailurePhase = "other"
    for position, (frame, _) in enumerate(frames):
        phase = _phase(phase, frame)
        is_engine = "/dist_ckpt/engines/" in Path(frame.f_code.co_filename).as_posix()
        if phase != "other" or (is_engine and frame.f_code.co_name == "train_step"):
            return position
    return len(frames)


def _phase(so_far: FailurePhase, frame: FrameType) -> FailurePhase:
    """The phase inside this frame, given its caller's."""
    if so_far in ("setup", "evaluation", "saving", "optimizer", "recompute"):
        return so_far
    name = frame.f_code.co_name
    if name in OF_ENGINES and "/dist_ckpt/engines/" in Path(frame.f_code.co_filename).as_posix():
        return OF_ENGINES[name]
    if work := stack.work_of_deepspeed(frame):
        return work
    if stack.runs_backward(frame):
        return "backward"
    if stack.is_optimizers(frame):
        return "optimizer"
    if stack.called_module(frame) is not None:
        return "recompute" if so_far == "backward" else "forward"
    return "loss" if so_far == "other" and name in LOSSES else so_far


OF_ENGINES: Mapping[str, FailurePhase] = {
    "prepare": "setup",
    "eval_loss": "evaluation",
    "save": "saving",
    "load": "saving",
    "_update": "optimizer",
    "_at_boundary": "optimizer",
    "_backward": "backward",
}
"""Methods of this package's engines."""
LOSSES = ("cross_entropy", "linear_cross_entropy", "nll_loss", "token_loss")
"""Functions of torch's and of this package."""


def _modules(frame: FrameType) -> Iterator[nn.Module]:
    """Modules that a call is about: of which it is a method, or which sharding hands to its hooks."""
    for name in ("self", "module", "sub_module"):
        found = frame.f_locals.get(name)
        if isinstance(found, nn.Module):
            yield found
        elif name == "self":  # FSDP2 gathers and reduces by groups of parameters
            of_group = getattr(found, "modules", None)
            yield from (m for m in of_group if isinstance(m, nn.Module)) if isinstance(of_group, tuple) else ()


def _collective(frame: FrameType) -> str | None:
    file = Path(frame.f_code.co_filename).as_posix()
    if file.endswith(("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")):
        return frame.f_code.co_name
    return stack.fsdp2_collective(frame)


def is_library(file: str) -> bool:
    """Whether a file of code is an installed package's, Python's or what this package puts between modules, rather than
    the model's or the loop's."""
    between = any(f"/dist_ckpt/{part}/" in Path(file).as_posix() for part in ("compat", "guards", "wrap"))
    return between or file.startswith(("<", *_LIBRARIES)) or "site-packages" in Path(file).parts


_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])
