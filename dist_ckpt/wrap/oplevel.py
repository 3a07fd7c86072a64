"""Op-level regions: which results of a forward are kept while the rest is recomputed.

The two contexts here do for eager code what torch's selective checkpointing does, with what policies need besides:
rules by name, by module and by count; results that the recompute never reaches are not kept; a rule that matches
nothing is an error; edits in place and further backwards are right. Operations that no rule names pass straight
through, so that they cost one dictionary look-up instead of a cache entry each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from dist_ckpt.compat import dispatch as torch_private
from dist_ckpt.compat.torch import current_frame, frame_packed_count, frame_stops_early, sequence_number
from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Region, SaveRule
from dist_ckpt.wrap.kept import GeneratorState, Kept, Results, given
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.rules import Matches, Rules

RULES = "_dist_ckpt_op_rules"
"""Where a module holds its region's :class:`Rules`."""


class Contexts(NamedTuple):
    """What a region's forward and its recompute run under."""

    forward: Keeping
    recompute: Replaying


def eager_contexts(region: Region, module: nn.Module | None = None, offloader: Offloader | None = None) -> Contexts:
    """The contexts of one forward of a region. No count is shared by layers, micro-batches or a later forward.

    Args:
        module: the region's, which also remembers what need not be done in each forward.
        offloader: where results go that a rule offloads; without one, an offloader of this forward's own.

    Raises:
        PlanError: a rule names modules of a region that has none.
    """
    if module is None and any(rule.within != "*" for rule in region.save.ops):
        raise PlanError(f"op rules of {' + '.join(region.modules)}: a function has no modules for `within` to name")
    rules = Rules(region) if module is None else _rules_of(module, region)
    keeping = Keeping(rules, offloader)
    return Contexts(keeping, Replaying(rules, keeping.storage))


def _rules_of(module: nn.Module, region: Region) -> Rules:
    rules: Rules | None = module.__dict__.get(RULES)
    if rules is None or rules.region is not region:
        rules = module.__dict__[RULES] = Rules(region, module)
    return rules


def compiled_contexts(region: Region, module: nn.Module | None = None) -> Callable[[], Any]:
    """The region's ``context_fn`` under ``torch.compile``, where the compiler drops what backward does not need."""
    contexts = _shared_contexts(region.save)
    if module is not None:
        contexts.args[0].rules.modules.add(module)
    return contexts


@functools.cache
def _shared_contexts(save: SaveRule) -> functools.partial[Any]:
    """One for all blocks with equal rules: dynamo compiles anew for each object, and gives up after eight.

    It traces one block and takes the code for others that it finds to be alike, so the modules of all are known here.
    """
    return functools.partial(_compiled_contexts, _Traced(Rules(Region(("a compiled block",), save))))


class _Traced:
    """Carries rules into code that is being compiled: dynamo takes apart what a partial holds, but not this."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules


def _compiled_contexts(traced: _Traced) -> Any:
    """Runs while the region is traced, so that a rule that matches nothing stops the compilation."""
    rules = traced.rules
    if any(rule.action == "offload" for rule in rules.region.save.ops):
        raise PlanError(
            f"op rules of {' + '.join(rules.region.modules)} offload results, which compiled code does not do: do not "
            "compile it, or keep those results on the device"
        )
    matches, called = Matches(rules, torch_private.traced_module), set[Any]()

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        named = rules.table.get(op)
        if named is None or not named.means(op, args, kwargs):
            rules.arguments_written(op)
            return CheckpointPolicy.PREFER_RECOMPUTE
        called.add(op)
        rule = matches.rule_for(named.numbers, op, args, kwargs)
        if rule is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if rule.action == "save" else CheckpointPolicy.MUST_RECOMPUTE

    return torch_private.checked_contexts(decide, lambda: matches.check(called))


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside the region is one operation of its own here, as in torch's own modes."""
        return True


class Keeping(_Mode):
    """Runs a region's forward and files the results that its rules keep."""

    def __init__(self, rules: Rules, offloader: Offloader | None = None) -> None:
        super().__init__()
        self.storage = Results()
        self._rules = rules
        self._matches = Matches(rules, torch_private.calling_module)
        self._offloader = offloader

    def __enter__(self) -> Keeping:
        self._frame, self._first_node = current_frame(), sequence_number()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        frame = self._frame
        del self._frame
        super().__exit__(*exception)
        self.storage.nodes = range(self._first_node, sequence_number())
        if exception[0] is None:
            if not self._rules.were_met:
                self._matches.check(self.storage)
            if frame_stops_early(frame):
                self.storage.drop_unreached(frame_packed_count(frame))
            self.storage.settle(frame, lambda: self._offloader or Offloader())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.storage.recomputes:
            return func(*args, **kwargs)
        named = self._rules.table.get(func)
        if named is None or not named.means(func, args, kwargs):
            written = self._rules.arguments_written(func)
            if written and self.storage:
                self.storage.before_edit(given(written, args, kwargs))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        rule = self._matches.rule_for(named.numbers, func, args, kwargs)
        if rule is None or rule.action == "recompute":
            self.storage.skip(func)
        else:
            noted = GeneratorState(_device(out)) if self._rules.must_note_generator(func, args, kwargs) else None
            self.storage.keep(func, rule.action, out, frame_packed_count(self._frame), noted)
        return out


def _device(out: Any) -> torch.device:
    return next((leaf.device for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), torch.device("cpu"))


class Replaying(_Mode):
    """Runs a region's recompute and hands out what was kept, call by call."""

    def __init__(self, rules: Rules, storage: Results) -> None:
        super().__init__()
        self.storage = storage
        self._rules = rules
        self._left: dict[Any, list[Kept | None]] = {}

    def __enter__(self) -> Replaying:
        # Before the mode is active: to bring a result back may run operations, or an outer region's recompute.
        self._left = self.storage.take()
        self.storage.recomputes += 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._left = {}
        self.storage.recomputes -= 1
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = self._rules.table.get(func)
        if named is None or not named.means(func, args, kwargs):
            return func(*args, **kwargs)
        left = self._left.get(func)
        if not left:
            raise RuntimeError(
                f"{func} runs more often in the recompute than in the forward of "
                f"{' + '.join(self._rules.region.modules)}: the region does not do the same twice"
            )
        entry = left.pop()
        if entry is None:
            return func(*args, **kwargs)
        if entry.generator is not None:
            entry.generator.restore()
        return entry.out
