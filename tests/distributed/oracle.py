"""An account of a step's memory that owes nothing to the one it checks.

Three sources, none of which the product reads:

- the bytes are those of ``allocations.c``, which counts beneath torch what its allocator takes and gives back;
- which storages there are is seen by a dispatch mode that runs from before the engine is built, and whether they still
  live by weak references;
- what they are for is told by their lives: what a forward has made and is alive at its end is kept for backward, what
  a backward makes through a checkpoint is recomputed, what stands in a module's registry of parameters, and not at
  rest, is an unsharded copy, what a collective touches is communication.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPILER = which("cc") if sys.platform == "linux" else None
"""Without a C compiler, and tables of symbols as Linux has them, nothing can be counted."""

LASTING = ("params", "grads", "optimizer", "buffers", "unsharded", "communication")
"""The first of a storage's roles in this order is what it is for, all its life."""
KINDS = (*LASTING, "activations", "recompute", "unattributed", "temporary")


@cache
def counter() -> Any:
    """The counting library, at work in this process from now on: ``live()``, ``peak()``, ``restart()``; in bytes."""
    assert COMPILER is not None
    source = Path(__file__).with_name("allocations.c")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "allocations.so"
        subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
        found = ctypes.CDLL(str(library))
    found.live.restype = found.peak.restype = ctypes.c_long
    if found.watch():
        raise OSError("libc10.so takes its memory in another way than allocations.c knows")
    return found


@dataclass
class Block:
    """One storage and its life; moments are numbers of operations since the oracle began."""

    reference: StorageWeakRef
    maker: str
    """The operation that made it."""
    recomputed: bool
    history: list[tuple[int, int]] = field(default_factory=list)
    """(moment, bytes from then on)."""
    roles: set[str] = field(default_factory=set)

    def bytes_at(self, moment: int) -> int:
        at = bisect_right(self.history, moment, key=lambda change: change[0])
        return self.history[at - 1][1] if at else 0


@dataclass(frozen=True)
class Composition:
    """What memory is for at one moment: bytes of each kind, that sum to what the allocator holds."""

    phase: str
    maker: str
    """The operation that had just run."""
    total: int
    by_kind: dict[str, int]
    within: int
    """Of what is temporary: what the operation needed for itself, and gave back before it returned."""


@dataclass(frozen=True)
class Account:
    """What the oracle knows of one step."""

    start: int
    """Above what was there before the oracle began, as all its figures."""
    peak: int
    near: tuple[Composition, ...]
    """The moments within a hundredth of the peak, the highest first."""
    phases: dict[str, int]
    """Peaks between the marks: ``forward 0``, ``backward 0``, … and ``optimizer``."""
    unknown: int
    """Most that the allocator held between operations in storages that no operation has returned."""


@dataclass(frozen=True)
class _Moment:
    number: int
    phase: str
    maker: str
    peak: int
    """Since the moment before."""


