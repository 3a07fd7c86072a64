"""Assigns a kind and a module to each allocation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt.compat import zero
from dist_ckpt.compat.profiler import Op, TensorInput, Trace
from dist_ckpt.memory.profile.allocations import Allocation, Sighting
from dist_ckpt.memory.profile.step_profile import PRECEDENCE, Holding, Kind, merge_holdings

MODULE = "module:"
"""How the call of a module is marked in a trace, before the module's name."""
ENGINE = "autograd::engine::evaluate_function: "
"""How autograd's engine marks what it does for one node (torch/csrc/autograd/engine.cpp)."""
_ACCUMULATES = "torch::autograd::AccumulateGrad"

_KINDS_OF_OPS: tuple[tuple[str, Kind], ...] = (
    ("FSDP::all_gather_copy_out", "unsharded"),
    ("FSDP::", "communication"),
    ("c10d::", "communication"),
    ("gloo:", "communication"),
    ("nccl:", "communication"),
    ("DistributedDataParallel.", "communication"),
    ("FullyShardedDataParallel._pre_", "unsharded"),
    ("FullyShardedDataParallel._post_backward_hook", "communication"),
    (zero.GATHERS, "unsharded"),
    (zero.REDUCES, "communication"),
)
"""By what the name of an operation begins with: what is allocated in it, first match wins."""
_OF_MODULE = re.compile(r"^FSDP::\w+ \((.+)\)$")
_NAMED_BY_PARAMETER = frozenset[Kind]({"params", "grads", "optimizer", "unsharded", "buffers"})
_NAMED = _NAMED_BY_PARAMETER | {"communication", "unattributed"}
"""Kinds of which a snapshot knows better names than the operation that allocated them."""
_ALLOCATORS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operations that say nothing about what for they allocate."""


@dataclass(frozen=True)
class OpContext:
    """Where in the step an operation runs."""

    module: str | None = None
    """In whose call."""
    node: int = -1
    """The innermost piece of work of autograd's engine."""
    applies: bool = False
    """Whether it is the node itself that works there, and not a hook of it."""
    redone: bool = False
    """Whether it is forward work inside of that."""
    kind: Kind | None = None
    """What is allocated there, where the operation tells."""
    source: str = ""
    """The operation that a person would name."""


class Attribution:
    """Kinds and modules of allocations.

    Args:
        turns: moments at which a backward begins, where nobody has said what graphs keep: what forward has made and is
            alive then counts as kept for it.
    """

    def __init__(self, trace: Trace, turns: Sequence[int] = ()) -> None:
        self._ops = trace.ops
        self._contexts = _contexts(trace.ops)
        self._module_of_node = _modules_of_nodes(trace.ops, self._contexts)
        self._redone_in = _modules_of_redone(trace.ops, self._contexts)
        self._turns = turns
        self._exchanges: dict[int, list[int]] = {}
        """Address → when collectives were given what lay there."""
        for op in trace.ops:
            if op.name.startswith("c10d::"):
                for given in op.inputs:
                    self._exchanges.setdefault(given.address, []).append(op.start)

    def kind(self, one: Allocation) -> Kind:
        """Its kind, the same for its whole life."""
        seen = {sighting.kind for sighting in one.seen}
        if {"params", "unsharded"} <= seen and _is_copy(one):
            return "unsharded"
        for kind in PRECEDENCE:
            if kind in seen:
                return kind
        if one.start is None:
            return "unattributed"
        context = self._context(one.op)
        if context.kind is not None:
            return context.kind
        if one.end is None:
            return "unattributed"
        if context.node < 0 and any(one.start <= turn < one.end for turn in self._turns):
            return "activations"
        if self.is_exchanged(one):  # a gradient that is reduced where it lies
            return "communication"
        return "recompute" if context.redone else "temporary"

    def is_exchanged(self, one: Allocation) -> bool:
        """Whether it was made for a collective, or given to one."""
        made_for_one = self._context(one.op).kind == "communication"
        return made_for_one or any(map(one.is_alive, self._exchanges.get(one.address, ())))

    def may_end_unseen(self, one: Allocation) -> bool:
        """Whether something without an end may be gone nonetheless, freed by a collective's thread."""
        context = self._context(one.op)
        # DDP's buckets, which are given to collectives too, are made before any backward, and stay.
        return context.kind == "communication" or (self.is_exchanged(one) and (context.node >= 0 or bool(one.seen)))

    def module(self, one: Allocation) -> str | None:
        """In whose call it was made; in backward, of the operation whose gradient is computed."""
        return self.module_at(one.op)

    def module_at(self, op: int) -> str | None:
        """In whose call an operation runs; in backward, the call that made autograd's node."""
        context = self._context(op)
        if context.module is not None:
            return context.module
        return self._redone_in.get(op, self._module_of_node.get(context.node))

    def is_redone(self, op: int) -> bool:
        """Whether an operation is forward work within backward."""
        return self._context(op).redone

    def node(self, op: int) -> int:
        """Position of the innermost piece of work of autograd's engine around an operation; -1 for none."""
        return self._context(op).node

    def holdings(self, alive: Sequence[Allocation]) -> tuple[Holding, ...]:
        """What is alive at one moment, put together where it is alike; heaviest first."""
        shapes = _shapes(self._ops, [one for one in alive if not one.seen])
        return merge_holdings(self._holding(one, shapes.get(id(one))) for one in alive)

    def _holding(self, one: Allocation, used_as: TensorInput | None) -> Holding:
        kind, module, source = self.kind(one), self.module(one), self._context(one.op).source
        shape, dtype = (None, None) if used_as is None else (used_as.shape, used_as.dtype)
        seen = _telling(one.seen, kind)
        if seen is not None:
            shape, dtype = seen.shape, seen.dtype
            if seen.name and (kind in _NAMED or not source):
                source = seen.name
                module = seen.name.rpartition(".")[0] if kind in _NAMED_BY_PARAMETER else module
        unnamed = "unknown" if one.start is None else "outside of operations"  # of Python's own: RNG states
        return Holding(kind, module, source or unnamed, shape, dtype, one.nbytes, 1)

    def _context(self, op: int) -> OpContext:
        return self._contexts[op] if op >= 0 else OpContext()


