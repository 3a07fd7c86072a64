"""One step, observed: what it computed, and what it left behind in each of its phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.compat import zero
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.names import named_buffers, named_modules, named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.verification.digest import Fingerprint, fingerprint
from dist_ckpt.verification.record import Checkpoint, Event
from dist_ckpt.verification.state import Look, Roots, look
from dist_ckpt.verification.streams import Stream, states, streams_of
from dist_ckpt.verification.watch import Watch


@dataclass(frozen=True)
class Change:
    """A piece of state, as it was before a forward, after it, and after the backward that follows."""

    before: Any
    after_forward: Any
    after_backward: Any

    @property
    def in_forward(self) -> bool:
        return bool(self.before != self.after_forward)

    @property
    def in_backward(self) -> bool:
        return bool(self.after_forward != self.after_backward)


def shown(value: Any) -> str:
    """A piece of state for a reader; tensors by type and shape."""
    if value is None:
        return "nothing"
    if isinstance(value, tuple) and len(value) == 3:
        return f"{value[1]} {value[0]}"
    return str(value) if len(str(value)) < 60 else f"{str(value)[:57]}…"


@dataclass(eq=False)
class Observation:
    """What one step was seen to do. Of a model that is sharded, this rank's part."""

    losses: list[Tensor] = field(default_factory=list)
    """One a micro-batch; on stages of a pipeline before the last one, what they hand on."""
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """What else was computed: an engine's mean loss and gradient norm."""
    looks: list[Look] = field(default_factory=list)
    """State at the start, then after each forward and each backward in turn."""
    streams: list[dict[str, Any]] = field(default_factory=list)
    """States of the random streams, likewise."""
    replayed: frozenset[str] = frozenset()
    """Streams that checkpoints put back."""
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Owner of state outside of the modules → the modules that use it."""
    edited: list[tuple[str, str]] = field(default_factory=list)
    """Tensors given to regions that were edited later in the forward: (label, region)."""
    calls: Sequence[Event] = ()
    checkpoints: Sequence[Checkpoint] = ()
    draws: Mapping[str, list[str]] = field(default_factory=dict)
    checkpoint_of: Callable[[Any], Checkpoint | None] = lambda frame: None
    names: Mapping[int, str] = field(default_factory=dict)
    """id of a module → its name."""
    is_compiled: bool = False
    """Whether some modules are compiled, which are not looked into."""
    is_complete: bool = True
    """Whether all of the state was looked at."""
    saved_bytes: int | None = None
    flops: int | None = None
    stage: int | None = None
    """Pipeline stage of the rank."""
    error: Exception | None = None

    def changes(self) -> dict[tuple[str, str], Change]:
        """What changed, and when: the first backward in which it did, or else the first forward."""
        return _changes(self.looks)

    def stream_changes(self) -> dict[str, Change]:
        """Streams that moved, likewise."""
        return _changes(self.streams)


def _changes(series: Sequence[Mapping[Any, Any]]) -> dict[Any, Change]:
    found: dict[Any, Change] = {}
    for before, middle, after in zip(series[0::2], series[1::2], series[2::2], strict=False):
        for key in {**before, **middle, **after}:
            three = before.get(key), middle.get(key), after.get(key)
            change, known = Change(*three), found.get(key)
            if (change.in_backward and not (known and known.in_backward)) or (change.in_forward and known is None):
                found[key] = change
    return found


class Observer:
    """Observes one step of a model, of one or more micro-batches.

    Args:
        model: what runs; its gradients must be gone.
        plan: whose regions are watched, applied or not.
        loss_fn: what computes the loss; its names belong to the state.
        batch: what it gets.
        original: see :class:`~dist_ckpt.verification.state.Roots`.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, loss_fn: Any, batch: Any, original: nn.Module | None = None
    ) -> None:
        self.seen = Observation()
        self._model = model
        self._roots = Roots(model, loss_fn, batch, original)
        self._streams = self._find_streams()
        regions = {name for region in plan.all_regions() for name in region.modules}
        self._watch = Watch(model, regions, self._streams, self._meet_argument)
        self._entered: dict[Any, Any] = {}
        self._inputs: list[tuple[str, str, Tensor, Fingerprint]] = []

    def run(self, step: Callable[[], object], count: bool = True) -> Observation:
        """Runs and observes a step that calls the methods below.

        Args:
            count: whether to count its FLOPs, which compiled code cannot stand.

        Raises:
            MemoryError, torch.OutOfMemoryError: what else the step raises is part of the observation.
        """
        seen = self.seen
        try:
            with self._watch.watching():
                self._look()
                if count and not self._watch.is_compiled:
                    seen.flops = count_flops(step)
                else:
                    step()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            seen.error = error
            if len(seen.looks) % 2:
                self._end_forward()
            self._look()
        seen.calls, seen.checkpoints = self._watch.calls, self._watch.checkpoints
        seen.draws, seen.checkpoint_of = self._watch.draws, self._watch.checkpoint_of
        seen.replayed = frozenset(stream.name for stream in self._streams if stream.is_replayed)
        seen.is_compiled = self._watch.is_compiled
        seen.users = self._roots.users
        seen.names = {id(module): name for name, module in named_modules(self._model)}
        return seen

    def forward_ended(self, root: Tensor, measure: bool = False) -> None:
        """To be called between a forward and its backward.

        Args:
            root: what backward starts from: the loss, or what a pipeline stage hands on.
            measure: whether to read what the graph keeps, of a model that is not sharded.
        """
        self.seen.losses.append(root.detach().clone())
        if measure:
            self.seen.saved_bytes = saved_bytes([root], [*self._model.parameters(), *self._model.buffers()]).total
        self._end_forward()

    def backward_ended(self) -> None:
        """To be called after a backward; once more than needed does no harm."""
        if len(self.seen.looks) % 2 == 0:
            self._look()

    def boundary(self) -> None:
        """To be called after the last backward: keeps this rank's gradients and buffers."""
        self.backward_ended()
        for name, parameter in named_parameters(self._model):
            if parameter.requires_grad:
                grad = zero.local_grad(parameter)
                self.seen.grads[name] = None if grad is None else local_tensor(grad).detach().clone()
        self.seen.buffers = {name: local_tensor(buffer).detach().clone() for name, buffer in named_buffers(self._model)}

    def _end_forward(self) -> None:
        self._watch.forward_has_ended()
        for label, region, tensor, given in self._inputs:
            if fingerprint(tensor) != given:
                self.seen.edited.append((label, region))
        self._inputs.clear()
        self._look()
        # What a region was given had no look at the start: when it was entered is as good.
        self.seen.looks[-2] = {**self._entered, **self.seen.looks[-2]}

    def _look(self) -> None:
        walk = self._roots.walk()
        self.seen.looks.append(look(walk))
        self.seen.is_complete &= walk.is_complete
        self.seen.streams.append(states(self._streams))

    def _meet_argument(self, label: str, region: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._inputs.append((label, region, value, fingerprint(value)))
            return
        arguments, users = self._roots.arguments, self._roots.users
        for owner, known in arguments.items():
            if known is value:  # one cache for all layers
                users[owner] = (*users[owner], region)
                return
        owner = f"{label} of {region}"
        while owner in arguments:
            owner += "'"  # called again
        walk = self._roots.new_walk()
        walk.visit(owner, "", value)
        if walk.containers:
            arguments[owner], users[owner] = value, (region,)
            self._entered |= look(walk)

    def _find_streams(self) -> tuple[Stream, ...]:
        walk = self._roots.walk()
        generators = {f"{owner}.{path}".strip("."): value for (owner, path), value in walk.generators.items()}
        return streams_of({p.device for p in self._model.parameters()}, generators)
