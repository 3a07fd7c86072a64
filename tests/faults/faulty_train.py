"""``launch/train.py`` with a fault in it: FAULT RANK STEP STARTS, then the program's own arguments.

The fault comes in the forward of that step on that rank, in the first block that the rank has, between the collectives
before it and those in backward; step 0 is the filling of the model. It comes in the ``first`` start of the job or in
``all`` of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dist_ckpt.errors import DataError
from dist_ckpt.trainer.main import main
from dist_ckpt.trainer.models.llama import Transformer, TransformerBlock


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def memory_error() -> None:
    raise MemoryError


def cpu_allocation() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)


def boom() -> None:
    raise RuntimeError("boom")


def mistake() -> None:
    raise DataError("data: corpus/7.txt cannot be read")


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def sigterm_to_torchrun() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


FAULTS: Mapping[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        out_of_memory, memory_error, cpu_allocation, boom, mistake, sigkill, sigterm, sigint, sigterm_to_torchrun,
    )
}  # fmt: skip


def install(name: str, step: int) -> None:
    """Puts the fault into the ``step``-th forward from here on, counted from 1."""
    if step == 0:
        Transformer.init_buffers = lambda self: FAULTS[name]()  # type: ignore[method-assign]
        return
    forward, calls, first = TransformerBlock.forward, 0, None

    def faulty(self: TransformerBlock, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls, first
        if type(args[0]) is not Tensor:  # a fake one: what the plan costs is being measured
            return forward(self, *args, **kwargs)
        first = self if first is None else first
        is_recompute = torch._C._current_graph_task_id() != -1
        calls += self is first and self.training and not is_recompute  # validation counts no step, and has no fault
        now = self is first and self.training and calls == step
        if now and name != "nan":
            FAULTS[name]()
        result = forward(self, *args, **kwargs)
        return result * float("nan") if now and name == "nan" else result

    TransformerBlock.forward = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, rank, step, starts = sys.argv[1:5]
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if os.environ.get("RANK", "0") == rank and (starts == "all" or is_first):
        install(fault, int(step))
    main(sys.argv[5:])
