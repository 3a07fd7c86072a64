"""A deep step: one update, allocation by allocation.

The profiler tells when memory was allocated and freed, and in which operation. Whose it was is told by snapshots, at
moments at which it can be known: who owns what, and what a graph keeps for backward. What neither tells is shown as
``unattributed``, so that the kinds sum to what the allocator holds at every moment.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dist_ckpt.blocks import find_blocks
from dist_ckpt.compat import cuda_memory, profiler, zero
from dist_ckpt.compat import torch as torch_private
from dist_ckpt.errors import MeasureError, PlanError
from dist_ckpt.memory.activations import kept_by_graphs
from dist_ckpt.memory.holders import UNKNOWN, holders_of, visible_storages, visible_tensors
from dist_ckpt.memory.ledger import Owner
from dist_ckpt.memory.profile.allocations import Allocation, Sighting, follow, sightings
from dist_ckpt.memory.profile.attribution import MODULE, Attribution
from dist_ckpt.memory.profile.lifetimes import Watch, end_unreported
from dist_ckpt.memory.profile.phases import Stretch, calls, stretch_at, stretches
from dist_ckpt.memory.profile.step_profile import KINDS, Kind, Phase, Span, StepProfile
from dist_ckpt.memory.profile.timeline import Timeline
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.memory.storages import Storages, plain_parts
from dist_ckpt.names import module_names

_MARK = "mark:"
_MAX_HOLDINGS = 100
_MAX_HOLDERS = 1000
"""Tensors of whom it is found out who holds them."""
_MAX_ENDS = 30
"""Of graphs, the same."""


class DeepStep:
    """What :meth:`MemoryMeter.profile` has found, once its step is over."""

    def __init__(self) -> None:
        self._found: tuple[RankMemory, StepProfile] | None = None

    @property
    def memory(self) -> RankMemory:
        """This rank's memory at the boundary, with the step's exact peak, and what is alive then.

        Raises:
            MeasureError: the step is not over, or has failed.
        """
        return self._get()[0]

    @property
    def profile(self) -> StepProfile:
        """All of the step.

        Raises:
            MeasureError: the step is not over, or has failed.
        """
        return self._get()[1]

    def _get(self) -> tuple[RankMemory, StepProfile]:
        if self._found is None:
            raise MeasureError("the profiled step is not over, or has failed: read it after the with block")
        return self._found


class Recording:
    """Records the step that runs while it is entered; see :meth:`MemoryMeter.profile`.

    Args:
        owners: of all lasting memory.
        inputs: what the step is handed, in any nesting: its tensors are nobody's, and are known nonetheless.
        history: on CUDA, where the allocator's own history is written.
    """

    def __init__(
        self, model: nn.Module, owners: Callable[[], Iterable[Owner]], inputs: object, history: Path | None = None
    ) -> None:
        self._model = model
        self._history = history
        self._owners = owners
        self._inputs = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._names = module_names(model)
        self._seen: list[Sighting] = []
        self._marks = 0
        self._thread = threading.get_ident()
        self._elsewhere = False
        """Whether something was called in another thread that is not recorded."""
        self._watch = Watch()
        self._at_end: frozenset[int] | None = None
        """Addresses of all storages at the end of the step; ``None`` where a graph may keep some out of sight."""
        self._after_forwards: list[int] = []
        self._backward_ends: list[int] = []
        self._hooked = WeakIdKeyDictionary()
        """Roots whose backward is watched."""
        self._active: ExitStack | None = None
        self._boundary: int | None = None
        self._memory: RankMemory | None = None
        self._peak: int | None = None
        """Of the step, as the device's allocator counts it."""

    def __enter__(self) -> Recording:
        owners = list(self._owners())
        self._device = next((tensor.device for _, _, tensor in owners), torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._recorder = profiler.Recorder()
        with ExitStack() as stack:
            stack.callback(self._recorder.stop)
            self._before = cuda_memory.allocated_blocks(self._device)
            with self.mark() as mark:
                self._see_owners(mark, owners)
                self._see_given(mark, self._inputs)
                self._inputs = []  # kept alive no longer than by others
                self._see_visible(mark, owners)
            stack.enter_context(zero.work_marked(profiler.span))
            marked = {module: f"{MODULE}{name}" for module, name in self._names.items()}
            stack.enter_context(profiler.calls_marked(marked, self._called))
            stack.enter_context(cuda_memory.history_written(self._device, self._history))
            self._active = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                if self._device.type == "cuda" and self._memory is not None:  # at the boundary the peak has begun anew
                    self._peak = max(self._memory.peak or 0, torch.cuda.max_memory_allocated(self._device))
                with self.mark() as mark:
                    owners = self._look(mark)
                    is_all = self._see_visible(mark, owners, with_holders=True)
                    if is_all:
                        found = {one.address for one in self._seen if one.mark == mark}
                        self._at_end = frozenset(found | visible_storages())
        finally:
            active, self._active = self._active, None
            assert active is not None
            active.close()

    @contextmanager
    def mark(self) -> Iterator[int]:
        """A moment at which something is looked at. How long that takes is no part of the step's time."""
        number, self._marks = self._marks, self._marks + 1
        if not profiler.is_recorded():
            self._elsewhere = self._elsewhere or threading.get_ident() != self._thread
        with profiler.span(f"{_MARK}{number}"):
            yield number

    def after_forward(self, mark: int, roots: Sequence[Tensor], kept: Iterable[Tensor]) -> None:
        """Notes the end of a forward.

        Args:
            roots: what backward starts from.
            kept: what their graph keeps for it.
        """
        self._after_forwards.append(mark)
        self._look(mark)
        for tensor in kept:
            self._see(mark, "activations", "", tensor)
        for root in roots:
            if root not in self._hooked:  # of a pipeline all that are in flight are handed over each time
                self._hooked[root] = True
                root.register_hook(self._backward_begins)

    def boundary(self, memory: RankMemory) -> None:
        """Notes the boundary, at which this was found.

        Raises:
            MeasureError: there was one already.
        """
        if self._boundary is not None:
            raise MeasureError(
                "MemoryMeter.boundary() was called twice in one MemoryMeter.profile(): a with block is one update, so "
                "begin another one for the next"
            )
        with self.mark() as self._boundary:
            self._look(self._boundary)
        self._memory = memory

    def result(self, deep: DeepStep, stage: int | None) -> None:
        """Fills in what was found.

        Raises:
            MeasureError: the step had no boundary, or was not recorded as a whole.
        """
        if self._memory is None or self._boundary is None:
            raise MeasureError(
                "the profiled step had no boundary: call MemoryMeter.boundary(step) in it, after the last backward and "
                "before the optimizer step (train_step(..., measure=True) does)"
            )
        trace = self._recorder.trace(self._device)
        marks = {int(op.name.removeprefix(_MARK)): op for op in trace.ops if op.name.startswith(_MARK)}
        if len(marks) < self._marks:
            raise MeasureError(
                "a part of the profiled step was not recorded: "
                + (
                    "it ran in another thread; enter MemoryMeter.profile() in the thread that runs the step"
                    if self._elsewhere
                    else "another profiler was started or ended in it, and torch has room for one"
                )
            )
        times = {mark: op.start for mark, op in marks.items()} | {0: marks[0].end}  # when the step begins
        last = self._marks - 1
        start, end, boundary = marks[0].end, times[last], times[self._boundary]
        allocations = follow(trace.changes, self._seen, times, self._watch.gone, self._before)
        found = stretches(
            trace.ops,
            start,
            end,
            [times[mark] for mark in self._after_forwards],
            [times[mark] for mark in self._backward_ends],
            boundary,
        )
        turns = [] if self._after_forwards else [one.start for one in found if one.name == "backward"]
        attribution = Attribution(trace, turns)
        still_there = {sighting.address for sighting in self._seen if sighting.mark in (self._boundary, last)}

        def may_be_unreported(one: Allocation) -> bool:
            if one.address not in still_there and attribution.may_end_unseen(one):
                return True
            is_nowhere = self._at_end is not None and not self._before and one.address not in self._at_end
            return is_nowhere and one.start is not None and attribution.kind(one) in ("unattributed", "activations")

        end_unreported(allocations, trace.ops, times, may_be_unreported, self._seen)
        seconds = _Clock([(op.start, op.end) for op in marks.values()], start)
        timeline = Timeline.of([(one, attribution.kind(one)) for one in allocations], start, end)
        peak = timeline.peak(start, end + 1)
        at_peak = timeline.at(peak)
        peak_bytes = sum(at_peak.values())
        phase = stretch_at(found, timeline.times[peak])
        holdings = attribution.holdings([one for one in allocations if one.is_alive(timeline.times[peak])])
        listed = holdings[:_MAX_HOLDINGS]
        curve = timeline.thinned()
        profile = StepProfile(
            rank=self._memory.rank,
            stage=stage,
            device=str(self._device),
            step=self._memory.step,
            duration_s=seconds(end),
            start_bytes=timeline.total_at(start),
            boundary_bytes=timeline.total_at(boundary),
            end_bytes=timeline.total_at(end),
            peak_bytes=peak_bytes,
            peak_s=seconds(timeline.times[peak]),
            phase=phase.name,
            at_peak=at_peak,
            holdings=listed,
            rest_bytes=peak_bytes - sum(holding.nbytes for holding in listed),
            phases=tuple(_phase(one, timeline, seconds) for one in found),
            spans=tuple(
                Span(call.module, call.work, call.micro_batch, seconds(call.start), seconds(call.end))
                for call in calls(trace.ops, attribution, _span_modules(self._model), found)
            ),
            times_s=tuple(map(seconds, curve.times)),
            timeline={kind: tuple(row[place] for row in curve.by_kind) for place, kind in enumerate(KINDS)},
        )
        deep._found = dataclasses.replace(reconciled(self._memory, profile, self._peak), stage=stage), profile

    def _look(self, mark: int) -> list[Owner]:
        """Notes who owns what now."""
        self._watch.look(mark)
        owners = list(self._owners())
        self._see_owners(mark, owners)
        return owners

    def _see_owners(self, mark: int, owners: Iterable[Owner]) -> None:
        for kind, name, tensor in owners:
            self._see(mark, kind, name.removeprefix("."), tensor)

    def _see_given(self, mark: int, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._see(mark, "temporary", "", tensor)

    def _see_visible(self, mark: int, owners: Iterable[Owner], with_holders: bool = False) -> bool:
        """Notes what else Python sees, and what the graphs keep of which it sees an end.

        Returns whether they can keep nothing more.
        """
        known = {sighting.address for sighting in self._seen if sighting.mark == mark}
        found: dict[int, Tensor] = {}
        for tensor in visible_tensors(self._device):
            address = plain_parts(tensor)[0].untyped_storage().data_ptr()
            if address not in known:
                found.setdefault(address, tensor)
        heaviest = sorted(found.values(), key=lambda tensor: tensor.untyped_storage().nbytes(), reverse=True)
        graphs = kept_by_graphs(heaviest, (tensor for _, _, tensor in owners))
        ends = [tensor for tensor in heaviest if tensor.grad_fn is not None][:_MAX_ENDS] if graphs.tensors else []
        asked = [*heaviest[:_MAX_HOLDERS], *ends] if with_holders else []
        holders = holders_of(asked) if asked else []
        whose = {id(tensor.grad): place for place, tensor in enumerate(heaviest) if tensor.is_leaf}
        in_graphs = Storages(graphs.tensors)
        of_graphs = _graph_of(holders[len(asked) - len(ends) :]) if with_holders else ""
        for place, tensor in enumerate(heaviest):
            holder = holders[place] if place < len(asked) - len(ends) else ""
            if holder == UNKNOWN and whose.get(id(tensor), len(holders)) < len(asked) - len(ends):
                holder = f"gradient of {holders[whose[id(tensor)]]}"
            elif holder == UNKNOWN and tensor in in_graphs:
                holder = of_graphs
            self._see(mark, "visible", holder, tensor)
        for tensor in graphs.tensors:
            self._see(mark, "visible", of_graphs, tensor)
        return not graphs.opaque

    def _see(self, mark: int, kind: Kind | Literal["visible"], name: str, tensor: Tensor) -> None:
        if tensor.device != self._device:
            return
        self._seen.extend(sightings(mark, kind, name, tensor))
        if mark == 0 or kind == "activations":
            # There are few of the others; a module's call is no time at which these come and go.
            self._watch.add(mark, tensor, often=mark == 0 and kind not in ("params", "optimizer", "buffers"))

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before each call of a module."""
        is_root = self._names[module] == ""
        if is_root or self._watch.has_lost():
            with self.mark() as mark:
                self._watch.look(mark, before=True)
                if is_root:
                    leaves = tree_leaves((args, kwargs))
                    self._see_given(mark, (x for x in leaves if isinstance(x, Tensor) and x.grad_fn is None))

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._active is None:  # a graph that has outlived its step
            return
        # Called back once more at the end: what FSDP and DDP do there, they have asked for in between.
        torch_private.at_end_of_backward(lambda: torch_private.at_end_of_backward(self._backward_ended))

    def _backward_ended(self) -> None:
        with self.mark() as mark:
            self._look(mark)
        self._backward_ends.append(mark)


def reconciled(memory: RankMemory, profile: StepProfile, peak: int | None) -> RankMemory:
    """What was found at the boundary, with what ``profile`` says of the step.

    What an allocator says of itself stays: its ``live``, and the ``peak`` of the step. What the trace does not explain
    of its peak is ``unattributed``, so that the kinds sum to it. Untested on a device.

    Args:
        peak: the most that the allocator has held in the step; ``None`` where it keeps no count, as on the CPU.
    """
    peak = profile.peak_bytes if peak is None else peak
    unexplained = profile.at_peak["unattributed"] + peak - profile.peak_bytes
    return dataclasses.replace(
        memory,
        live=profile.boundary_bytes if memory.live is None else memory.live,
        peak=peak,
        at_peak={"phase": profile.phase} | dict(profile.at_peak) | {"unattributed": unexplained},
    )


def _graph_of(holders: Iterable[str]) -> str:
    """In words, whose graphs they are whose ends are held so."""
    known = sorted({holder for holder in holders if holder != UNKNOWN})
    return {0: "a graph", 1: f"the graph of {known[0] if known else ''}"}.get(len(known), "several graphs")


class _Clock:
    """Seconds of a moment since the start of the step, without those in which it was looked at.

    Args:
        stopped: (start, end) of those, in nanoseconds.
        start: of the step.
    """

    def __init__(self, stopped: Iterable[tuple[int, int]], start: int) -> None:
        self._stopped = sorted(one for one in stopped if one[0] >= start)
        self._begins = [begin for begin, _ in self._stopped]
        self._sums = [0, *itertools.accumulate(end - begin for begin, end in self._stopped)]
        self._start = start

    def __call__(self, at: int) -> float:
        before = bisect_right(self._begins, at)
        inside = max(self._stopped[before - 1][1] - at, 0) if before else 0
        return (at - self._start - self._sums[before] + inside) / 1e9


def _phase(one: Stretch, timeline: Timeline, seconds: Callable[[int], float]) -> Phase:
    at_peak = timeline.at(timeline.peak(one.start, one.end))
    return Phase(one.name, one.micro_batch, seconds(one.start), seconds(one.end), sum(at_peak.values()), at_peak)


def _span_modules(model: nn.Module) -> tuple[str, ...]:
    """Blocks, what stands beside them on the way from the model to them, and the model itself."""
    names = {name for name in module_names(model).values() if name}
    try:
        blocks = set(find_blocks(model))
    except PlanError:  # none that repeat
        blocks = set()
    around = {"", *(parent for block in blocks for parent in _parents(block))}
    beside = {name for name in names if name.rpartition(".")[0] in around and name not in around}
    return ("", *sorted(beside | blocks))


def _parents(name: str) -> Iterable[str]:
    while name := name.rpartition(".")[0]:
        yield name
