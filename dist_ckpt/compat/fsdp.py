"""Private parts of FSDP1 and FSDP2 (tested with torch 2.13): where unsharded copies and flat buffers live."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from dist_ckpt.names import unwrapped_name


def fsdp2_params(model: nn.Module) -> Iterator[FSDPParam]:
    """Every sharded parameter of a model, each once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def fsdp2_unsharded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The unsharded copies that FSDP2 holds now, by parameter name; released ones have an empty storage."""
    for param in fsdp2_params(model):
        name = unwrapped_name(param._param_fqn or "")
        for output in getattr(param, "all_gather_outputs", ()):
            yield name, output
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None:
            yield name, unsharded
        accumulated = getattr(param, "unsharded_accumulated_grad", None)
        if accumulated is not None:
            yield f"{name}.grad", accumulated


def fsdp1_flat_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every flat parameter, with the name of the module it belongs to."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._flat_param is not None:
            yield unwrapped_name(name), module._flat_param


def fsdp1_shard(flat: nn.Parameter) -> Tensor:
    """This rank's padded shard of a flat parameter."""
    shard = getattr(flat, "_local_shard", None)
    return flat.data if shard is None else shard


def fsdp1_shard_grads(flat: nn.Parameter) -> Iterator[Tensor]:
    """The gradients that a flat parameter holds now, sharded and, between reductions, unsharded."""
    for grad in (flat.grad, getattr(flat, "_saved_grad_shard", None)):
        if grad is not None:
            yield grad


def fsdp1_managed(flat: nn.Parameter) -> Iterator[nn.Parameter]:
    """The model's own parameters that a flat one stands for; they are views into it."""
    yield from getattr(flat, "_params", None) or ()


def fsdp1_unsharded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Unsharded and low-precision copies that FSDP1 holds now; released ones have an empty storage."""
    for name, flat in fsdp1_flat_parameters(model):
        for attribute in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
            copy = getattr(flat, attribute, None)
            if copy is not None:
                yield f"{name}.{attribute}", copy
