"""Watching a step while it runs: which module computes what, in forward and in each recompute.

Hooks on every module see what it is given and returns. What checkpoints save is seen where they compare it themselves.
A dispatch mode sees the few operations that a recompute may decide otherwise, or stop before. All of it looks only:
nothing is kept but digests, and no operation of the step becomes another.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.generators import comparable
from dist_ckpt.names import named_modules
from dist_ckpt.verification.digest import describe, fingerprint
from dist_ckpt.verification.reach import PLAIN
from dist_ckpt.verification.record import Checkpoint, Compared, Decision, Event, Fill, Run, Saved
from dist_ckpt.verification.streams import Stream

_DECISIONS = (
    "topk", "argmax", "argmin", "max.dim", "min.dim", "sort", "multinomial", "kthvalue", "nonzero",
    "bucketize.Tensor", "searchsorted.Tensor",
)  # fmt: skip


class Watch:
    """One watched step.

    Args:
        model: its modules are watched, except inside compiled ones.
        regions: names of the modules that a plan recomputes.
        streams: sources of random numbers, to know which module draws from which.
        meet_argument: called with (label, region, value) for what a region is given when its forward begins: tensors,
            and what it could change.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Collection[str],
        streams: Iterable[Stream],
        meet_argument: Callable[[str, str, Any], None],
    ) -> None:
        self.calls: list[Event] = []
        """All module calls of the forward."""
        self.checkpoints: list[Checkpoint] = []
        """In the order of their forwards."""
        self.draws: dict[str, list[str]] = {}
        """Stream → the modules that drew from it inside a region's forward, recomputed or not."""
        self.is_compiled = any(map(_is_compiled, model.modules()))
        self._model = model
        self._meet_argument = meet_argument
        self._regions = frozenset(regions)
        self._streams = {stream.name: stream for stream in streams}
        self._states: dict[str, Any] = {}
        self._by_frame: weakref.WeakKeyDictionary[Any, Checkpoint] = weakref.WeakKeyDictionary()
        self._unsettled: list[Checkpoint] = []
        self._active: list[Run] = []
        self._stack: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what runs inside."""
        self._states = {name: comparable(stream.state()) for name, stream in self._streams.items()}
        with ExitStack() as stack:
            for name, module in _watchable(self._model):
                pre = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                post = module.register_forward_hook(self._leaving(name), prepend=True)  # before sharding takes it away
                stack.callback(pre.remove)
                stack.callback(post.remove)
            stack.enter_context(torch_private.compared_by(self._compared))
            if not self.is_compiled:
                stack.enter_context(_Operations(self))
            yield

    def forward_has_ended(self) -> None:
        """To be called between a forward and its backward."""
        self._active.clear()
        self._stack.clear()
        self._settle([])

    def checkpoint_of(self, frame: Any) -> Checkpoint | None:
        """The record of a checkpoint's frame; None for None, and for one that was not seen."""
        return None if frame is None else self._by_frame.get(frame)

    def decided(self, op: str, out: Any) -> None:
        """An operation has chosen."""
        runs = self._runs()
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not tensor.is_floating_point():
                decision = Decision(self._running(), op, fingerprint(tensor))
                for run in runs:
                    run.decisions.append(decision)

    def filled(self, op: str, tensors: Iterable[Tensor]) -> None:
        """An operation has written into arguments other than the one that it edits in place."""
        runs = self._runs()
        for run in runs:
            run.written[op] += 1
        if runs and runs[-1].backward is None:
            checkpoint = runs[-1].of
            memories = set(map(_memory, tensors))
            for saved in checkpoint.saved:
                if saved.tensor is not None and _memory(saved.tensor) in memories:
                    checkpoint.fills.append(Fill(saved, op, runs[-1].written[op]))

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            runs, caller = self._runs(), self._running()
            self._note(runs, Event("enter", name, caller, describe((*args, *kwargs.values()), only_tensors=True)))
            self._note_draws(caller)
            if name in self._regions and not _in_backward():
                self._note_arguments(name, module, args, kwargs)
            self._names().append(name)

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            runs, names = self._runs(), self._names()
            while names and names.pop() != name:  # what an exception has left is dropped
                pass
            self._note(runs, Event("exit", name, self._running(), describe(out)))
            self._note_draws(name)
            self._settle(runs)

        return hook

    def _settle(self, running: list[Run]) -> None:
        """Digests what the checkpoints have saved whose forward runs no more, before sharding frees it."""
        still = [run.of for run in running]
        for checkpoint in self._unsettled:
            if checkpoint not in still:
                checkpoint.settle()
        self._unsettled = [checkpoint for checkpoint in self._unsettled if checkpoint in still]

    def _compared(self, usual: Callable[[Tensor], Any], tensor: Tensor) -> Compared:
        running = torch_private.running_frame()
        if running is None or running[1] is not None:  # torch compares: what was recomputed
            return Compared(usual(tensor), tensor, None)
        runs = self._runs()
        checkpoint = runs[-1].of
        saved = Saved(checkpoint, self._running(), len(runs[-1].events), tensor.detach())
        checkpoint.saved.append(saved)
        if checkpoint not in self._unsettled:
            self._unsettled.append(checkpoint)
        return Compared(usual(tensor), tensor, saved)

    def _runs(self) -> list[Run]:
        """The forwards and recomputes of checkpoints that are running, outermost first."""
        running = torch_private.running_frame()
        recomputing = torch_private.recomputing_frame() if _in_backward() else None
        if recomputing is not None:  # which may be out of sight of the former: forwards of nested regions run inside
            run = self._recompute_of(*recomputing)
            if not self._active or self._active[0] is not run:
                self._active = [run]
        elif running is None:
            self._active.clear()
        self._active = [run for run in self._active if run.backward is not None or self._goes_on(run)]
        if running is not None and running[1] is None:
            run = self._checkpoint_of(running[0]).forward
            if run in self._active:
                del self._active[self._active.index(run) + 1 :]
            else:
                self._active.append(run)
        return list(self._active)

    def _recompute_of(self, frame: Any, backward: Any) -> Run:
        recomputes = self._checkpoint_of(frame).recomputes
        if not recomputes or recomputes[-1].backward != backward:
            recomputes.append(Run(self._checkpoint_of(frame), backward))
        return recomputes[-1]

    def _checkpoint_of(self, frame: Any) -> Checkpoint:
        checkpoint = self._by_frame.get(frame)
        if checkpoint is None:
            outer = self._active[-1].of if self._active else None
            checkpoint = self._by_frame[frame] = Checkpoint(self._running(), outer)
            self.checkpoints.append(checkpoint)
        return checkpoint

    def _goes_on(self, run: Run) -> bool:
        """Whether a checkpoint's forward has not ended."""
        return any(of is run.of and torch_private.runs_forward(frame) for frame, of in self._by_frame.items())

    def _names(self) -> list[str]:
        is_recompute = bool(self._active) and self._active[0].backward is not None
        return self._active[0].stack if is_recompute else self._stack

    def _running(self) -> str:
        """The module whose own code runs."""
        names = self._names()
        if names:
            return names[-1]
        return self._active[0].of.region if self._active else ""

    def _note(self, runs: list[Run], event: Event) -> None:
        frames = {of: frame for frame, of in self._by_frame.items()} if runs else {}
        for run in runs:
            run.events.append(event)
            run.counts.append(torch_private.frame_saved_count(frames[run.of], run.backward))
        if not _in_backward():
            self.calls.append(event)

    def _note_draws(self, module: str) -> None:
        if _in_backward():
            return
        in_region = not self._regions.isdisjoint((module, *self._stack))
        for name, stream in self._streams.items():
            state = comparable(stream.state())
            if state != self._states[name]:
                self._states[name] = state
                if in_region and module not in self.draws.setdefault(name, []):
                    self.draws[name].append(module)

    def _note_arguments(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = [*inspect.signature(module.forward).parameters, *("" for _ in args)]
        for argument, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if not isinstance(value, (*PLAIN, nn.Module)):
                self._meet_argument(f"argument {argument!r}", name, value)


class _Operations(TorchDispatchMode):
    """Tells a watch about operations that choose, and about those that fill one of their arguments."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._decisions = {op: name for name in _DECISIONS for op in _overloads(name)}
        self._filling: dict[Any, tuple[int, ...]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is one operation here."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._decisions:
            self._watch.decided(self._decisions[func].partition(".")[0], out)
        filled = self._filling.get(func)
        if filled is None:
            filled = self._filling[func] = _filled_arguments(func)
        if filled:
            tensors = [args[n] for n in filled if n < len(args) and isinstance(args[n], Tensor)]
            if tensors:
                self._watch.filled(str(func), tensors)
        return out


def _overloads(name: str) -> Iterator[Any]:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    if found is not None:
        yield from (getattr(found, one) for one in found.overloads() if one == overload or not overload)


def _filled_arguments(func: Any) -> tuple[int, ...]:
    """Positions of what an operation writes into, besides the tensor that an in-place one edits."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple(
        n for n, a in arguments if n and not a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )


def _watchable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside_compiled = {
        id(inside) for module in model.modules() if _is_compiled(module) for inside in [module, *module.modules()]
    }
    for name, module in named_modules(model):
        if id(module) not in inside_compiled and not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, and other tensors without memory of their own
        return id(tensor)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
