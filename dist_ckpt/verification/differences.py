"""Where a recompute first does otherwise than its forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.verification.digest import Fingerprint, same_shapes
from dist_ckpt.verification.record import Checkpoint, Event, Run

_OTHER_OPERATIONS = "its recompute ran other operations than its forward"


@dataclass(frozen=True)
class Difference:
    """The first thing that a recompute does otherwise."""

    module: str
    """The module whose own code does it."""
    region: str
    kind: Literal["values", "calls", "unfilled"]
    """Other values or shapes, other modules called, or stopped before an operation that fills what it has saved."""
    what: str
    choices: tuple[str, ...] = ()
    """The first operation that chose otherwise, if one did: ``topk``."""


def first_difference(checkpoint: Checkpoint, run: Run) -> Difference | None:
    """The first difference between a checkpoint's forward and one of its recomputes, None if there is none.

    Modules are named as the forward ran them. Whoever is given the same and returns something else is to blame, or
    else the code that calls it with something else.
    """
    for fill in checkpoint.fills:
        if checkpoint.was_compared and run.written[fill.op] < fill.count:
            op = fill.op.removesuffix(".default")
            what = f"its recompute stops at the last tensor that backward needs, before {op} has filled that tensor"
            return Difference(fill.saved.module, checkpoint.region, "unfilled", what)
    position, found = _first_event(checkpoint, run)
    choices = tuple(_other_choice(checkpoint.forward, run))
    # torch compares them in the order in which they were saved.
    saved = next((both for both in checkpoint.differing if position is None or both[0].after <= position), None)
    if saved is not None:
        kind = "values" if same_shapes((saved[0].value,), (saved[1],)) else "shapes"
        what = f"its recompute gives backward tensors of other {kind} than its forward had"
        return Difference(saved[0].module, checkpoint.region, "values", what, choices)
    if found is None:
        return None
    return Difference(found.module, found.region, found.kind, found.what, choices)


def other_count(checkpoint: Checkpoint) -> Difference:
    """The difference of a recompute that saved another number of tensors, after all that was seen of it."""
    run = checkpoint.recomputes[-1] if checkpoint.recomputes else Run(checkpoint)
    events = checkpoint.forward.events
    if len(run.events) < len(events):
        event = events[len(run.events)]
        if event.kind == "enter":
            what = f"its forward called {_relative(event.module, event.caller)}, its recompute did not"
            return Difference(event.caller, checkpoint.region, "calls", what)
    last = events[len(run.events) - 1] if run.events else None
    module = checkpoint.region if last is None else last.module if last.kind == "enter" else last.caller
    return Difference(module, checkpoint.region, "calls", _OTHER_OPERATIONS)


def first_other_call(one: list[Event], other: list[Event]) -> Event | None:
    """The first event of ``other`` that has no equal at its place in ``one``."""
    for before, after in zip(one, other, strict=False):
        if before != after:
            return after
    longer = other if len(other) > len(one) else one
    return longer[min(len(one), len(other))] if len(one) != len(other) else None


def _first_event(checkpoint: Checkpoint, run: Run) -> tuple[int | None, Difference | None]:
    forward, again = checkpoint.forward.events, run.events
    for position, after in enumerate(again):
        if position >= len(forward):
            module = after.caller
            what = f"its recompute called {_relative(after.module, module)}, its forward did not"
            return position, Difference(module, checkpoint.region, "calls", what)
        before, counts = forward[position], (checkpoint.forward.counts[position], run.counts[position])
        module = before.caller if before.kind == "enter" else before.module
        if (before.kind, before.module) != (after.kind, after.module):
            return position, Difference(module, checkpoint.region, "calls", _other_calls(before, after, module))
        if counts[0] != counts[1]:
            return position, Difference(module, checkpoint.region, "calls", _OTHER_OPERATIONS)
        if before.value != after.value:
            kind = "values" if same_shapes(before.value, after.value) else "shapes"
            what = f"its recompute computed other {kind} than its forward"
            if before.kind == "enter":
                what += f", and gave them to {_relative(before.module, module)}"
            return position, Difference(module, checkpoint.region, "values", what)
    return None, None


def _other_calls(before: Event, after: Event, module: str) -> str:
    called, again = (_relative(event.module, module) for event in (before, after))
    if before.kind == "exit":
        return f"its recompute called {again}, its forward did not"
    if after.kind == "exit":
        return f"its forward called {called}, its recompute did not"
    return f"its forward called {called}, its recompute {again}"


def _other_choice(forward: Run, run: Run) -> Iterator[str]:
    """The first operation whose n-th choice differs; what an op rule has kept did not run again and says nothing."""
    again: dict[str, list[Fingerprint]] = {}
    for decision in run.decisions:
        again.setdefault(decision.op, []).append(decision.value)
    counts: dict[str, int] = {}
    for decision in forward.decisions:
        number = counts[decision.op] = counts.get(decision.op, -1) + 1
        values = again.get(decision.op, [])
        if number < len(values) and values[number] != decision.value:
            yield decision.op
            return


def _relative(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.") if module else name
