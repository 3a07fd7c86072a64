"""What a training state is taken from and put into: the weights and moments of one training, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MODEL_PREFIX = "model."
"""What the keys of all weights and buffers begin with."""


@dataclass(frozen=True)
class Entry:
    """The shape and dtype under one key."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Inventory:
    """What a training has, by name; nothing of its values."""

    kind: str
    """The optimizer's class."""
    parameters: frozenset[str]
    """Those that the optimizer has."""
    tied: Mapping[str, str]
    """The first name of a tied weight by each of its others."""
    weights: Mapping[str, Entry]
    """By key, buffers included."""


class StateSource(Protocol):
    """A training on this rank. Values are tensors, or parts of some, that DCP writes as they are and reads in place.

    The calls come in the order below, on every rank; those of loading start with a second call of ``settle``.
    """

    staged: bool
    """Whether ranks have different parameters, each a stage of the model's."""

    def settle(self) -> None:
        """Brings the training into the condition that it is saved and loaded in. May be a collective.

        Raises:
            StateError: there is no such condition now; on every rank.
        """
        ...

    def inventory(self) -> Inventory:
        """What this rank knows of. No collective.

        Raises:
            StateError: it holds something that a state cannot.
        """
        ...

    def stepped(self) -> bool:
        """Whether the optimizer has moments on this rank."""
        ...

    def saved_weights(self) -> Mapping[str, Any]:
        """By key, what this rank has to offer of the weights and buffers. May be a collective."""
        ...

    def saved_moments(self) -> Mapping[str, Any]:
        """By key, what this rank has to offer of the moments. May be a collective."""
        ...

    def forget(self) -> Callable[[], None]:
        """Makes the optimizer one that has never stepped and drops gradients; returns what takes the former back."""
        ...

    def weights_to_fill(self) -> Mapping[str, Any]:
        """By key, what this rank needs of the weights and buffers."""
        ...

    def moments_to_fill(self, saved: Collection[str]) -> Mapping[str, Any]:
        """By key, what this rank needs of the moments. May be a collective.

        Args:
            saved: the keys of a state. A parameter that has no moments there never had a gradient.
        """
        ...

    def check_moments(self, where: str) -> None:
        """Looks at the moments once they are filled. No collective.

        Args:
            where: the start of a message: the state.

        Raises:
            StateError: the optimizer cannot go on from them.
        """
        ...

    def adopt(self) -> None:
        """Goes on from what has been filled. May be a collective."""
        ...
