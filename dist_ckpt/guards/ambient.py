"""What a forward runs under and does not own: random generators, autocast, the default device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from dist_ckpt.errors import PlanError


class Ambient:
    """A snapshot right before a forward, for its recompute.

    Args:
        tensors: the forward's inputs, whose devices are looked at besides the CPU.
        rng: whether generators are set back in the recompute.
    """

    def __init__(self, tensors: Iterable[Tensor], rng: bool) -> None:
        given = list(tensors)
        self._replays = rng
        self._device_type = next((t.device.type for t in given if t.device.type not in ("cpu", "meta")), "cpu")
        self._given = given if self._device_type != "cpu" else ()
        self._rng, self._devices, self._device_rng = self._generators()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", self._device_type))
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()

    def _generators(self) -> tuple[Tensor, Sequence[int], Sequence[Tensor]]:
        return torch.get_rng_state(), *(get_device_states(*self._given) if self._given else ((), ()))

    def refuse_draws(self, name: str) -> None:
        """To be called after the forward.

        Raises:
            PlanError: it drew random numbers that nothing will replay.
        """
        if self._replays:
            return
        rng, _, device_rng = self._generators()
        if not all(map(torch.equal, (self._rng, *self._device_rng), (rng, *device_rng))):
            raise PlanError(
                f"{name} draws random numbers (dropout?), and with ckpt.preserve_rng_state=false its recompute would "
                "draw others: gradients would be wrong. Leave the option on"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything as it was; afterwards as it is now."""
        with ExitStack() as stack:
            if self._replays:
                stack.enter_context(torch.random.fork_rng(list(self._devices), device_type=self._device_type))
                torch.set_rng_state(self._rng)
                if self._device_rng:
                    set_device_states(self._devices, self._device_rng, device_type=self._device_type)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache_enabled))
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            yield
