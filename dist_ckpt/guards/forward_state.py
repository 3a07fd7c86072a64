"""A region's own state as its forward found it: buffers and training flags.

torch replays its random generators in a recompute and nothing else. So a forward that edits a buffer would edit it
twice (BatchNorm's statistics, a load counter), and one that reads a buffer which changed since (a router's bias) would
compute something else and give wrong gradients. Here the recompute works on copies from the time of the forward; the
real buffers are left alone. The buffers are exchanged, not written to, so no version counter moves and autograd's check
for in-place edits stays out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from dist_ckpt.errors import PlanError
from dist_ckpt.names import named_parameters, unwrapped_name

COPY_LIMIT_BYTES = 2**20
"""Larger buffers (rotary tables, caches) are not copied at each forward; that they stay the same is checked instead."""


class ForwardState(AbstractContextManager["ForwardState"]):
    """The context of one region's recompute; made right before the forward that it belongs to.

    Args:
        module: the region's module.
        inner: what else to run the recompute under: an op-level cache's context.
    """

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] | None = None) -> None:
        self.storage: dict[Any, Any] = getattr(inner, "storage", {})
        """The op-level cache, where saved bytes are counted."""
        self._inner = inner
        self._module = module
        self._training = tuple(m.training for m in module.modules())
        # Sharding may put other objects in a parameter's place until backward, which says nothing about edits.
        self._parameters = [
            (owner, name, p, p._version)
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]
        self._copies: list[tuple[nn.Module, str, Tensor]] = []
        self._checked: list[tuple[str, nn.Module, str, Tensor, int]] = []
        for prefix, owner, name, buffer in buffers_of(module):
            if buffer.nbytes <= COPY_LIMIT_BYTES:
                self._copies.append((owner, name, buffer.detach().clone()))
            else:
                full = unwrapped_name(f"{prefix}.{name}".lstrip("."))
                self._checked.append((full, owner, name, buffer, buffer._version))

    def forward_ends(self) -> None:
        """To be called after the forward.

        Raises:
            PlanError: it has edited a buffer that is too large to be copied.
        """
        for full, owner, name, buffer, version in self._checked:
            if owner._buffers[name] is not buffer or buffer._version != version:
                raise PlanError(
                    f"the forward of a recomputed {type(self._module).__name__} edits its buffer {full!r} of "
                    f"{buffer.nbytes / 2**20:.1f} MiB, which is too large to be copied for the recompute: leave this "
                    "module out"
                )

    def __enter__(self) -> ForwardState:
        if self._training != tuple(m.training for m in self._module.modules()):
            raise RuntimeError(
                f"train() or eval() was called on a recomputed {type(self._module).__name__} between its forward and "
                "its backward: the recompute would differ from the forward"
            )
        for owner, name, parameter, version in self._parameters:
            if owner._parameters.get(name) is parameter and parameter._version != version:
                full = next((n for n, p in named_parameters(self._module) if p is parameter), name)
                raise RuntimeError(
                    f"parameter {full!r} of a recomputed {type(self._module).__name__} was edited in place by its "
                    "forward, or between its forward and its backward (an optimizer step?): the recompute would differ "
                    "from the forward"
                )
        for full, owner, name, buffer, version in self._checked:
            if owner._buffers[name] is not buffer or buffer._version != version:
                raise RuntimeError(
                    f"buffer {full!r} of a recomputed {type(self._module).__name__} was changed between its forward "
                    "and its backward: the recompute would differ from the forward"
                )
        self._current = [(owner, name, owner._buffers[name]) for owner, name, _ in self._copies]
        for owner, name, copy in self._copies:
            owner._buffers[name] = copy.clone()  # the recompute may edit it, and may run again
        if self._inner is not None:
            self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._inner is not None:
                self._inner.__exit__(kind, error, trace)
        finally:
            for owner, name, buffer in self._current:
                owner._buffers[name] = buffer
            del self._current


def buffers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(prefix of the owner, owner, name, buffer) of every buffer in a module."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield prefix, owner, name, buffer