class Oracle(TorchDispatchMode):
    """Runs from before a model is built; ``begin`` … ``end`` is the step that it accounts for.

    ``forward_ended``, ``backward_ended`` and ``boundary`` are those of an engine's observer.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._counter = counter()
        self.base = self._counter.live()
        self._blocks: dict[int, Block] = {}
        """By the address of the storage, which no other gets while it is referred to weakly."""
        self._living: dict[int, Block] = {}
        self._sums: list[tuple[Block, list[Block]]] = []
        """In a backward: what was added up, and of what."""
        self._fresh: list[Block] = []
        """Made by the forward that is going on."""
        self._number = self._start = self._first = self._known = self._unknown = 0
        self._moments: list[_Moment] = []
        self._registries: list[dict[str, Any]] = []
        self._met: dict[int, weakref.ref[nn.Parameter]] = {}
        """All that has stood in a registry in the step."""
        self._phase = ""
        self._task = -1
        self._ended: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to local tensors comes by itself
        result = func(*args, **(kwargs or {}))
        self._number += 1
        for tensor in _plain(result):
            block = self._block(tensor, str(func))
            if block is not None and func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                self._sums.append((block, [b for b in map(self._known_block, _plain(args)) if b is not None]))
        if not self._phase:
            return result
        if func.namespace == "c10d":
            self._mark(_plain((args, kwargs)), "communication")
        elif func.namespace == "fsdp":  # which copy into what is sent, and out of what has come
            self._mark(_plain((result, (kwargs or {}).get("out"))), "communication")
        for registry in self._registries:
            self._mark(_plain(list(registry.values())), "unsharded")
            self._met |= {id(p): weakref.ref(p) for p in registry.values() if isinstance(p, nn.Parameter)}
        self._look_on_at_the_end_of_backward()
        self._sample(str(func))
        return result

    def begin(self, engine: Any, micro_batches: Any) -> None:
        """At rest, before the step."""
        gc.collect()
        self._engine = engine
        self._moments.clear()
        for module in engine.model.modules():
            lasting = [p for p in module._parameters.values() if not hasattr(p, "ds_tensor")]  # ZeRO-3's may be whole
            self._mark(_plain(lasting), "params")
            self._mark(_plain(list(module._buffers.values())), "buffers")
            self._registries += [module._parameters] if module._parameters else []
        self._find_owners()
        self._mark(_plain(micro_batches), "input")
        self._sample("the step's begin")
        self._fresh.clear()
        self._start = self._number
        self._first = self._counter.live() - self.base
        self._counter.restart()
        self._ended = {"forward": 0, "backward": 0}
        self._phase = "forward 0"

    def forward_ended(self, root: Tensor) -> None:
        self._sample("the forward's end")
        for block in self._fresh:
            if not block.reference.expired():
                block.roles.add("saved")
        self._fresh.clear()
        self._next("forward", "backward")

    def backward_ended(self) -> None:
        self._sample("the backward's end")
        self._find_owners()
        self._fresh.clear()
        self._next("backward", "forward")

    def boundary(self) -> None:
        self._find_owners()
        self._phase = "optimizer"

    def end(self) -> Account:
        """After the step."""
        self._sample("the step's end")
        self._phase = ""
        for block in self._living.values():
            block.roles.add("stays")
        # Autograd adds gradients up in place, but not while a mode looks on (input_buffer.cpp, accumulate).
        for total, parts in reversed(self._sums):
            for part in parts:
                ended = part.history[-1] if part.history and total.history else (0, -1)
                if ended[1] == 0 and ended[0] <= total.history[0][0] + 1:
                    part.roles |= total.roles & {"communication"}
        moments = sorted(self._moments, key=lambda moment: -moment.peak)
        peak = moments[0].peak
        phases: dict[str, int] = {}
        for moment in moments:
            phases.setdefault(moment.phase, moment.peak)
        near = tuple(self._compose(moment) for moment in moments if moment.peak >= 0.99 * peak)
        return Account(self._first, peak, near, phases, self._unknown)

    def _block(self, tensor: Tensor, maker: str) -> Block | None:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            if storage.device.type != "cpu" or not storage.resizable() or storage.is_shared():
                return None  # not from the allocator
            in_backward = torch._C._current_graph_task_id() != -1
            block = Block(StorageWeakRef(storage), maker, in_backward and _is_in_checkpoint())
            self._blocks[storage._cdata] = self._living[storage._cdata] = block
            if not in_backward:
                self._fresh.append(block)
        return block

    def _known_block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _mark(self, tensors: Iterable[Tensor], role: str) -> None:
        for tensor in tensors:
            block = self._block(tensor, "out of sight")
            if block is not None:
                block.roles.add(role)

    def _look_on_at_the_end_of_backward(self) -> None:
        """Gradients are what parameters have when a backward is over, before an engine has done anything with them."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task) and self._phase:
            self._task = task
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._find_owners))  # after what others have asked for

    def _find_owners(self) -> None:
        for role, tensor in _owned(self._engine):
            self._mark(_plain(tensor), role)
        for parameter in (reference() for reference in self._met.values()):  # unsharded ones accumulate too
            self._mark(_plain(parameter.grad if parameter is not None else None), "grads")

    def _next(self, ended: str, begins: str) -> None:
        self._ended[ended] += 1
        self._phase = f"{begins} {self._ended[begins]}"

    def _sample(self, maker: str) -> None:
        for key, block in list(self._living.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(block.reference.cdata)
            nbytes = 0 if storage is None else storage.nbytes()
            before = block.history[-1][1] if block.history else -1
            if nbytes != before:
                block.history.append((self._number, nbytes))
                self._known += nbytes - max(before, 0)
            if storage is None:
                del self._living[key]
        if self._phase:
            self._unknown = max(self._unknown, self._counter.live() - self.base - self._known)
            self._moments.append(_Moment(self._number, self._phase, maker, self._counter.peak() - self.base))
            self._counter.restart()

    def _compose(self, moment: _Moment) -> Composition:
        by_kind = dict.fromkeys(KINDS, 0)
        for block in self._blocks.values():
            if block.history:  # it was there in the step
                by_kind[self._kind(block)] += block.bytes_at(moment.number)
        within = moment.peak - sum(by_kind.values())
        assert within >= 0, f"{-within} bytes after {moment.maker} that the allocator does not hold"
        by_kind["temporary"] += within
        return Composition(moment.phase, moment.maker, moment.peak, by_kind, within)

    def _kind(self, block: Block) -> str:
        for role in LASTING:
            if role in block.roles:
                return role
        if "input" in block.roles:
            return "temporary"
        if "saved" in block.roles:
            return "activations"
        if "stays" in block.roles or block.history[0][0] <= self._start:
            return "unattributed"
        return "recompute" if block.recomputed else "temporary"


def _is_in_checkpoint() -> bool:
    """Whether a backward has come here through a checkpoint, which recomputes."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _plain(tree: Any) -> Iterator[Tensor]:
    """The tensors that have memory on this rank."""
    for leaf in tree_leaves(tree):
        local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        if isinstance(local, Tensor) and not isinstance(local, FakeTensor) and local.layout == torch.strided:
            yield local


_HELD_BY_PARAMETERS = {
    "ds_tensor": "params",
    "_local_shard": "params",
    "grad": "grads",
    "_saved_grad_shard": "grads",
    "_hp_grad": "grads",
    "grad_accum": "grads",
}


def _owned(engine: Any) -> Iterator[tuple[str, Any]]:
    """(role, tensor) of gradients, of the optimizer's state, and of what stands for parameters in its own shape."""
    for module in engine.model.modules():
        for parameter in (*module._parameters.values(), getattr(module, "_flat_param", None)):
            for name, role in _HELD_BY_PARAMETERS.items():
                yield role, getattr(parameter, name, None)
    deepspeed = getattr(engine, "deepspeed", engine.model)
    for tensor in getattr(deepspeed, "pipe_buffers", {}).get("inputs", ()):
        yield "communication", tensor  # received, and copied before it is used
    for optimizer in (engine.optimizer, getattr(deepspeed, "optimizer", None)):
        for path, tensor in _walk(optimizer, "", set()):
            if (found := _role(path.lower())) is not None:
                yield found, tensor


def _walk(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors within an optimizer, with the way to them."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, Tensor):
        if not hasattr(node, "ds_tensor"):  # which may be whole
            yield path, node
        if node.is_leaf and node.grad is not None:
            yield f"{path}.grad", node.grad
    elif isinstance(node, dict):
        for key, child in list(node.items()):
            yield from _walk(child, f"{path}.{key}" if isinstance(key, str) else path, seen)
    elif isinstance(node, (list, tuple)) or type(node).__name__ == "GradPartitionBufferGroup":
        for child in node:
            yield from _walk(child, path, seen)
    elif isinstance(node, Optimizer) or type(node).__module__.startswith("deepspeed.runtime.zero"):
        yield from _walk({k: v for k, v in vars(node).items() if k != "param_groups"}, path, seen)


def _role(path: str) -> str | None:
    if "grad" in path:
        return "grads"
    if "bucket" in path or "ipg" in path:
        return "communication"
    if any(word in path for word in ("bit16", "lp_param", "fp16")):
        return "params"
    return "optimizer" if "fp32" in path or ".state" in path else None
