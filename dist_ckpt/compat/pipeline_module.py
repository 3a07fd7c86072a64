"""DeepSpeed's ``PipelineModule`` as people build it themselves, known by what it has and not by an import.

Each rank builds the layers of its own stage alone, so nothing about the whole model can be learned from its children.
The specifications of all layers are on every rank (deepspeed 0.19.8, runtime/pipe/module.py): ``_layer_specs``, cut at
``parts``. Layer i is registered as child ``str(i)``, a tied one in ``tied_modules`` under its key, a function nowhere.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from dist_ckpt.errors import PlanError

_HALLMARKS = ("_layer_specs", "parts", "forward_funcs", "stage_id", "activation_checkpoint_interval")
_CHOSEN = "_precompute_checkpointable_values"
"""What DeepSpeed calls whenever an interval has been chosen: in ``initialize`` and in ``set_checkpoint_interval``."""


def is_pipeline_module(module: nn.Module) -> bool:
    """Whether a module is one stage of a DeepSpeed pipeline."""
    return all(hasattr(module, name) for name in _HALLMARKS)


def stages_of_pipeline(net: nn.Module) -> tuple[tuple[str, ...], ...]:
    """For each stage the names of the modules that it owns, as every rank of them registers its own."""
    names = [_registered_name(index, spec) for index, spec in enumerate(_specs(net))]
    bounds = itertools.pairwise(map(int, net.parts))  # type: ignore[arg-type]
    return tuple(tuple(dict.fromkeys(filter(None, names[start:stop]))) for start, stop in bounds)


def stage_of_pipeline(net: nn.Module) -> int:
    """The stage that this rank holds."""
    return int(net.stage_id)  # type: ignore[arg-type]


def whole_pipeline(net: nn.Module) -> nn.Module:
    """The modules of all stages, without memory and under the names that they have on their own ranks.

    It is there to be looked at: it has no forward of its own. Built from the specifications alone, it is the same on
    every rank.
    """
    specs = list(_specs(net))
    whole = type(type(net).__name__, (nn.Sequential,), {})()
    if any(_is_tied(spec) for spec in specs):
        whole.add_module("tied_modules", nn.Module())  # no ModuleDict: what lies in a list looks like a block
    for index, spec in enumerate(specs):
        name = _registered_name(index, spec)
        parent, _, child = name.rpartition(".")
        if name and child not in (holder := whole.get_submodule(parent))._modules:
            holder.add_module(child, spec if isinstance(spec, nn.Module) else _built(spec))
    return whole


def refuse_a_step(net: nn.Module, remedy: str = "") -> NoReturn:
    """Raises PlanError where a batch would have to run through the whole model."""
    raise PlanError(
        f"this {type(net).__name__} holds one stage of a model, and a step runs through all of them: measure or "
        f"verify the model before it is cut{remedy}"
    )


def called_through_functions(net: nn.Module) -> Iterator[tuple[str, int]]:
    """(name of a tied module, layer) where DeepSpeed calls a function with the module instead of the module."""
    for index, spec in enumerate(_specs(net)):
        if _is_tied(spec) and spec.forward_fn is not None:
            yield _registered_name(index, spec), index


def refuse_interval(net: nn.Module) -> None:
    """Raises PlanError if the module recomputes chunks of layers by itself."""
    interval: Any = net.activation_checkpoint_interval
    if interval > 0:
        raise PlanError(
            f"this {type(net).__name__} recomputes by itself, with activation_checkpoint_interval={interval}: leave "
            "that out of its constructor and of section pipeline of DeepSpeed's JSON (and 'checkpointable_layers' with "
            f"it), or apply no plan. The same as a plan: {{'mode': 'segments', 'k': {interval}}}, or 'full'"
        )


def refuse_later_intervals(net: nn.Module) -> None:
    """Makes every later choice of an interval an error, at once and on every rank."""
    net.__dict__[_CHOSEN] = functools.partial(refuse_interval, net)


def allow_later_intervals(net: nn.Module) -> None:
    """Undoes :func:`refuse_later_intervals`."""
    net.__dict__.pop(_CHOSEN, None)


def _specs(net: nn.Module) -> Iterator[Any]:
    yield from net._layer_specs  # type: ignore[misc]


def _is_tied(spec: Any) -> bool:
    return not isinstance(spec, nn.Module) and hasattr(spec, "build") and hasattr(spec, "key")


def _registered_name(index: int, spec: Any) -> str:
    """Of a layer, in its stage's module; "" for a function."""
    if _is_tied(spec):
        return f"tied_modules.{spec.key}"
    return str(index) if isinstance(spec, nn.Module) or hasattr(spec, "build") else ""


def _built(spec: Any) -> nn.Module:
    """A layer without memory. DeepSpeed's ``partition_method="parameters"`` builds each on every rank as well."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    layer: nn.Module = spec.build()
            except Exception:  # a constructor that reads values, which tensors on meta do not have
                with torch.device("cpu"):
                    layer = spec.build()
    finally:
        random.setstate(state)
    return layer.to("meta")  # also what a constructor puts on a device of its own choice
