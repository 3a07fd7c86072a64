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
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_ckpt.compat.fsdp import is_flat_view
from dist_ckpt.errors import PlanError
from dist_ckpt.names import unwrapped_name

COPY_LIMIT_BYTES = 2**20
"""Larger buffers (rotary tables, caches) are not copied at each forward; that they stay the same is checked instead."""


class ForwardState(AbstractContextManager["ForwardState"]):
    """The context of one region's recompute; made right before the forward that it belongs to.

    Args:
        module: the region's module.
        name: what the plan calls it.
        inner: what else to run the recompute under: an op-level cache's context.
    """

    def __init__(self, module: nn.Module, name: str, inner: AbstractContextManager[Any] | None = None) -> None:
        self.storage: dict[Any, Any] = getattr(inner, "storage", {})
        """The op-level cache, where saved bytes are counted."""
        self._inner = inner
        self._module = module
        self._name = name
        self._training: list[tuple[nn.Module, bool]] = []
        # What stands in a parameter's place for one call (torch.func.functional_call) does so for the recompute.
        self._stand_ins: list[tuple[nn.Module, str, Tensor]] = []
        self._parameters: list[tuple[str, nn.Module, str, Tensor, int]] = []
        self._copies: list[tuple[nn.Module, str, Tensor]] = []
        self._checked: list[tuple[str, nn.Module, str, Tensor, int]] = []
        for prefix, owner in module.named_modules():
            self._training.append((owner, owner.training))
            for own, parameter in owner._parameters.items():
                if isinstance(parameter, nn.Parameter):
                    self._parameters.append((prefix, owner, own, parameter, parameter._version))
                elif parameter is not None and not is_flat_view(parameter):
                    self._stand_ins.append((owner, own, parameter))
            for own, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                if buffer.nbytes <= COPY_LIMIT_BYTES:
                    self._copies.append((owner, own, buffer.detach().clone()))
                else:
                    self._checked.append((prefix, owner, own, buffer, buffer._version))

    def forward_ends(self) -> None:
        """To be called after the forward.

        Raises:
            PlanError: it has edited a buffer that is too large to be copied.
        """
        for prefix, owner, own, buffer, version in self._checked:
            if owner._buffers[own] is not buffer or buffer._version != version:
                raise PlanError(
                    f"the forward of {self._name} edits its buffer {_full(prefix, own)!r} of "
                    f"{buffer.nbytes / 2**20:.1f} MiB, which is too large to be copied for the recompute: leave it out "
                    "of the plan (ckpt.exclude)"
                )

    def __enter__(self) -> ForwardState:
        if any(owner.training != training for owner, training in self._training):
            self._differs("train() or eval() was called on it")
        for prefix, owner, own, parameter, version in self._parameters:
            current = owner._parameters.get(own, owner.__dict__.get(own))  # where FSDP1 may have put its view
            if current is not parameter and not _is_sharding(parameter) and not _is_sharding(current):
                self._differs(f"its parameter {_full(prefix, own)!r} was replaced")
            if parameter._version != version:
                self._differs(f"its parameter {_full(prefix, own)!r} was edited in place (an optimizer step?)")
        for prefix, owner, own, buffer, version in self._checked:
            if owner._buffers[own] is not buffer or buffer._version != version:
                self._differs(f"its buffer {_full(prefix, own)!r} was changed")
        self._current = [(owner, name, owner._buffers[name]) for owner, name, _ in self._copies]
        for owner, name, copy in self._copies:
            owner._buffers[name] = copy.clone()  # the recompute may edit it, and may run again
        self._replaced = [(owner, own, owner._parameters.get(own)) for owner, own, _ in self._stand_ins]
        for owner, own, stand_in in self._stand_ins:
            owner._parameters[own] = stand_in  # type: ignore[assignment]
        if self._inner is not None:
            self._inner.__enter__()
        return self

    def _differs(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name} is recomputed, and between its forward and its backward {what}: the recompute would differ "
            "from the forward. Do that after the backward"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._inner is not None:
                self._inner.__exit__(kind, error, trace)
        finally:
            for owner, name, buffer in self._current:
                owner._buffers[name] = buffer
            for owner, own, current in self._replaced:
                owner._parameters[own] = current
            del self._current, self._replaced


def _is_sharding(parameter: Tensor | None) -> bool:
    """Whether it is FSDP that exchanges a parameter: it gathers those of modules inside a region when they are called,
    and in backward ahead of that."""
    return isinstance(parameter, DTensor) or (parameter is not None and is_flat_view(parameter))


def _full(prefix: str, own: str) -> str:
    return unwrapped_name(f"{prefix}.{own}".lstrip("."))


def buffers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(prefix of the owner, owner, name, buffer) of every buffer in a module."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield prefix, owner, name, buffer
