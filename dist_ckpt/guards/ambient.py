"""What a forward runs under and does not own: random generators, autocast, the default device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Ambient:
    """A snapshot right before a forward, for its recompute.

    Args:
        tensors: the forward's inputs, whose devices are looked at besides the CPU.
        rng: whether generators are part of it.
    """

    def __init__(self, tensors: Iterable[Tensor], rng: bool) -> None:
        given = list(tensors)
        self._device_type = next((t.device.type for t in given if t.device.type not in ("cpu", "meta")), "cpu")
        self._rng = torch.get_rng_state() if rng else None
        has_device_rng = rng and self._device_type != "cpu"
        self._devices, self._device_rng = get_device_states(*given) if has_device_rng else ([], [])
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", self._device_type))
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was; afterwards as it is now."""
        with ExitStack() as stack:
            if self._rng is not None:
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._device_type))
                torch.set_rng_state(self._rng)
                if self._devices:
                    set_device_states(self._devices, self._device_rng, device_type=self._device_type)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache_enabled))
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            yield
