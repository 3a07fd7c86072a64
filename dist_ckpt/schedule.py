"""Where a rank stands in a pipeline, and how many micro-batches it holds at a time."""

from __future__ import annotations


def in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at once at the peak of a 1F1B schedule: min(P - s, m).

    Between a forward and its backward lie the stages behind this one (PipeDream-Flush, arXiv:2006.09503, section 2.2).

    Args:
        stage: counted from 0.
        micro_batches: per update.
    """
    return min(stages - stage, micro_batches)


def stage_of(rank: int, world_size: int, stages: int) -> int:
    """The stage of a rank: neighboring ranks hold the same stage of different data, as in DeepSpeed's topology."""
    return rank // (world_size // stages)


def data_rank_of(rank: int, world_size: int, stages: int) -> int:
    """Which of the ``world_size // stages`` pipelines a rank belongs to, each of which reads rows of its own."""
    return rank % (world_size // stages)
