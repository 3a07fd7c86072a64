"""Internals of DeepSpeed's optimizers (tested with 0.19.8): where they keep fp32 weights and moments.

========================================  ==========================================================================
``torch.optim.Optimizer``                 stage 0, fp32: the model's parameters themselves
``FP16_UnfusedOptimizer``                 stage 0, bf16: an fp32 copy of each parameter
``DeepSpeedZeroOptimizer``                stages 1, 2: a rank's equal share of all of a group's parameters in a row
``BF16_Optimizer``                        stage 1, bf16 with fp32 accumulation: the same
``DeepSpeedZeroOptimizer_Stage3``         stage 3: a rank's equal share of each parameter, those of a group in a row
========================================  ==========================================================================
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.compat.dcp_pieces import Piece
from dist_ckpt.errors import StateError

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Held:
    """Where one trained parameter's weights and moments lie on this rank."""

    master: Tensor
    """What the optimizer steps: the parameter's values alone, in its shape, or in a row with those of others."""
    group: Mapping[str, Any]
    """The optimizer's options for it."""
    shape: torch.Size
    """The parameter's."""
    in_row: slice | None = None
    """Which elements of ``master`` are this parameter's; ``None``: it is there alone, and whole."""
    start: int = 0
    """Which element of the parameter the first one of these is."""

    def part(self, tensor: Tensor) -> Tensor | Piece:
        """This parameter's part of ``master``, or of a moment that has its shape."""
        if self.in_row is None:
            return tensor.detach()
        return Piece(self.shape, tensor.detach()[self.in_row], self.start, stored_dtype(tensor.dtype))

    def has_first(self) -> bool:
        """Whether this rank holds the parameter's first element, as of all ranks that share it only one does."""
        return self.in_row is None or (self.start == 0 and self.in_row.stop > self.in_row.start)


@dataclass(frozen=True)
class Layout:
    """What DeepSpeed's optimizer keeps on this rank."""

    optimizer: Optimizer
    """The one that was passed to ``deepspeed.initialize``; its state is by ``master``."""
    held: Mapping[int, Held]
    """By the ``id`` of each trained parameter, also if this rank has no element of it."""
    publish: Callable[[], None]
    """Makes the model's own copies equal to what was put in place here. A collective."""


