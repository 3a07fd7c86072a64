"""Names as the model's author gave them, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dist_ckpt.compat import zero

_WRAPPER_LEVELS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_forward_module")
"""Attribute levels that activation wrappers, FSDP1, torch.compile and Lightning's Fabric put into a name."""
_REPLICATED = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Their ``module``, like that of DeepSpeed's engines, is the one level that a user's own model may have as well."""


def unwrapped_name(name: str) -> str:
    """A module or parameter name without the levels that wrappers add.

    >>> unwrapped_name("layers.0._checkpoint_wrapped_module.attention._orig_mod.wq.weight")
    'layers.0.attention.wq.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_LEVELS)


def is_replicated(module: nn.Module) -> bool:
    """Whether a module holds a whole model as its ``module``: DDP's, DataParallel's or an engine of DeepSpeed's."""
    return isinstance(module, _REPLICATED) or zero.is_engine(module)


def unwrap(module: nn.Module) -> nn.Module:
    """The module that its author wrote, out of all wrappers around it."""
    while True:
        levels = ("module",) if is_replicated(module) else _WRAPPER_LEVELS
        inner = next((module._modules[level] for level in levels if level in module._modules), None)
        if inner is None:
            return module
        module = inner


def is_plain(model: nn.Module) -> bool:
    """Whether a model is as its author made it: neither wrapped nor compiled, and all its parameters are whole."""
    parts = (isinstance(p, DTensor) or zero.is_partitioned(p) for p in model.parameters())
    return unwrap(model) is model and not any(parts)


class InPlaceWrapper:
    """Marks classes that stand in for a module's own, so that :func:`own_class` sees through them."""


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module's author gave it, whatever FSDP2 or a plan have put in front of it."""
    stand_ins = (InPlaceWrapper, FSDPModule)
    return next(c for c in type(module).__mro__ if issubclass(c, nn.Module) and not issubclass(c, stand_ins))


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children of an unwrapped module, themselves unwrapped."""
    for name, child in unwrap(module).named_children():
        yield name, unwrap(child)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` as the plain model has it: no wrappers, neither as levels of a name nor as modules."""
    return _visit("", unwrap(model), set())


def _visit(name: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module not in seen:
        seen.add(module)
        yield name, module
        for child, inside in module._modules.items():
            if inside is not None:
                yield from _visit(_join(name, child), unwrap(inside), seen)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """All modules with the names that the plain model gives them; wrappers have the name of what they wrap."""
    names: dict[nn.Module, str] = {}
    while is_replicated(model):
        names[model] = ""
        model = model.module  # type: ignore[assignment]
    for prefix, module in model.named_modules():
        names.setdefault(module, unwrapped_name(prefix))
    return names


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` under the names that the plain model has."""
    seen: set[nn.Parameter] = set()
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield _join(prefix, name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``model.named_buffers()`` under the names that the plain model has."""
    seen: set[Tensor] = set()
    for prefix, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield _join(prefix, name), buffer


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
