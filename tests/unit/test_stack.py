"""Functions that are known by name in the stack of an error: one that was renamed would be taken for nothing at all."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

from dist_ckpt import engines, stages
from dist_ckpt.compat import stack
from dist_ckpt.memory.out_of_memory.failure import LOSSES, OF_ENGINES, frames_of


def test_every_method_of_deepspeed_is_there() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert [name for name in stack.DEEPSPEED_WORK if not inspect.isfunction(getattr(PipelineEngine, name, None))] == []


def test_every_method_of_this_packages_engines_is_there() -> None:
    pytest.importorskip("deepspeed")
    modules = [
        importlib.import_module(one.name) for one in pkgutil.iter_modules(engines.__path__, "dist_ckpt.engines.")
    ]
    classes = {c for module in modules for _, c in inspect.getmembers(module, inspect.isclass)}
    here = {name for c in classes if c.__module__.startswith("dist_ckpt.engines.") for name in vars(c)}
    assert set(OF_ENGINES) <= here


def test_every_loss_is_there() -> None:
    assert [name for name in LOSSES if not (hasattr(nn.functional, name) or hasattr(stages, name))] == []


def test_the_roots_of_a_backward_are_found() -> None:
    root = torch.ones(3, requires_grad=True).exp()
    root.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        root.backward(torch.ones(3))
    (frame,) = [frame for frame, _ in frames_of(caught.value) if stack.runs_backward(frame)]
    (found,) = stack.backward_roots(frame)
    assert found is root


def test_sharding_gathers_and_reduces_in_functions_of_this_name() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"):
        assert getattr(_fsdp_param_group, name) is getattr(_fsdp_collectives, name), "as it is called"
