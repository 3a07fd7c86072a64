"""Actions that succeed or fail on every rank together, so that no rank waits in a collective for one that has raised.

Without a process group each of these is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from dist_ckpt.errors import StateError

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """Raised on a rank when another one has failed with an error that is not a user's mistake."""


@dataclass(frozen=True)
class _Outcome:
    """The result of one rank's action: a value, or an error message and whether it is the user's mistake."""

    value: Any = None
    error: str | None = None
    mistake: bool = False


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def together(action: Callable[[], T]) -> list[T]:
    """Runs ``action`` on every rank and returns all ranks' results, in rank order. Every rank must call it.

    ``action`` must not hold a collective: a rank that raised before it would leave the others waiting there.

    Raises:
        StateError: on every rank, if any raised a :class:`StateError` or :class:`OSError`: that of the lowest one.
        OtherRankFailed: if a rank raised any other exception, on all ranks except those, which raise their own.
    """
    mine, caught = _attempt(action)
    outcomes = [mine]
    if is_distributed():
        outcomes = [mine] * dist.get_world_size()
        dist.all_gather_object(outcomes, mine)
    return _values(outcomes, caught)


def agreed(action: Callable[[], T]) -> T:
    """Runs ``action`` on every rank and returns this rank's own result. Every rank must call it.

    Raises:
        StateError, OtherRankFailed: as :func:`together`.
    """
    results: list[T] = []
    together(lambda: results.append(action()))
    return results[0]


def on_rank_zero(action: Callable[[], T]) -> T:
    """Runs ``action`` on rank 0 alone and returns its result on every rank. Every rank must call it.

    Raises:
        StateError, OtherRankFailed: as :func:`together`.
    """
    mine, caught = _attempt(action) if rank_and_world_size()[0] == 0 else (_Outcome(), None)
    box = [mine]
    if is_distributed():
        dist.broadcast_object_list(box, src=0)
    result: T = _values(box, caught)[0]
    return result


def _attempt(action: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(value=action()), None
    except (StateError, OSError) as error:
        return _Outcome(error=str(error), mistake=True), error
    except Exception as error:
        return _Outcome(error=f"{type(error).__name__}: {error}"), error


def _values(outcomes: list[_Outcome], caught: Exception | None) -> list[Any]:
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    for _, outcome in failed:
        if outcome.mistake:
            raise StateError(outcome.error) from caught
    if caught is not None:
        raise caught
    for rank, outcome in failed:
        raise OtherRankFailed(f"rank {rank} failed: {outcome.error}")
    return [outcome.value for outcome in outcomes]
