"""Internals of DeepSpeed (tested with 0.19.8): how it starts, and how an engine of its own is built and ended.

What is read of an engine that somebody else has built lies in :mod:`dist_ckpt.compat.zero`, which needs no import of
DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dist_ckpt.compat.deepspeed_state import undo_first_step
from dist_ckpt.errors import EngineError

KNOWN = ((0, 19, 8), (0, 20))
"""The first version whose internals are known here, and the first one after those."""
_INSTALL = "pip install 'dist_ckpt[deepspeed]', or choose another engine"
_LOGGER = "DeepSpeed"


def start(device: torch.device) -> None:
    """Makes DeepSpeed ready on a device, over the process group that exists; a second call does nothing more.

    Nothing is compiled and nothing is printed. Two things stay as this leaves them when the last engine is closed: a
    filter for torch's warnings about deprecated collectives, and LOCAL_RANK, which is set if no launcher has set it.

    Raises:
        EngineError: DeepSpeed is missing, of a version that is not known here, or set to another kind of device.
    """
    assert dist.is_initialized(), "DeepSpeed joins a process group that exists"
    deepspeed = load()
    # torch warns at each collective of ZeRO-3, and whoever changes filters in between has it do so anew each time.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    _set_accelerator(device)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed takes a rank's device from it
    from deepspeed import comm

    if comm.comm.cdb is None:
        # On CPU, TorchBackend would compile a shared-memory all-reduce: half a minute, and an error without a
        # compiler (deepspeed/comm/torch.py, build_shm_op).
        compatible = deepspeed.ops.__compatible_ops__
        usual = compatible.get("deepspeed_shm_comm", False)
        compatible["deepspeed_shm_comm"] = False
        try:
            comm.init_distributed(dist.get_backend(), verbose=False)
        finally:
            compatible["deepspeed_shm_comm"] = usual


def load() -> Any:
    """The package ``deepspeed``.

    Raises:
        EngineError: it is missing, or of a version that is not known here.
    """
    with _quiet():
        try:
            import deepspeed
        except ImportError as error:
            raise EngineError(f"DeepSpeed cannot be imported ({error}): {_INSTALL}") from error
    least, below = KNOWN
    if not least <= _numbers(deepspeed.__version__) < below:
        raise EngineError(
            f"DeepSpeed {deepspeed.__version__}: its internals are known for versions >={_dotted(least)},"
            f"<{_dotted(below)} only; {_INSTALL}"
        )
    return deepspeed


def _numbers(version: str) -> tuple[int, ...]:
    """Those that a version begins with.

    >>> _numbers("0.19.8+1a2b3c4")
    (0, 19, 8)
    """
    begin = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While DeepSpeed is imported it looks for a device and warns on stdout; afterwards what it logs goes to the root
    logger, and so to the log file of a run, instead of to its own handler on stdout (deepspeed/utils/logging.py)."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:
            logger.removeHandler(handler)
        logger.propagate = True


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _set_accelerator(device: torch.device) -> None:
    """Has DeepSpeed use this kind of device; left alone it takes a GPU wherever there is one."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device.type:
        return
    if device.type != "cpu":
        raise EngineError(
            f"DeepSpeed has chosen {get_accelerator().device_name()!r}, and this run {device.type!r}: unset "
            "DS_ACCELERATOR"
        )
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())


def build(model: nn.Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device) -> Any:
    """``deepspeed.initialize`` for a model with memory of its own; :func:`start` comes before it.

    Under ZeRO-3 the model may lie in host memory: parameters move to the device one by one, each to be partitioned
    there before the next (``initialize`` would first move the whole model, runtime/engine.py,
    _configure_distributed_model).

    Args:
        config: complete. It belongs to DeepSpeed from now on, which changes it.
    """
    deepspeed = load()
    if config.get("zero_optimization", {}).get("stage") == 3:
        if config.get("bf16", {}).get("enabled"):
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints how much memory there is
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    undo_first_step(engine)
    return engine


@contextlib.contextmanager
def forwards_forgotten() -> Iterator[None]:
    """A backward, after which ZeRO-3 knows of no module whose forward is running.

    Its hooks keep a stack of them (runtime/zero/parameter_offload.py, FWD_MODULE_STACK), to which a parameter that is
    used outside of its module is ascribed. A recompute that stops early leaves its modules there.
    """
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    depth = len(stack)
    yield
    del stack[depth:]


def close(engine: Any) -> None:
    """Ends an engine of :func:`build`, so that all it holds can be freed.

    ``destroy()`` leaves hooks and parameters that refer to the engine, and are kept by the autograd Functions that
    ZeRO-3 makes for each module; the root module on a global stack (both in runtime/zero/parameter_offload.py);
    ``torch.nn.functional.linear`` replaced (runtime/zero/partition_parameters.py, _enable_mem_efficient_linear); and
    the groups of hpZ, which a later engine must make itself (utils/groups.py).
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches
    from deepspeed.utils import groups

    engine.destroy()
    stack, own = parameter_offload.FWD_MODULE_STACK, set(engine.module.modules())
    stack[:] = [module for module in stack if module not in own]
    if not stack and hasattr(Patches, "linear_bk"):  # no other engine of ZeRO-3 is there
        torch.nn.functional.linear = Patches.linear_bk
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()
    for parameter in engine.module.parameters():
        vars(parameter).pop("_z3_optimizer", None)
