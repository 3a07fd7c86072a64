"""Private parts of FSDP1 and FSDP2 (tested with torch 2.13): where unsharded copies and flat buffers live.

All functions look at one module, so that a caller who walks a model does it once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter


def fsdp1_flat_parameter(module: nn.Module) -> nn.Parameter | None:
    """The flat parameter that a module wrapped by FSDP1 manages."""
    return module._flat_param if isinstance(module, FullyShardedDataParallel) else None


def fsdp1_shard(flat: nn.Parameter) -> Tensor:
    """This rank's padded shard of a flat parameter."""
    shard = getattr(flat, "_local_shard", None)
    return flat.data if shard is None else shard


def fsdp1_shard_grads(flat: nn.Parameter) -> Iterator[Tensor]:
    """The gradients that a flat parameter holds now, sharded and, between reductions, unsharded."""
    for grad in (flat.grad, getattr(flat, "_saved_grad_shard", None)):
        if grad is not None:
            yield grad


def is_flat_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view that FSDP1 has put in a parameter's place; it exchanges these itself."""
    return isinstance(tensor._base, FlatParameter)


def fsdp1_managed(flat: nn.Parameter) -> Iterator[nn.Parameter]:
    """The model's own parameters that a flat one stands for; they are views into it."""
    yield from getattr(flat, "_params", None) or ()


def fsdp1_copies(flat: nn.Parameter) -> Iterator[Tensor]:
    """Unsharded and low-precision copies of a flat parameter; released ones have an empty storage."""
    for attribute in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
        copy = getattr(flat, attribute, None)
        if copy is not None:
            yield copy


def fsdp2_shards(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Of a module that FSDP2 shards each parameter's name, the sharded parameter, and what this rank keeps of it.

    Whatever its modules have now: while it is whole, they have the copy.
    """
    if isinstance(module, FSDPModule):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for param in group.fsdp_params:
                yield param._param_fqn or "", param.sharded_param, param._sharded_param_data


def fsdp2_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What FSDP2 holds for collectives that run, or whose memory a stream may still read, with a name of each."""
    if not isinstance(module, FSDPModule):
        return
    for group in module._get_fsdp_state()._fsdp_param_groups:
        last = group.comm_ctx.all_gather_state
        for result in (group._all_gather_result, None if last is None else last.all_gather_result):
            if result is not None:
                yield "all-gather buffer", result.all_gather_output
        for state in group.comm_ctx.reduce_scatter_states:
            yield "reduce-scatter buffer", state.reduce_scatter_input


def fsdp2_copies(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Unsharded copies that FSDP2 holds for the parameters of a module it shards, with the parameters' names.

    Released ones have an empty storage.
    """
    if not isinstance(module, FSDPModule):
        return
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for param in group.fsdp_params:
            name = param._param_fqn or ""
            for output in getattr(param, "all_gather_outputs", ()):
                yield name, output
            copy = getattr(param, "_unsharded_param", None)
            if copy is not None:
                yield name, copy


def fsdp2_unsharded_grads(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole gradients that wait for a reduction, with the parameters' names: in ``reduce_dtype`` where there is one."""
    if not isinstance(module, FSDPModule):
        return
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            for grad in (getattr(param, "unsharded_accumulated_grad", None), None if whole is None else whole.grad):
                if grad is not None:
                    yield param._param_fqn or "", grad