def _is_copy(one: Allocation) -> bool:
    """Whether what a module has for its parameter is always an unsharded copy, which sharding takes away again.

    FSDP puts it in the parameter's place. With one rank a shard may be its own copy, and stays.
    """
    copies = {sighting.mark for sighting in one.seen if sighting.kind == "unsharded"}
    always = all(sighting.mark in copies for sighting in one.seen if sighting.kind == "params")
    return always and not (one.start is None and one.end is None)


def _telling(seen: Iterable[Sighting], kind: Kind) -> Sighting | None:
    """The sighting that says most: one of its kind, and of the whole storage rather than of a part."""
    found = list(seen)
    return max(found, key=lambda s: (s.kind == kind, bool(s.name), _numel(s.shape)), default=None)


def _numel(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _contexts(ops: Sequence[Op]) -> list[OpContext]:
    contexts: list[OpContext] = []
    for position, op in enumerate(ops):
        around = contexts[op.parent] if op.parent >= 0 else OpContext()
        module, node, applies, redone, kind = around.module, around.node, around.applies, around.redone, around.kind
        if op.name.startswith(ENGINE):
            module, node, applies, redone, kind = None, position, False, False, None
        elif op.name.startswith(MODULE):
            module, redone, kind = op.name.removeprefix(MODULE), node >= 0, None
        elif node >= 0 and op.parent == node and ops[node].name == ENGINE + op.name:
            applies = op.name != _ACCUMULATES
        elif applies and kind is None and op.sequence is not None:
            # Backward runs without gradients, and what a node runs with them is a forward that runs again. Hooks, of
            # sharding for example, do as they like: they are around a node, or within one that saves nothing.
            redone = True
        for begin, allocates in _KINDS_OF_OPS:
            if op.name.startswith(begin):
                kind = allocates
                of_module = _OF_MODULE.match(op.name)
                module = of_module[1] if of_module else module
                break
        says_nothing = op.name.removeprefix("aten::") in _ALLOCATORS
        source = around.source if says_nothing and around.source else op.name.removeprefix(ENGINE)
        if op.name.startswith(MODULE):
            source = ""
        contexts.append(OpContext(module, node, applies, redone, kind, source))
    return contexts


def _modules_of_nodes(ops: Sequence[Op], contexts: Sequence[OpContext]) -> dict[int, str | None]:
    """Position of the engine's work on a node → the module in whose call the node was made."""
    made: dict[int, str] = {}
    redone: dict[int, str] = {}
    for op, context in zip(ops, contexts, strict=True):
        if op.sequence is not None and context.module is not None:
            # Operations until the next node have its number: the last of them makes it. A thread of autograd's own,
            # which runs a recompute, counts anew.
            (made if context.node < 0 else redone)[op.sequence] = context.module
    found: dict[int, str | None] = {}
    before: str | None = None
    for position, op in enumerate(ops):
        if not op.name.startswith(ENGINE):
            continue
        if op.sequence is not None:
            before = made.get(op.sequence, redone.get(op.sequence))
        found[position] = before  # a parameter's gradient is added up after the node that computed it
    return found


def _modules_of_redone(ops: Sequence[Op], contexts: Sequence[OpContext]) -> dict[int, str]:
    """Operations of a recompute that run in no module's call → the module that runs again.

    Its forward is run again, not its call, so only the calls of its children are marked: it is the parent of the child
    before the operation, or of the first one after it.
    """
    found: dict[int, str] = {}
    parents: dict[int, str] = {}
    waiting: dict[int, list[int]] = {}
    for position, (op, context) in enumerate(zip(ops, contexts, strict=True)):
        if not context.redone:
            continue
        if context.module is None:
            if context.node in parents:
                found[position] = parents[context.node]
            else:
                waiting.setdefault(context.node, []).append(position)
        elif op.name.startswith(MODULE) and contexts[op.parent].module is None:
            parents[context.node] = context.module.rpartition(".")[0]
            found.update(dict.fromkeys(waiting.pop(context.node, ()), parents[context.node]))
    return found


def _shapes(ops: Sequence[Op], alive: Sequence[Allocation]) -> dict[int, TensorInput]:
    """Allocation's id → the first tensor in it, as large as it is, that an operation was given; else the largest."""
    by_address = {one.address: one for one in alive}
    found: dict[int, TensorInput] = {}
    for op in ops:
        for given in op.inputs:
            one = by_address.get(given.address)
            if one is not None and one.is_alive(op.start):
                known = found.get(id(one))
                if known is None or _numel(known.shape) < _numel(given.shape):
                    found[id(one)] = given
    return found
