"""What the ranks of a pipeline are given, agreed on by all of them before the first send.

In the middle of a schedule nothing can be refused any more: a stage that raises leaves the others waiting, and receive
buffers have the size of what came first (deepspeedai/DeepSpeed#5729, awslabs/slapo#19).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dist_ckpt.batch import Batch, count_targets
from dist_ckpt.errors import DataError
from dist_ckpt.schedule import data_rank_of, stage_of

_KEYS = {"input_ids", "labels"}


@dataclass(frozen=True)
class Feed:
    """Micro-batches that all ranks can take together."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each micro-batch: (batch, seq), the same on all ranks."""
    tokens: int
    """Targets in all of them, over the pipelines."""


@dataclass(frozen=True)
class _Given:
    """What one rank was given."""

    rank: int
    shapes: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0
    content: int = 0
    problem: str = ""

    @staticmethod
    def of(rank: int, micro_batches: Sequence[Batch]) -> _Given:
        shapes, content = [], 0
        for number, batch in enumerate(micro_batches):
            if problem := _problem(batch):
                return _Given(rank, problem=f"micro-batch {number}: {problem}")
            shapes.append(tuple(batch["input_ids"].shape))
            for name in sorted(_KEYS):
                content = zlib.crc32(_bytes(batch[name]), content)
        return _Given(rank, tuple(shapes), sum(count_targets(batch) for batch in micro_batches), content)


def agree(micro_batches: Sequence[Batch], stages: int, device: torch.device) -> Feed:
    """Compares what the ranks were given; every rank calls it. One small collective.

    Args:
        stages: of each pipeline.

    Raises:
        DataError: on every rank: a batch that a pipeline cannot take, unlike numbers or shapes of micro-batches, or
            stages of one pipeline with other rows.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = _Given.of(rank, micro_batches)
    shape = zlib.crc32(repr(mine.shapes).encode())
    numbers = torch.tensor([shape, mine.content, mine.tokens, bool(mine.problem)], device=device)
    everyone = [torch.empty_like(numbers) for _ in range(world)]
    dist.all_gather(everyone, numbers)
    rows = torch.stack(everyone).tolist()
    contents: list[set[int]] = [set() for _ in range(world // stages)]
    for other, (_, content, _, _) in enumerate(rows):
        contents[data_rank_of(other, world, stages)].add(content)
    alike = len({row[0] for row in rows}) == 1 and all(len(found) == 1 for found in contents)
    if not alike or any(row[3] for row in rows):
        _refuse(mine, stages)
    return Feed(mine.shapes, sum(row[2] for other, row in enumerate(rows) if stage_of(other, world, stages) == 0))


def _refuse(mine: _Given, stages: int) -> None:
    world = dist.get_world_size()
    given: list[_Given] = [mine] * world
    dist.all_gather_object(given, mine)
    if bad := next((one for one in given if one.problem), None):
        raise DataError(f"rank {bad.rank}, {bad.problem}")
    first = given[0]
    if other := next((one for one in given if len(one.shapes) != len(first.shapes)), None):
        raise DataError(
            f"a pipeline needs as many micro-batches on every rank: rank 0 has {len(first.shapes)}, rank {other.rank} "
            f"has {len(other.shapes)}; drop what is left over, or fill it up with rows without targets"
        )
    if other := next((one for one in given if one.shapes != first.shapes), None):
        number = next(i for i, (a, b) in enumerate(zip(first.shapes, other.shapes, strict=True)) if a != b)
        raise DataError(
            f"a pipeline needs micro-batches of one shape (rows, tokens) on all ranks: micro-batch {number} has "
            f"{first.shapes[number]} on rank 0 and {other.shapes[number]} on rank {other.rank}; drop what is left "
            "over, or fill it up with rows without targets"
        )
    by_pipeline = {data_rank_of(one.rank, world, stages): one for one in reversed(given)}
    other = next(one for one in given if one.content != by_pipeline[data_rank_of(one.rank, world, stages)].content)
    one = by_pipeline[data_rank_of(other.rank, world, stages)]
    raise DataError(
        f"ranks {one.rank} and {other.rank} are stages of one pipeline and were given different rows: all of its ranks "
        "read those of the engine's data_rank"
    )


def _problem(batch: Batch) -> str:
    if missing := _KEYS - batch.keys():
        return f"it has no {' and no '.join(sorted(missing))}"
    if unknown := batch.keys() - _KEYS:
        return f"a pipeline passes on input_ids and labels alone, and it has {', '.join(sorted(unknown))} as well"
    shapes = {name: tuple(batch[name].shape) for name in sorted(_KEYS)}
    if len(set(shapes.values())) > 1 or len(shapes["labels"]) != 2 or 0 in shapes["labels"]:
        return f"input_ids and labels must both be (rows, tokens), and are {shapes['input_ids']} and {shapes['labels']}"
    return ""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
