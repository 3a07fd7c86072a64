"""What an optimizer remembers, under the plain model's parameter names, however the model is sharded.

Moments are tensors and go to torch.distributed.checkpoint; the groups' hyper-parameters are plain values and
go to ``state.json``, since DCP would pickle them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrapped_name
from dist_ckpt.states.fit import listed

Groups = list[list[str]]
"""The names of the parameters in each of an optimizer's groups."""

IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""What says how a step is computed and not what it computes; a state neither keeps nor changes it."""

PREFIX = "optimizer.state."
"""What the keys of all moments begin with."""


def group_names(optimizer: Optimizer, stored: Mapping[int, str]) -> Groups:
    """The names under which a state stores the parameters of each group.

    Args:
        stored: the name of each of the model's parameters, by ``id``.

    Raises:
        StateError: the optimizer steps something that is no parameter of the model.
    """
    groups: Groups = []
    for index, group in enumerate(optimizer.param_groups):
        names = [stored.get(id(parameter)) for parameter in group["params"]]
        if None in names:
            raise StateError(
                f"optimizer group {index}: parameter {names.index(None)} is not in the model; make the "
                "optimizer from the wrapped model's parameters (FSDP1 needs use_orig_params=True)"
            )
        groups.append([name for name in names if name is not None])
    return groups


def describe(optimizer: Optimizer, groups: Groups) -> dict[str, Any]:
    """The optimizer's kind and its groups' hyper-parameters, as JSON can hold them.

    Raises:
        StateError: a hyper-parameter that is no number, string, flag, or list of those.
    """
    described = []
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        values = {key: _plain(value, key) for key, value in group.items() if key not in IMPLEMENTATION_KEYS}
        described.append({"parameters": names, "values": values})
    return {"kind": type(optimizer).__name__, "groups": described}


def match_groups(
    optimizer: Optimizer, groups: Groups, described: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    """The saved hyper-parameters for each of the optimizer's groups, in their order.

    Args:
        described: what :func:`describe` returned when the state was saved.
        where: the start of a message: the file.

    Raises:
        StateError: another kind of optimizer, or groups of other parameters.
    """
    kind = type(optimizer).__name__
    if described["kind"] != kind:
        raise StateError(f"{where}: was saved with optimizer {described['kind']}, this run has {kind}")
    saved = list(described["groups"])
    values: list[dict[str, Any]] = []
    for index, names in enumerate(groups):
        found = next((group for group in saved if set(group["parameters"]) == set(names)), None)
        if found is None:
            raise StateError(f"{where}: {_difference(index, names, described['groups'])}")
        saved.remove(found)
        values.append(found["values"])
    if saved:
        raise StateError(f"{where}: has {len(described['groups'])} optimizer groups, this run has {len(groups)}")
    for index, group in enumerate(optimizer.param_groups):
        unlike = (set(group) - IMPLEMENTATION_KEYS) ^ set(values[index])
        if unlike:
            raise StateError(f"{where}: optimizer group {index} has other options: {', '.join(sorted(unlike))}")
    return values


def set_hyper_parameters(optimizer: Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group its saved hyper-parameters, in the type it has now (a tensor ``lr`` stays one)."""
    for group, saved in zip(optimizer.param_groups, values, strict=True):
        for key, value in saved.items():
            now = group[key]
            if isinstance(now, Tensor):  # a new one: AdamW gives all groups the same
                group[key] = torch.full_like(now, value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def moments(model: nn.Module, optimizer: Optimizer, canonical: Mapping[str, str]) -> dict[str, Any]:
    """DCP's optimizer state dict: ``{"state": {its own name: {moment: tensor}}, "param_groups": […]}``.

    A collective under FSDP1. An optimizer without any state gets one of zero moments first.

    Raises:
        StateError: something in the state is no tensor.
    """
    with _without_empty_groups(optimizer):
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
    with _without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, state_dict, options=StateDictOptions(strict=False))


def forget(optimizer: Optimizer) -> None:
    """Makes the optimizer one that has never stepped; drops gradients, which belong to the weights before."""
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """DCP takes at most one group without parameters and mixes up its values, which are set apart from it."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)  # DCP replaces the dicts that it loads
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]


def _stored_name(name: str, canonical: Mapping[str, str]) -> str:
    return canonical.get(unwrapped_name(name), unwrapped_name(name))


def _difference(index: int, names: list[str], saved: Sequence[Mapping[str, Any]]) -> str:
    """Why no saved group has exactly these parameters, for a message."""
    ours = set(names)
    theirs = max((set(group["parameters"]) for group in saved), key=lambda group: len(group & ours), default=set())
    parts = [
        f"{where} {listed(sorted(some))}"
        for where, some in (("only here:", ours - theirs), ("only there:", theirs - ours))
        if some
    ]
    return f"no optimizer group has the parameters of this run's group {index} ({'; '.join(parts)})"


def _plain(value: Any, key: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(one, key) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise StateError(f"optimizer option {key}: a {type(value).__name__} cannot be saved")
