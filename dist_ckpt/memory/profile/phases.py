"""When a step did what: its phases, and the calls of its modules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dist_ckpt.compat.profiler import Op
from dist_ckpt.memory.profile.attribution import ENGINE, MODULE, Attribution
from dist_ckpt.memory.profile.step_profile import Work

PhaseName = Literal["forward", "loss", "backward", "optimizer", "other"]


@dataclass(frozen=True)
class Stretch:
    """A part of the step. Times are nanoseconds, as in the trace."""

    name: PhaseName
    micro_batch: int | None
    start: int
    end: int


@dataclass(frozen=True)
class Call:
    """One call of a module, or its share of a backward."""

    module: str
    work: Work
    micro_batch: int | None
    start: int
    end: int


def stretches(
    ops: Sequence[Op],
    start: int,
    end: int,
    after_forwards: Sequence[int],
    backward_ends: Sequence[int],
    boundary: int,
) -> tuple[Stretch, ...]:
    """The phases of a step, without gaps.

    Args:
        start, end: of the step.
        after_forwards: moments at which a forward was over, its loss included.
        backward_ends: moments at which a backward was over, what is called back at its end included; those that nobody
            has noted end with the engine's last work.
        boundary: the moment after the last backward.
    """
    found: list[Stretch] = []
    now, forwards, backwards = start, 0, 0
    for name, begins, ends in _busy(ops, after_forwards, backward_ends, boundary):
        is_handed_on = name == "backward" and backwards == forwards - 1 and now in after_forwards
        if begins > now and not is_handed_on:
            found.append(Stretch("other", None, now, begins))
            now = begins
        if name == "forward":
            found.append(Stretch(name, forwards, now, ends))
            # The loss lasts until it is handed over; one that never is, until its backward.
            loss_ends = next((at for at in after_forwards if at >= ends), None)
            following = _next_begin(ops, ends, boundary)
            now = max(ends, min(loss_ends if loss_ends is not None else following, following))
            if now > ends:
                found.append(Stretch("loss", forwards, ends, now))
            forwards += 1
        else:
            found.append(Stretch(name, backwards, now, max(now, ends)))
            backwards += 1
            now = max(now, ends)
    if boundary > now:
        found.append(Stretch("other", None, now, boundary))
    found.append(Stretch("optimizer", None, max(now, boundary), end))
    return tuple(stretch for stretch in found if stretch.end > stretch.start)


def _outermost(ops: Sequence[Op]) -> Iterator[tuple[Literal["forward", "backward"], int, int]]:
    """Calls of modules and autograd's work, each as far as it is inside no other."""
    inside: list[bool] = []
    for op in ops:
        covered = op.parent >= 0 and inside[op.parent]
        is_forward, is_backward = op.name.startswith(MODULE), op.name.startswith(ENGINE)
        inside.append(covered or is_forward or is_backward)
        if not covered and (is_forward or is_backward):
            yield "forward" if is_forward else "backward", op.start, op.end


def _busy(
    ops: Sequence[Op], after_forwards: Sequence[int], backward_ends: Sequence[int], boundary: int
) -> list[tuple[Literal["forward", "backward"], int, int]]:
    """Runs of forward calls and of autograd's work, parted by each other and by marks between them."""
    runs: list[tuple[Literal["forward", "backward"], int, int]] = []
    marks = {"forward": sorted(after_forwards), "backward": sorted(backward_ends)}
    for name, begins, ends in sorted(_outermost(ops), key=lambda one: one[1]):
        if begins >= boundary:
            break
        last = runs[-1] if runs else None
        if last is not None and last[0] == name and not _between(marks[name], last[1], begins):
            runs[-1] = (name, last[1], max(last[2], ends))
        else:
            runs.append((name, begins, ends))
    closed: list[tuple[Literal["forward", "backward"], int, int]] = []
    for place, (name, begins, ends) in enumerate(runs):
        until = runs[place + 1][1] if place + 1 < len(runs) else boundary
        if name == "backward":
            ends = next((at for at in marks[name] if begins < at <= until), ends)
        closed.append((name, begins, min(ends, until)))
    return closed


def _between(marks: Sequence[int], after: int, until: int) -> bool:
    place = bisect_right(marks, after)
    return place < len(marks) and marks[place] <= until


def _next_begin(ops: Sequence[Op], after: int, boundary: int) -> int:
    return min((begins for _, begins, _ in _outermost(ops) if begins >= after), default=boundary)


def stretch_at(found: Sequence[Stretch], at: int) -> Stretch:
    """The phase of a moment; at the end of the step the last one."""
    return found[max(bisect_right([stretch.start for stretch in found], at) - 1, 0)]


def calls(
    ops: Sequence[Op], attribution: Attribution, wanted: Iterable[str], found: Sequence[Stretch]
) -> tuple[Call, ...]:
    """Calls of the ``wanted`` modules, their recomputes and their shares of backward, in order.

    Args:
        found: the step's phases.
    """
    names = frozenset(wanted)
    made = [
        *_forward_calls(ops, attribution, names, found),
        *_in_backward(ops, attribution, names, found, redone=False),
        *_in_backward(ops, attribution, names, found, redone=True),
    ]
    return tuple(sorted(made, key=lambda call: (call.start, -call.end)))


def _forward_calls(
    ops: Sequence[Op], attribution: Attribution, names: frozenset[str], found: Sequence[Stretch]
) -> Iterator[Call]:
    inside: list[frozenset[str]] = []
    for position, op in enumerate(ops):
        around = inside[op.parent] if op.parent >= 0 else frozenset()
        name = op.name.removeprefix(MODULE)
        is_call = op.name.startswith(MODULE) and name in names and attribution.node(position) < 0
        inside.append(around | {name} if is_call else around)
        if is_call and name not in around:  # a wrapper has the name of what it wraps
            yield Call(name, "forward", stretch_at(found, op.start).micro_batch, op.start, op.end)


def _in_backward(
    ops: Sequence[Op], attribution: Attribution, names: frozenset[str], found: Sequence[Stretch], redone: bool
) -> list[Call]:
    """Runs of work that belongs to the same module; work that belongs to none ends no run."""
    runs: list[Call] = []
    stretch: Stretch | None = None
    for position, op in enumerate(ops):
        if redone != attribution.is_redone(position) or not (redone or op.name.startswith(ENGINE)):
            continue
        name = owner_among(names, attribution.module_at(position))
        if name is None:
            continue
        last, before, stretch = runs[-1] if runs else None, stretch, stretch_at(found, op.start)
        if last is not None and last.module == name and stretch is before:
            runs[-1] = replace(last, end=max(last.end, op.end))
        else:
            work: Work = "recompute" if redone else "backward"
            runs.append(Call(name, work, stretch.micro_batch, op.start, op.end))
    return runs


def owner_among(names: frozenset[str], module: str | None) -> str | None:
    """The innermost of some modules that a module is, or lies in; the model itself, ``""``, is no answer."""
    while module:
        if module in names:
            return module
        module = module.rpartition(".")[0]
    return None
