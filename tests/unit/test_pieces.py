"""Ranges of a tensor's elements as boxes, and through DCP's files."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dist_ckpt.compat.dcp_pieces import Piece, PieceLoadPlanner, PieceSavePlanner, boxes_of


def test_boxes_are_the_range_in_order() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 5)))
        whole = torch.arange(math.prod(shape)).view(shape)
        start, end = sorted(draw.choices(range(whole.numel() + 1), k=2))
        boxes = boxes_of(shape, start, end)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = []
        for box in boxes:
            part = whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
            assert part.is_contiguous() and int(part.flatten()[0]) == box.first
            found += part.flatten().tolist()
        assert found == list(range(start, end)), (shape, start, end)


def _saved(folder: Path, **pieces: Piece) -> None:
    dcp.save(dict(pieces), storage_writer=dcp.FileSystemWriter(folder), planner=PieceSavePlanner(), no_dist=True)


def _loaded(folder: Path, **pieces: Piece) -> None:
    planner = PieceLoadPlanner(flatten_state_dict=False)
    dcp.load(dict(pieces), storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (4, 5), (3, 4, 2, 2)])
def test_pieces_are_cut_anew_through_files(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    _saved(tmp_path, x=Piece(whole.shape, whole.flatten()))
    draw = random.Random(1)
    for _ in range(10):
        start, end = sorted(draw.choices(range(whole.numel() + 1), k=2))
        row = torch.zeros(whole.numel() + 3)
        _loaded(tmp_path, x=Piece(whole.shape, row[2 : 2 + end - start], start))
        assert torch.equal(row[2 : 2 + end - start], whole.flatten()[start:end])
        assert row[:2].eq(0).all() and row[2 + end - start :].eq(0).all(), "only what is its own is written to"


def test_a_state_has_32_bits_of_what_an_engine_keeps_in_16(tmp_path: Path) -> None:
    low = torch.randn(3, 5, dtype=torch.bfloat16).t()  # as it lies in memory it is not contiguous
    _saved(tmp_path, x=Piece(low.shape, low))
    full, again = torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.bfloat16)
    dcp.load({"x": full}, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(full, low.float())
    _loaded(tmp_path, x=Piece(again.shape, again))
    assert torch.equal(again, low)
