"""Internals of DeepSpeed's engines (tested with 0.19.8), read without importing it: where their bytes lie, what
gradient a rank holds of a parameter, and how ZeRO-3 gathers the parameters of one module.

Attribute names are those of deepspeed/runtime/zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py,
fp16/unfused_optimizer.py and deepspeed/runtime/pipe/engine.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

_PARAMS = (
    "bit16_groups_flat",
    "bf16_groups_flat",
    "fp16_groups_flat",
    "lp_param_buffer",
    "fp16_partitioned_groups_flat",
    "param_groups_fp16_flat_cpu_memory",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "lp_param_contiguous_pin_buffer",
)
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat",
    "fp32_groups",
)
_GRADS = (
    "fp32_groups_gradients_flat",
    "averaged_gradients",
    "all_grad_tensors",
    "grads_in_partition",
    "grad_partitions_flat_buffer",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
)
_RECEIVE_BUFFERS = ("pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer")
_GRADS_OF_PARAMETER = ("grad_accum", "_hp_grad")
MODULE_ATTRIBUTES = (
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_model_granularity",
    "ds_recompute_parameters",
    "pre_bwd_fn",
    "post_bwd_fn",
    "_external_params",
    "_original_parameters",
)
"""What ZeRO-3 keeps at each module (runtime/zero/parameter_offload.py)."""


GATHERS, REDUCES = "ZeRO::gather", "ZeRO::reduce"
"""What :func:`work_marked` calls the two."""
_WORK = (
    ("runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator", "fetch_sub_module", GATHERS),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "reduce_ready_partitions_and_remove_grads", REDUCES),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "independent_gradient_partition_epilogue", REDUCES),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "reduce_ready_partitions_and_remove_grads", REDUCES),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "independent_gradient_partition_epilogue", REDUCES),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "reduce_gradients", REDUCES),
    ("runtime.engine", "DeepSpeedEngine", "buffered_allreduce_fallback", REDUCES),
)


_Method = Callable[..., Any]


@functools.cache
def _engine_classes(kind: type[Any]) -> frozenset[str]:
    return frozenset(c.__name__ for c in kind.__mro__ if c.__module__.startswith("deepspeed."))


def is_engine(model: Any) -> bool:
    """Whether this is what ``deepspeed.initialize`` returns for a model."""
    return "DeepSpeedEngine" in _engine_classes(type(model))  # type: ignore[arg-type]


def is_pipeline(engine: Any) -> bool:
    """Whether an engine runs a pipeline, of which one call is a whole update."""
    return "PipelineEngine" in _engine_classes(type(engine))  # type: ignore[arg-type]


def stage_of(engine: Any) -> int:
    """The engine's ZeRO stage."""
    return int(engine.zero_optimization_stage())


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages a parameter: its ``data`` is empty, or the whole while that is gathered."""
    return hasattr(parameter, "ds_tensor")


def shards(parameter: Any) -> Iterator[Tensor]:
    """What this rank keeps of a parameter under ZeRO-3; with hpZ also of its node's copy."""
    for shard in (parameter.ds_tensor, getattr(parameter, "ds_secondary_tensor", None)):
        if shard is not None:
            yield shard


def gather_own(module: nn.Module) -> None:
    """Gathers the parameters that ZeRO-3 has of a module itself, not of those inside it; nothing elsewhere.

    As its hook before backward does. The one after backward releases them.
    """
    for parameter in module._parameters.values():
        offload = getattr(getattr(parameter, "_z3_optimizer", None), "parameter_offload", None)
        if offload is not None:
            offload.pre_sub_module_backward_function(module)
            return


