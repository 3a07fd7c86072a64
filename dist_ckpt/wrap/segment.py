"""Consecutive blocks that are recomputed as one.

Each block runs where the model's loop calls it, with everything that the loop does in between. The blocks of a segment
only share a checkpoint frame: a block joins that of its predecessor if it is given what the predecessor returned. So
a segment needs no knowledge of the loop, and whatever the loop does differently, the gradients stay right; a block
that finds no frame to join starts one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_leaves

from dist_ckpt.compat import zero
from dist_ckpt.compat.torch import Frame
from dist_ckpt.plan import Region
from dist_ckpt.wrap.span import Forward, Replay, new_frame, run_part

Place = tuple[nn.Module, str]
"""A module's parent, and its name there."""


class Segment:
    """The frames that are open for the segment's next block; shared by its blocks.

    Args:
        places: where each block is registered. What stands there is looked up when it is needed, because FSDP1 puts
            a wrapper in a module's place later.
    """

    def __init__(self, region: Region, places: tuple[Place, ...]) -> None:
        self.region = region
        self.places = places
        # Weakly: a frame lives as long as the graph that it belongs to, and no longer.
        self._open: list[tuple[weakref.ReferenceType[Frame], int]] = []
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": []}

    def run(
        self,
        position: int,
        forward: Forward,
        keeping: AbstractContextManager[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs the forward of one of its blocks, as part of the frame that it joins."""
        frame = self._join(position, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        out = run_part(frame, self.region, forward, keeping, args, kwargs)
        if position + 1 < len(self.places):
            self._open.append((weakref.ref(frame), position))
        return out

    def _join(self, position: int, given: list[Tensor]) -> Frame:
        alive = [(ref, frame, last) for ref, last in self._open if (frame := ref()) is not None]
        chosen: Frame | None = None
        if position > 0:
            for _, frame, last in reversed(alive):
                if last < position and not frame.was_recomputed and _continues(frame, given):
                    chosen = frame
                    break
        self._open = [(ref, last) for ref, frame, last in alive if frame is not chosen and not frame.was_recomputed]
        if chosen is None and any(last == position - 1 for _, _, last in alive):
            self._warn(position)
        return chosen if chosen is not None else new_frame(self.region)

    def _warn(self, position: int) -> None:
        """Says once that the segment is not what was planned."""
        if not self._warned:
            self._warned = True
            before, block = self.region.modules[position - 1 : position + 1]
            warnings.warn(
                f"{block} is not given what {before} returned, as the model changes it in between: they cannot be "
                f"recomputed as one, and {block} keeps its own inputs. Gradients are right; mode 'full' says the same",
                stacklevel=2,
            )


def _continues(frame: Frame, given: list[Tensor]) -> bool:
    """Whether a block is given what the frame's last part returned."""
    replay: Replay = frame.recompute_fn
    return any(handle.matches(tensor) for handle in replay.parts[-1].outputs for tensor in given)


def run_again(place: Place, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a block's forward in the recompute of its segment, with its parameters gathered but without its hooks.

    Outside of segments a block's sharding hooks lie outside its region, and backward has gathered the parameters
    before the recompute starts. Of a segment, that is so for the last block only.
    """
    parent, name = place
    outer = parent._modules.get(name)
    if isinstance(outer, FullyShardedDataParallel):
        # Its forward gathers, calls the module, and releases; the module knows that it is being recomputed.
        return outer.forward(*args, **kwargs)
    if isinstance(module, FSDPModule):
        module.unshard()  # its own backward releases
    zero.gather_own(module)  # under ZeRO-3; modules inside have hooks of their own
    return forward(*args, **kwargs)
