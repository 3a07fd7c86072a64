"""What a user can do wrong, as exceptions.

Every class here is a :class:`ValueError`: it names a mistake in what was asked, never a fault of ours (those are
``assert``). Each message says what is wrong, where, and what would be valid; the programs in ``launch/`` print it
once and exit with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DistCkptError(ValueError):
    """A user's mistake; base of all others."""


class PlanError(DistCkptError):
    """A policy or plan that does not fit the model, or that is not proven right for it."""


class ConfigError(DistCkptError):
    """A key or value of the configuration."""


class EngineError(DistCkptError):
    """Something an engine cannot do with this model, plan or number of ranks."""


class MeasureError(DistCkptError):
    """A measurement that cannot be made so: called out of order, or where another one is running."""


class DataError(DistCkptError):
    """Data that cannot be found, read or encoded."""


class ReportError(DistCkptError):
    """A run folder that no report can be made of, or a report that cannot be written."""


class StateError(DistCkptError):
    """A training state that is corrupt, foreign or does not fit the model."""


class StateWriteError(StateError):
    """A training state that could not be written (a full disk): no mistake in what was asked, so a fault."""


def counted(count: int, noun: str) -> str:
    """A number of things, for a text.

    >>> counted(1, "block"), counted(2, "block")
    ('1 block', '2 blocks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def choices(wrong: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest valid one, then all of them.

    >>> choices("selectve", ["full", "selective"])
    "did you mean 'selective'? Valid: full, selective"
    """
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid: {', '.join(names) if names else '(none)'}"
