"""An optimizer's moments under the plain model's parameter names, however the model is sharded.

Moments are all that a state keeps of an optimizer. Its groups and their options (learning rate, weight decay, …) are
the run's own: they come from the configuration, and a resumed run may ask for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrapped_name

PREFIX = "optimizer.state."
"""What the keys of all moments begin with."""


def describe(optimizer: Optimizer, stored: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's class and the names of its parameters.

    Args:
        stored: the name of each of the model's parameters, by ``id``.

    Raises:
        StateError: the optimizer has a parameter that is not in the model.
    """
    names = []
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in stored:
                raise StateError(
                    f"optimizer group {index}: parameter {number} is not in the model; make the "
                    "optimizer from the wrapped model's parameters (FSDP1 needs use_orig_params=True)"
                )
            names.append(stored[id(parameter)])
    return {"kind": type(optimizer).__name__, "parameters": sorted(names)}


def moments(model: nn.Module, optimizer: Optimizer, canonical: Mapping[str, str]) -> dict[str, Any]:
    """DCP's optimizer state dict: ``{"state": {its own name: {moment: tensor}}, "param_groups": […]}``.

    A collective under FSDP1. An optimizer without any state gets one of zero moments first.

    Raises:
        StateError: something in the state is not a tensor.
    """
    with _own_groups(optimizer):
        state_dict: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for key, value in named_moments(state_dict, canonical).items():
        if not isinstance(value, Tensor):
            raise StateError(f"{key}: is {type(value).__name__}; only optimizers whose state is tensors can be saved")
    return state_dict


def named_moments(state_dict: Mapping[str, Any], canonical: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of :func:`moments` under the keys that a state has them under."""
    return {
        moment_key(_stored_name(name, canonical), kind): value
        for name, entries in state_dict["state"].items()
        for kind, value in entries.items()
    }


def moment_key(name: str, kind: str) -> str:
    """The key of one moment of a parameter, as ``optimizer.state.norm.weight.exp_avg``."""
    return f"{PREFIX}{name}.{kind}"


def drop_unsaved(state_dict: dict[str, Any], canonical: Mapping[str, str], saved: set[str]) -> dict[str, Any]:
    """``state_dict`` without the parameters that have no moments in the state: they never had a gradient."""
    kept = {
        name: entries
        for name, entries in state_dict["state"].items()
        if any(moment_key(_stored_name(name, canonical), kind) in saved for kind in entries)
    }
    return {**state_dict, "state": kept}


def set_moments(model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Gives the optimizer the moments of a filled :func:`moments`. A collective under FSDP1."""
    with _own_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, state_dict, options=StateDictOptions(strict=False))


def forget(optimizer: Optimizer) -> None:
    """Makes the optimizer one that has never stepped; drops gradients, which belong to the weights before."""
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _own_groups(optimizer: Optimizer) -> Iterator[None]:
    """Leaves the groups and their options as they are, whatever DCP loads; hides those without parameters from it.

    DCP takes at most one group without parameters. It replaces the groups' dicts when it loads.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _stored_name(name: str, canonical: Mapping[str, str]) -> str:
    return canonical.get(unwrapped_name(name), unwrapped_name(name))
