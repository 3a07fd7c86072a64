"""What was seen of a step: module calls, and for each checkpoint its forward, its recompute, and what it saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from dist_ckpt.verification.digest import Fingerprint, fingerprint


@dataclass(frozen=True)
class Event:
    """A module was entered or has returned."""

    kind: Literal["enter", "exit"]
    module: str
    caller: str
    """The module whose own code was running around the call."""
    value: tuple[Any, ...]
    """Of the tensors that it was given, or of all that it returned."""


@dataclass(frozen=True)
class Decision:
    """An operation that turns numbers into a choice: which experts, which tokens."""

    module: str
    op: str
    value: Fingerprint


@dataclass(eq=False)
class Run:
    """One forward of a checkpoint, or one recompute."""

    of: Checkpoint
    backward: Any = None
    """Which backward a recompute belongs to; ``None`` in the forward."""
    events: list[Event] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """How many tensors were saved for backward before each event."""
    decisions: list[Decision] = field(default_factory=list)
    written: Counter[str] = field(default_factory=Counter)
    """How often an operation ran that fills one of its arguments."""
    stack: list[str] = field(default_factory=list)
    """Modules that are running, of a recompute."""


@dataclass(frozen=True)
class Fill:
    """An operation wrote into a tensor that its own call had saved before: a recompute that stops there leaves it."""

    saved: Saved
    op: str
    count: int
    """Its index among this operation's calls in the forward."""


@dataclass(eq=False)
class Checkpoint:
    """One checkpoint's forward and its recomputes."""

    region: str
    """The module whose code has made the checkpoint."""
    outer: Checkpoint | None = None
    """The one inside of whose forward, or recompute, it was made."""
    forward: Run = field(init=False)
    recomputes: list[Run] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    """What the forward saved for backward, in order."""
    fills: list[Fill] = field(default_factory=list)
    differing: list[tuple[Saved, Fingerprint]] = field(default_factory=list)
    """What was recomputed with other values, and these."""
    was_compared: bool = False

    def __post_init__(self) -> None:
        self.forward = Run(self)

    def settle(self) -> None:
        """Its forward has ended, or a part of it: what it saved has the values now that backward would have used.

        Not when they are saved, because a few operations fill what they have saved before.
        """
        for saved in self.saved:
            if saved.tensor is not None:
                saved.value, saved.tensor = fingerprint(saved.tensor), None


@dataclass(eq=False)
class Saved:
    """A tensor that a checkpoint's forward saved for backward."""

    of: Checkpoint
    module: str
    """The module whose code was running."""
    after: int
    """How many events of the forward came before."""
    tensor: Tensor | None
    """Until it is settled."""
    value: Fingerprint | None = None


class Compared:
    """What torch compares of a saved tensor and of the same one recomputed; it also compares the values.

    Args:
        usual: what torch would have compared: shape, dtype and device.
        tensor: the tensor.
        saved: its record if it was saved in a forward.
    """

    def __init__(self, usual: Any, tensor: Tensor, saved: Saved | None) -> None:
        self.usual = usual
        self._recomputed: Callable[[], Fingerprint] | None = None
        self._saved = saved
        if saved is None:
            alias = tensor.detach()
            self._recomputed = lambda: fingerprint(alias)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Compared), "made by the same watch"
        if self._saved is not None and other._recomputed is not None:
            checkpoint = self._saved.of
            checkpoint.settle()  # an inner one, whose module was left by the outer one's early stop
            checkpoint.was_compared = True
            value, again = self._saved.value, other._recomputed()
            # A digest of 0: a weight whose gathered copy sharding has freed by now, to gather it again for backward.
            if value is not None and value[2] and again[2] and again != value:
                checkpoint.differing.append((self._saved, again))
        return bool(self.usual == other.usual)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.usual)
