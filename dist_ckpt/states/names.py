"""The names under which a state has a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from dist_ckpt.names import unwrap, unwrapped_name


@dataclass(frozen=True)
class StateNames:
    """The plain names of a model's parameters."""

    stored: Mapping[int, str]
    """By a parameter's ``id``: the first of its names, under which a state has it."""
    canonical: Mapping[str, str]
    """The first name of a tied weight by each of its others."""


def state_names(model: nn.Module) -> StateNames:
    """The names of a model's parameters, however it is wrapped."""
    inner = unwrap(getattr(model, "_orig_mod", model))  # compiled whole, inside or outside of DDP
    stored: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        plain = unwrapped_name(name)
        first = stored.setdefault(id(parameter), plain)
        if first != plain:
            canonical[plain] = first
    return StateNames(stored, canonical)
