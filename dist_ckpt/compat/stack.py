"""What calls of torch's and DeepSpeed's own functions are for, told from their frames (torch 2.13, DeepSpeed 0.19.8).

An error's traceback consists of frames, which are known by the names of private functions. Those of torch are looked up
here, so that one that has gone is missed at once; those of DeepSpeed, which need not be installed, by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from torch import nn
from torch.autograd import graph
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

_BACKWARD = graph._engine_run_backward.__code__
_CALL = nn.Module._call_impl.__code__

Work = Literal["forward", "backward", "optimizer"]

DEEPSPEED_WORK: Mapping[str, Work] = {
    "backward": "backward",
    "_exec_backward_pass": "backward",
    "_exec_reduce_grads": "backward",
    "_exec_reduce_tied_grads": "backward",
    "_exec_recv_grads": "backward",
    "_exec_send_grads": "backward",
    "_exec_recv_activations": "forward",
    "_exec_send_activations": "forward",
    "_exec_optimizer_step": "optimizer",
    "step": "optimizer",
}
"""Methods of DeepSpeed's engines (deepspeed/runtime/engine.py, deepspeed/runtime/pipe/engine.py)."""


def runs_backward(frame: FrameType) -> bool:
    """Whether a call is that which hands a backward to autograd's engine."""
    return frame.f_code is _BACKWARD


def backward_roots(frame: FrameType) -> Any:
    """The tensors from which the backward of such a call starts."""
    return frame.f_locals["t_outputs"]


def called_module(frame: FrameType) -> nn.Module | None:
    """The module that a call calls, hooks included; ``None`` for calls of anything else."""
    return frame.f_locals["self"] if frame.f_code is _CALL else None


def is_optimizers(frame: FrameType) -> bool:
    """Whether a call is a method of an optimizer, or clips gradients."""
    return isinstance(frame.f_locals.get("self"), Optimizer) or frame.f_code.co_filename == clip_grad.__file__


def work_of_deepspeed(frame: FrameType) -> Work | None:
    """What a call is for that is a method of DeepSpeed's; ``None`` for all others."""
    of_deepspeed = "/deepspeed/runtime/" in Path(frame.f_code.co_filename).as_posix()
    return DEEPSPEED_WORK.get(frame.f_code.co_name) if of_deepspeed else None


def fsdp2_collective(frame: FrameType) -> str | None:
    """The name of a call by which FSDP2 gathers or reduces a group of parameters; ``None`` for all others."""
    name = frame.f_code.co_name
    return name if frame.f_code.co_filename == _fsdp_collectives.__file__ and name.startswith("foreach_") else None
