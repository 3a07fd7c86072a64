"""Op-level regions: which results of a forward are kept while the rest is recomputed.

The two contexts here do for eager code what torch's selective checkpointing does, with what policies need besides:
rules by name, counted anew in each forward of each region; results that the recompute never reaches are not kept; a
rule that matches nothing is an error. Operations that no rule names pass straight through, so that they cost one
dictionary look-up instead of a cache entry each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from dist_ckpt.compat import torch as torch_private
from dist_ckpt.errors import PlanError
from dist_ckpt.ops import is_host_copy, resolve_op
from dist_ckpt.plan import OpRule, Region

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What ``torch.utils.checkpoint`` runs a region's forward and its recompute under."""

_RECOMPUTE = object()
_USED = object()


def eager_contexts(region: Region) -> Contexts:
    """The contexts of one forward of a region. No count is shared by layers, micro-batches or a later forward."""
    keeping = Keeping(region)
    return keeping, Replaying(keeping.storage)


def compiled_contexts(region: Region) -> Callable[[], Contexts]:
    """The region's ``context_fn`` under ``torch.compile``, where the compiler drops what backward does not need."""
    return functools.partial(_compiled_contexts, region)


def _compiled_contexts(region: Region) -> Contexts:
    """Runs while the region is traced, so that a rule that matches nothing stops the compilation."""
    table, matched, seen = _rule_table(region), set[int](), set[Any]()

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        for number in table.get(op, ()):
            rule = region.save.ops[number]
            if _applies(rule, args, ctx.op_output):
                matched.add(number)
                return CheckpointPolicy.MUST_SAVE if rule.action == "save" else CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return torch_private.checked_contexts(decide, lambda: check_rules(region, matched, seen))


def _applies(rule: OpRule, args: Any, out: Any) -> bool:
    """Whether a rule that names a call's operator is about this call: copies count where they go to the host."""
    return rule.op != "d2h" or is_host_copy(args, out)


def check_rules(region: Region, matched: set[int], seen: set[Any]) -> None:
    """Raises PlanError if a rule matched no call in a forward of its region.

    Args:
        matched: numbers of the rules that did match.
        seen: the operators that ran, for the message.
    """
    rules = region.save.ops
    missing = [r.op for number, r in enumerate(rules) if r.required and number not in matched]
    if matched and not missing:
        return
    names = ", ".join(missing or [rule.op for rule in rules])
    ran = ", ".join(sorted(map(str, seen))) or "(none)"
    raise PlanError(
        f"op rules that matched no call in the forward of {' + '.join(region.modules)}: {names}. "
        f"Operations that did run there: {ran}"
    )


@functools.lru_cache(maxsize=1024)
def _rule_table(region: Region) -> Mapping[OpOverload, tuple[int, ...]]:
    """For each operator the numbers of the rules that name it, in order."""
    table: dict[OpOverload, tuple[int, ...]] = {}
    for number, rule in enumerate(region.save.ops):
        for op in resolve_op(rule.op):
            table[op] = (*table.get(op, ()), number)
    return table


class Keeping(TorchDispatchMode):
    """Runs a region's forward and files the results that its rules keep."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.storage: dict[OpOverload, list[Any]] = {}
        """For each operator that a rule names, an entry a call: what is kept of it, or a mark to recompute it."""
        self._region = region
        self._rules = _rule_table(region)
        self._matched: set[int] = set()
        self._kept: list[tuple[OpOverload, int, int]] = []  # operator, call, tensors packed before the call
        self._seen: set[Any] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside the region is one operation of its own here, as in torch's own modes."""
        return True

    def __enter__(self) -> Keeping:
        self._frame = torch_private.current_frame()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            check_rules(self._region, self._matched, {*self._seen, *self.storage})
            self._drop_unreached()
        del self._frame

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        numbers = self._rules.get(func)
        if numbers is None:
            self._seen.add(func)
        else:
            self._file(func, numbers, args, out)
        return out

    def _file(self, op: OpOverload, numbers: tuple[int, ...], args: Any, out: Any) -> None:
        calls = self.storage.setdefault(op, [])
        for number in numbers:
            rule = self._region.save.ops[number]
            if not _applies(rule, args, out):
                continue
            self._matched.add(number)
            if rule.action == "save":
                self._kept.append((op, len(calls), torch_private.frame_packed_count(self._frame)))
                calls.append(torch_private.kept_result(out))
                return
            break
        calls.append(_RECOMPUTE)

    def _drop_unreached(self) -> None:
        """Frees results of calls that come after the last tensor that backward needs.

        The recompute stops there, so it never asks for them: the last matrix product of an MLP, whose output is only
        added to the residual stream, is the common case.
        """
        if torch_private.frame_stops_early(self._frame):
            last = torch_private.frame_packed_count(self._frame)
            for op, call, packed in self._kept:
                if packed == last:
                    self.storage[op][call] = _RECOMPUTE


class Replaying(TorchDispatchMode):
    """Runs a region's recompute and hands out what was kept, call by call, once."""

    def __init__(self, storage: dict[OpOverload, list[Any]]) -> None:
        super().__init__()
        self.storage = storage
        self._calls: dict[OpOverload, Iterator[int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As in :class:`Keeping`."""
        return True

    def __enter__(self) -> Replaying:
        self._calls = {op: iter(range(len(calls))) for op, calls in self.storage.items()}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self._calls.get(func)
        if calls is None:
            return func(*args, **(kwargs or {}))
        call = next(calls, None)
        if call is None:
            raise RuntimeError(
                f"{func} runs more often in the recompute than in the forward: the region does not do the same twice"
            )
        entry = self.storage[func][call]
        if entry is _RECOMPUTE:
            return func(*args, **(kwargs or {}))
        if entry is _USED:
            raise RuntimeError(
                "a second backward through a region with op rules: its kept results are freed by the first one. Use a "
                "policy without op rules, or run the forward again"
            )
        self.storage[func][call] = _USED
        return torch_private.result_of(entry)
