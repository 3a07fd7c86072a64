"""``launch/train.py`` on a machine whose memory is used up on one rank: PHASE RANK STEP CODES, then its own arguments.

From the beginning of that phase of that step on, the operating system gives the rank nothing more, so that the next
allocation fails wherever it is made: in C++ or in Python, by torch, by gloo or by DeepSpeed. Each rank writes the code
with which it leaves into the folder CODES, because torchrun reports that of the first one alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_ckpt.memory.out_of_memory.limits import held_bytes
from dist_ckpt.trainer.main import main
from dist_ckpt.trainer.models.llama import Transformer, TransformerBlock

_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc."""


def use_up() -> None:
    """From now on nothing is left, and large tensors cannot be put into gaps either."""
    held = held_bytes(torch.device("cpu"))
    assert held is not None
    resource.setrlimit(resource.RLIMIT_DATA, (held, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class Countdown:
    """Uses memory up at the n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            use_up()


def in_setup(step: int) -> None:
    """When the model gets its memory."""
    usual = Transformer.to_empty

    def to_empty(self: Transformer, **options: Any) -> Any:
        use_up()
        return usual(self, **options)

    Transformer.to_empty = to_empty  # type: ignore[method-assign]


def _around_blocks(step: int, within: Callable[[Countdown, Tensor], None]) -> None:
    """Calls back after each forward of the first block that the rank has, with a countdown to the step."""
    usual, first, due = TransformerBlock.forward, None, Countdown(step)

    def forward(self: TransformerBlock, *args: Any, **options: Any) -> Tensor:
        nonlocal first
        first = self if first is None else first
        result = usual(self, *args, **options)
        if self is first and self.training and torch._C._current_graph_task_id() == -1:
            within(due, result)
        return result

    TransformerBlock.forward = forward  # type: ignore[method-assign]


def in_forward(step: int) -> None:
    """After the first block."""
    _around_blocks(step, lambda due, result: due())


def in_backward(step: int) -> None:
    """Where the gradient of the first block's result is there."""

    def watch(due: Countdown, result: Tensor) -> None:
        if result.requires_grad:
            result.register_hook(lambda gradient: due())

    _around_blocks(step, watch)


def in_recompute(step: int) -> None:
    """Before the first block runs again."""
    usual, due = TransformerBlock.forward, Countdown(step)

    def forward(self: TransformerBlock, *args: Any, **options: Any) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            due()
        return usual(self, *args, **options)

    TransformerBlock.forward = forward  # type: ignore[method-assign]


def in_optimizer(step: int) -> None:
    """When the torch optimizer, inside whatever shards it, begins an update, and wants memory for a flat copy.

    DeepSpeed steps it before training too, to have its states.
    """
    forwards = 0

    def count(due: Countdown, result: Tensor) -> None:
        nonlocal forwards
        forwards += 1

    def begin(optimizer: Optimizer, *args: Any) -> None:
        if forwards >= step:
            use_up()
            torch.empty(sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]))

    _around_blocks(0, count)
    register_optimizer_step_pre_hook(begin)


def in_collective(step: int) -> None:
    """In a reduction, for which gloo needs a buffer; one that is large enough follows each reduction of the loss."""
    usual, due, large = dist.all_reduce, Countdown(step), torch.zeros(1 << 20)

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        result = usual(tensor, *args, **options)
        if tensor.dtype is torch.float64 and tensor.dim() == 0:
            due()
            usual(large)
        return result

    dist.all_reduce = all_reduce


PHASES: Mapping[str, Callable[[int], None]] = {
    function.__name__.removeprefix("in_"): function
    for function in (in_setup, in_forward, in_backward, in_recompute, in_optimizer, in_collective)
}


def note_code(folder: Path) -> None:
    """Has this rank write down the code with which it leaves."""
    leave = os._exit

    def exit_with(code: int) -> None:
        (folder / os.environ["RANK"]).write_text(str(int(code)))
        leave(code)

    os._exit = exit_with  # type: ignore[assignment]


if __name__ == "__main__":
    phase, rank, step, codes = sys.argv[1:5]
    note_code(Path(codes))
    here = os.environ["RANK"] == rank
    if here:
        ctypes.CDLL(None).mallopt(_THRESHOLD, 1 << 15)  # what is freed goes back at once
    if here or phase == "collective":  # which needs the others
        PHASES[phase](int(step) if here else 0)
    main(sys.argv[5:])