def layout_of(engine: Any) -> Layout:
    """Where a DeepSpeed engine keeps the weights and moments of its trained parameters.

    Raises:
        StateError: they lie where they cannot be read.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if engine.has_moe_layers:
        raise StateError("the model has expert-parallel layers, whose training states cannot be saved here")
    if type(optimizer) is DeepSpeedZeroOptimizer:
        placed = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        rows = [list(zip(parameters, offsets, strict=True)) for parameters, offsets in placed]
        return _in_rows(optimizer, rows, optimizer.single_partition_of_fp32_groups)
    if type(optimizer) is BF16_Optimizer:
        return _in_rows(optimizer, map(_one_after_another, optimizer.bf16_groups), optimizer.fp32_groups_flat_partition)
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        return _stage_3(optimizer)
    if type(optimizer) is FP16_UnfusedOptimizer:
        return _copies(optimizer)
    if isinstance(optimizer, Optimizer):
        pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        return Layout(optimizer, {id(p): Held(p, group, p.shape) for group, p in pairs}, lambda: None)
    raise StateError(
        f"{type(optimizer).__name__}: training states of this optimizer of DeepSpeed's cannot be saved; those of ZeRO "
        "stages 0 to 3 can, with a torch optimizer passed to deepspeed.initialize"
    )


def _one_after_another(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, int]]:
    ends = itertools.accumulate(p.numel() for p in parameters)
    return [(p, end - p.numel()) for p, end in zip(parameters, ends, strict=True)]


def _in_rows(optimizer: Any, rows: Iterable[list[tuple[nn.Parameter, int]]], shares: Sequence[Tensor]) -> Layout:
    """Stages 1 and 2.

    Not by ``_hp_mapping``, which takes parameters in the order of their group also if ``round_robin_gradients`` has
    put them in another one (utils/mixed_precision_linkage.py).

    Args:
        rows: of each group of the optimizer, its parameters and at which element each begins.
        shares: of each group, this rank's equal share of the row, in fp32.
    """
    held = {}
    groups = zip(optimizer.optimizer.param_groups, rows, shares, optimizer.real_dp_process_group, strict=True)
    for options, row, share, ranks in groups:
        first = dist.get_rank(ranks) * share.numel()
        for parameter, offset in row:
            start, end = (min(max(at, first), first + share.numel()) for at in (offset, offset + parameter.numel()))
            own = slice(start - first, end - first)
            held[id(parameter)] = Held(share, options, parameter.shape, own, start - offset if start < end else 0)

    def publish() -> None:
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False  # what safe_get_full_optimizer_state looks at
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()

    return Layout(optimizer.optimizer, held, publish)


def _stage_3(optimizer: Any) -> Layout:
    if optimizer.swap_optimizer:
        raise StateError("offload_optimizer.device=nvme: training states cannot be saved from there; use cpu or none")
    if optimizer.offload_optimizer and optimizer.partial_offload < 1.0:
        raise StateError("offload_optimizer.ratio: training states can be saved with 1.0 only")
    held = {}
    for number, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[number]
        options = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]]
        for parameter in parameters:
            _, first, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, count = _share(parameter)
            held[id(parameter)] = Held(flat, options, parameter.ds_shape, slice(first, first + count), start)

    def publish() -> None:
        optimizer.checkpoint_event_prologue()  # partitions what is gathered now
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        for parameter in optimizer.module.parameters():
            parameter.ds_secondary_tensor = None  # hpZ's copies, also of frozen parameters
        optimizer.checkpoint_event_epilogue()  # gathers those that are always whole

    return Layout(optimizer.optimizer, held, publish)


def _copies(optimizer: Any) -> Layout:
    groups = zip(optimizer.optimizer.param_groups, optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    copies = [
        (options, parameter, master)
        for options, parameters, masters in groups
        for parameter, master in zip(parameters, masters, strict=True)
    ]

    @torch.no_grad()
    def publish() -> None:
        for _, parameter, master in copies:
            parameter.copy_(master)

    held = {id(parameter): Held(master, options, parameter.shape) for options, parameter, master in copies}
    return Layout(optimizer.optimizer, held, publish)


def resting(parameter: Any) -> Tensor | Piece:
    """A parameter that is not trained, as it lies on this rank: in stage 3 its share of it, else all."""
    if not hasattr(parameter, "ds_tensor"):
        whole: Tensor = parameter.detach()
        return whole
    start, count = _share(parameter)
    values = parameter.ds_tensor.detach().view(-1)[:count]
    return Piece(parameter.ds_shape, values, start, values.dtype)


def _share(parameter: Any) -> tuple[int, int]:
    """Stage 3: the first element of this rank's share of a parameter, and how many there are without padding."""
    size = parameter.partition_numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    count = max(0, min(size, parameter.ds_numel - start))
    return (start if count else 0), count


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a state has for values that an engine keeps in ``dtype``: those of 16 bits are stored in 32."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def undo_first_step(engine: Any) -> None:
    """Takes back the step with zero gradients that DeepSpeed takes to have moments, in bf16 without ZeRO.

    It decays the fp32 weights, and counts, so that the bias correction of all later steps is that of one step more
    (fp16/unfused_optimizer.py, initialize_optimizer_states).
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if type(engine.optimizer) is FP16_UnfusedOptimizer:
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.optimizer.state.clear()


def computes_in_16_bits(engine: Any) -> bool:
    """Whether DeepSpeed has cast all parameters, those that are not trained included.

    Buffers keep their numbers (runtime/engine.py, _cast_module_mixed_precision, without ``data_types.buffer_dtype``).
    """
    return bool(engine.bfloat16_enabled() or engine.fp16_enabled())


def in_accumulation(engine: Any) -> bool:
    """Whether gradients of an update that has not ended are waiting."""
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


@dataclass(frozen=True)
class Moment:
    """One kind of what the optimizer remembers."""

    dtype: torch.dtype
    alike: bool
    """Whether it has the shape of what is stepped; if not it is one number, such as a count of steps."""

    def blank(self, master: Tensor) -> Tensor:
        """As it is before the first step."""
        shape = master.shape if self.alike else ()
        return torch.zeros(shape, dtype=self.dtype, device=master.device)


def moment_kinds(optimizer: Optimizer, held: Held) -> dict[str, Moment]:
    """What the optimizer's first step with ``held.master`` makes, by name.

    A twin of the optimizer takes that step with two elements, so that neither weights nor hooks come into it.
    """
    probe = torch.zeros(2, dtype=held.master.dtype, device=held.master.device, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    twin = copy.copy(optimizer)  # has no hooks
    twin.state = defaultdict(dict)
    twin.param_groups = [{**held.group, "params": [probe], "lr": 0.0}]
    twin.step()
    return {kind: Moment(value.dtype, value.shape == probe.shape) for kind, value in _tensors(twin.state[probe])}


def _tensors(entries: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for kind, value in entries.items():
        if not isinstance(value, Tensor):
            raise StateError(f"{kind}: is {type(value).__name__}; only optimizers whose state is tensors can be saved")
        yield kind, value


def moments_of(optimizer: Optimizer, master: Tensor) -> dict[str, Tensor]:
    """The optimizer's state for what it steps; empty before its first step.

    Raises:
        StateError: something in it is not a tensor.
    """
    return dict(_tensors(optimizer.state.get(master, {})))
