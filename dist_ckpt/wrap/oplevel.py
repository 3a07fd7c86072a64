"""Op-level regions: which results of a forward are kept while the rest is recomputed.

torch's selective checkpointing does the caching. Added here: rules by name, counted anew in each forward of each
region; results that the recompute never reaches are not kept; a rule that matches nothing is an error.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dist_ckpt.compat import torch as private
from dist_ckpt.errors import PlanError
from dist_ckpt.ops import is_host_copy, resolve_op
from dist_ckpt.plan import Region

_POLICY = {"save": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.MUST_RECOMPUTE}


@functools.lru_cache(maxsize=1024)
def _rule_table(region: Region) -> Mapping[OpOverload, tuple[int, ...]]:
    """For each operator the numbers of the rules that name it, in order."""
    table: dict[OpOverload, tuple[int, ...]] = {}
    for number, rule in enumerate(region.save.ops):
        for op in resolve_op(rule.op):
            table[op] = (*table.get(op, ()), number)
    return table


class OpRecorder:
    """Decides call by call in one forward of a region, and is its first checkpoint context.

    One object serves one forward: no count is shared by layers, micro-batches or a later forward.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._rules = _rule_table(region)
        self._matched: set[int] = set()
        self._kept: list[tuple[Any, int, int]] = []  # cache key, call number, tensors packed before the call
        self._seen: Counter[OpOverload] = Counter()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The two contexts for ``torch.utils.checkpoint``: this object for forward, the cache's for the recompute."""
        self._caching, cached = create_selective_checkpoint_contexts(self._decide)
        return self, cached

    def __enter__(self) -> OpRecorder:
        self._frame = private.current_frame()
        self._caching.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._caching.__exit__(*exception)
        if exception[0] is None:
            self._check_rules()
            self._drop_unreached()
        del self._frame  # the frame holds the recompute context, not this object: no cycle, but no need either

    def _decide(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self._seen[op] += 1
        for number in self._rules.get(op, ()):
            rule = self._region.save.ops[number]
            if rule.op == "d2h" and not is_host_copy(args, kwargs, ctx.op_output):
                continue
            self._matched.add(number)
            if rule.action == "save":
                key, index = private.last_call(self._caching, op, args)
                self._kept.append((key, index, private.frame_packed_count(self._frame)))
            return _POLICY[rule.action]
        return CheckpointPolicy.PREFER_RECOMPUTE

    def _drop_unreached(self) -> None:
        """Frees results of calls that come after the last tensor that backward needs.

        The recompute stops there, so it never asks for them: the last matrix product of an MLP, whose output is only
        added to the residual stream, is the common case.
        """
        if private.frame_stops_early(self._frame):
            last = private.frame_packed_count(self._frame)
            for key, index, packed in self._kept:
                if packed == last:
                    private.drop_cached(self._caching, key, index)

    def _check_rules(self) -> None:
        rules = self._region.save.ops
        missing = [rule.op for number, rule in enumerate(rules) if rule.required and number not in self._matched]
        if self._matched and not missing:
            return
        names = ", ".join(missing or [rule.op for rule in rules])
        seen = ", ".join(f"{op} ({n})" for op, n in self._seen.most_common(12)) or "(none)"
        raise PlanError(
            f"op rules that matched no call in the forward of {' + '.join(self._region.modules)}: {names}. "
            f"Operations that did run there: {seen}"
        )


def compiled_contexts(region: Region) -> Callable[[], Any]:
    """The region's ``context_fn`` under ``torch.compile``, where the compiler drops what backward does not need."""
    rules = _rule_table(region)

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        numbers = rules.get(op, ())
        return _POLICY[region.save.ops[numbers[0]].action] if numbers else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)
