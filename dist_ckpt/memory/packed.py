"""What this package's saved-tensor hooks and op-level caches hold in place of a tensor, as far as counting needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Packed(ABC):
    """Stands for one tensor until it is asked for again."""

    __slots__ = ()

    @property
    @abstractmethod
    def held(self) -> Tensor:
        """What takes the memory: the tensor itself or its copy. Not to be written to."""

    @property
    def in_host_memory(self) -> bool:
        """Whether it is a copy in host memory, so that the device keeps nothing for it."""
        return False

    @property
    def is_weight_copy(self) -> bool:
        """Whether it is a low-precision copy of a parameter that autocast made."""
        return False

    @abstractmethod
    def get(self) -> Tensor:
        """The tensor as it was when it was packed, on its own device.

        Raises:
            RuntimeError: it was edited in place since, and no copy was made.
        """
