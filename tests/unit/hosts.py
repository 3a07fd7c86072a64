"""Watching the host buffers that offloading makes."""

from __future__ import annotations

import weakref

import pytest
from torch import Tensor

from dist_ckpt.wrap.transfer import Synchronous, Waiting


def hosts_made(patch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Weak references to every host buffer that is made from now on."""
    made: list[weakref.ref[Tensor]] = []
    out = Synchronous.out

    def spy(self: Synchronous, source: Tensor) -> Waiting:
        waiting = out(self, source)
        made.append(weakref.ref(waiting.host))
        return waiting

    patch.setattr(Synchronous, "out", spy)
    return made