@contextmanager
def work_marked(span: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """While active, ZeRO gathers parameters and reduces gradients within ``span(GATHERS)`` and ``span(REDUCES)``."""
    usual: list[tuple[type[Any], str, _Method]] = []
    for module, owner, name, label in _WORK:
        kind = getattr(sys.modules.get(f"deepspeed.{module}"), owner, None)
        if kind is not None:
            method = vars(kind)[name]
            usual.append((kind, name, method))
            setattr(kind, name, _within(method, functools.partial(span, label)))
    try:
        yield
    finally:
        for kind, name, method in usual:
            setattr(kind, name, method)


def _within(method: _Method, context: Callable[[], AbstractContextManager[Any]]) -> _Method:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return call


def flat_params(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The flat buffers that parameters are views of."""
    return _held(optimizer, _PARAMS)


def masters(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights that the optimizer keeps next to the model's: in fp32, this rank's part."""
    return _held(optimizer, _MASTERS)


def grads(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Gradients outside of parameters."""
    yield from _held(optimizer, _GRADS)
    for name, master in masters(optimizer):
        if master.grad is not None:
            yield name, master.grad


def grads_of_parameter(parameter: Tensor) -> Iterator[Tensor]:
    """Accumulated gradients that hang at a parameter besides ``grad``."""
    for attribute in _GRADS_OF_PARAMETER:
        held = getattr(parameter, attribute, None)
        if held is not None:
            yield held


def buckets(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Buffers in which gradients are gathered for communication."""
    for dtype, bucket in (getattr(optimizer, "ipg_buckets", None) or {}).items():
        for tensor in _tensors(getattr(bucket, "buffer", None)):
            yield f"bucket of {dtype}", tensor


def pipe_buffers(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """What a pipeline's stage holds to exchange activations and gradients with its neighbors, and of the batch."""
    for kind, slots in engine.pipe_buffers.items():
        for tensor in _tensors(slots):
            yield f"pipe {kind}", tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield f"gradient of pipe {kind}", tensor.grad
    for _, tensor in _held(engine, _RECEIVE_BUFFERS):
        yield "receive buffer", tensor


def states(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Moments, by the name of their kind."""
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        for kind, leaf in state.items():
            if isinstance(leaf, Tensor):
                yield kind, leaf


def _held(optimizer: Any, attributes: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for attribute in attributes:
        for tensor in _tensors(getattr(optimizer, attribute, None)):
            yield attribute, tensor


def _tensors(node: Any) -> Iterator[Tensor]:
    """Those in nested containers, DeepSpeed's own kinds of list among them (``GradPartitionBufferGroup``)."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (list, tuple, dict)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _tensors(child)


def local_grad(parameter: Any) -> Tensor | None:
    """A parameter's gradient between the last backward of an update and its step: under ZeRO this rank's part of it.

    ``None`` where there is none, or where the rank holds no part of it. Its shape is the parameter's, or flat.
    """
    if getattr(parameter, "_hp_grad", None) is not None:  # BF16_Optimizer keeps a low-precision one as well
        held: Tensor = parameter._hp_grad
        return held
    if parameter.grad is not None:
        grad: Tensor = parameter.grad
        return grad
    if is_partitioned(parameter):
        return _grad_under_zero3(parameter)
    fragment = getattr(parameter, "_hp_mapping", None)
    if fragment is None:
        return None
    found = fragment.offload_gradient_dict if fragment.use_offload else fragment.gradient_dict
    held_here = (found or {}).get(fragment.param_group_index)
    return None if held_here is None else held_here[parameter._index_in_param_group]


def _grad_under_zero3(parameter: Any) -> Tensor | None:
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or not parameter.requires_grad:
        return None
    held: Tensor = optimizer.get_local_fp32_grad_for_param(parameter)
    return held


def keeps_no_norm(engine: Any) -> bool:
    """Whether the engine steps the plain optimizer and clips by itself: stage 0 in fp32 (``_take_model_step``)."""
    return engine.optimizer is engine.basic_optimizer


def clip_by(engine: Any, clip: Callable[[], None]) -> None:
    """Has such an engine call ``clip`` before each step, in place of its own clipping, which returns no norm."""
    engine.clip_fp32_gradients = clip


def has_backward_hooks(engine: Any) -> bool:
    """Whether the engine calls what :mod:`dist_ckpt.guards.accumulation` stands in for (runtime/engine.py)."""
    names = ("_backward_prologue", "_backward_epilogue", "inside_no_sync_ctxt", "_is_gradient_accumulation_boundary")
    return all(hasattr(engine, name) for name in names)


def wrap_backward(engine: Any, begins: Callable[[_Method], _Method], ends: Callable[[_Method], _Method]) -> None:
    """Puts wrappers around what an engine does when a backward begins and when it has ended.

    Also where it is the loss that is told to go backward, of which the engine hears by hooks.
    """
    engine._backward_prologue = begins(engine._backward_prologue)
    engine._backward_epilogue = ends(engine._backward_epilogue)


def is_in_no_sync(engine: Any) -> bool:
    """Whether the caller is within ``no_sync()``."""
    return bool(engine.inside_no_sync_ctxt)


def counts_micro_batches(engine: Any) -> bool:
    """Whether boundaries follow a count or what the caller sets; if not, each ``step()`` is one."""
    return bool(engine.managed_gradient_accumulation())


def boundary_is_set(engine: Any) -> bool:
    """Whether the caller says in which backward an update ends, with ``set_gradient_accumulation_boundary``."""
    return engine._is_gradient_accumulation_boundary is not None


def overwrites_gradients(engine: Any) -> bool:
    """Whether a backward that begins now would take the place of the one before it instead of being added to it.

    ZeRO-3 counts the micro-batches of an update in the engine's forward, not in backward, and copies the gradients of
    the first one (zero/stage3.py, clear_backward_seen_flag and partition_grads).
    """
    optimizer = engine.optimizer
    if stage_of(engine) < 3 or engine._running_engine_backward:
        return False
    return optimizer.micro_step_id == 0 and bool(optimizer._epilogue_ran_this_backward)


def defers_reduction(engine: Any) -> bool:
    """Whether a backward that ends now leaves gradients where they are, whatever the count says."""
    if getattr(engine.optimizer, "_coalesce_grad_reduction", False):
        return True
    # In no_sync(), the hooks of ZeRO-1 reduce nonetheless.
    return is_in_no_sync(engine) and stage_of(engine) == 0
