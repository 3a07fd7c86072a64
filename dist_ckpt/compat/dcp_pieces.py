"""Parts of tensors that are ranges of their elements, for ``torch.distributed.checkpoint`` (tested with torch 2.13).

ZeRO cuts the flattened parameters between ranks wherever the count of elements says, in the midst of a row. DCP knows
boxes: an offset and a size per dimension. Any range of elements is a few boxes, so each rank writes what it holds as it
lies in memory, and reads what it is to hold into place, whatever the shards of the state: nothing is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is rectangular and whose elements lie one after another."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    """Its first element's index among the tensor's, in row-major order."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """A range of a tensor's elements in row-major order: what this rank holds of it; may be none."""

    shape: torch.Size
    """Of the whole tensor."""
    values: Tensor
    """This rank's elements, (n,), or the whole tensor in its own shape. Read in place, so a view of what is used."""
    start: int = 0
    """The index of the first one in the whole tensor."""
    dtype: torch.dtype = torch.float32
    """What a state holds. Other values are cast on their way to it and back, a box at a time."""

    def size(self) -> torch.Size:
        """The whole tensor's shape, by the name that tensors have for it."""
        return self.shape

    def boxes(self) -> list[Box]:
        """What the range is made of, at most ``2 * ndim - 1`` boxes."""
        if not self.shape.numel():  # a state has an entry for it all the same
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)]
        return boxes_of(tuple(self.shape), self.start, self.start + self.values.numel())

    def part(self, offsets: torch.Size) -> Tensor:
        """The box at ``offsets``, a view."""
        box = next(box for box in self.boxes() if box.offsets == tuple(offsets))
        if self.values.shape == self.shape and box.numel == self.values.numel():
            return self.values
        first = box.first - self.start
        return self.values[first : first + box.numel].view(box.sizes)

    # DCP's protocol for objects that write and read themselves (torch/distributed/_checkpointable.py).

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes()]


class PieceSavePlanner(DefaultSavePlanner):
    """DCP's planner, which finds parts of tensors only."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        piece = self.state_dict[index.fqn]
        if isinstance(piece, Piece) and index.offset is not None:
            return piece.part(index.offset).detach().to(piece.dtype)
        return super().lookup_object(index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which finds parts of tensors only; what is read is cast to what is there."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # It looks for tensors on meta, and puts None where something else is (planner_helpers.py, _init_state_dict).
        tensors = {key: value for key, value in state_dict.items() if not isinstance(value, Piece)}
        super().set_up_planner(tensors, metadata, is_coordinator)
        self.state_dict = {**state_dict, **self.state_dict}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece = self.state_dict[index.fqn]
        if isinstance(piece, Piece) and index.offset is not None:
            return piece.part(index.offset)
        return super().lookup_tensor(index)


def boxes_of(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """The boxes that elements ``start`` to ``end`` of a row-major tensor are made of, in order.

    >>> [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), (), 0)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # within one row
        return _inside(shape, last, start, end)
    boxes = _inside(shape, first - 1, start, first * row)
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row))
    return boxes + _inside(shape, last, last * row, end)


def _inside(shape: tuple[int, ...], row: int, start: int, end: int) -> list[Box]:
    """Boxes of a range within one row, as parts of the whole tensor."""
    before = row * math.prod(shape[1:])
    return [
        Box((row, *box.offsets), (1, *box.sizes), box.first + before)
        for box in boxes_of(shape[1:], start - before, end - before)
    ]
