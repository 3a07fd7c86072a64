"""Which calls of a region's forward its op rules mean."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dist_ckpt.blocks import glob_match
from dist_ckpt.errors import PlanError
from dist_ckpt.names import unwrap
from dist_ckpt.ops import Operator, crosses_to_host, has_drawn, resolve_op, written_arguments
from dist_ckpt.plan import OpRule, Region

Names = tuple[str, ...]
"""What a module is called inside a region; several names if it is shared."""
FindCaller = Callable[[Mapping[int, Names]], Names | None]
"""Given the names of modules by ``id``: those of the innermost one whose call is running."""


@dataclass(frozen=True)
class Named:
    """What rules say of one operator."""

    numbers: tuple[int, ...]
    """The rules that name it, in order."""
    only_to_host: bool
    """Whether just those calls count that bring something to the host: it is named by ``d2h`` alone."""

    def means(self, op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call counts at all, in the forward and alike in the recompute."""
        return not self.only_to_host or crosses_to_host(op, args, kwargs)


class Rules:
    """A region's rules by operator, made once for each module that recomputes.

    Args:
        modules: the region's, needed where a rule has ``within``; several if regions share these rules.
    """

    def __init__(self, region: Region, *modules: nn.Module) -> None:
        self.region = region
        self.modules = weakref.WeakSet(modules)
        self.table: dict[Operator, Named] = {}
        named: dict[Operator, list[int]] = {}
        for number, rule in enumerate(region.save.ops):
            for op in resolve_op(rule.op):
                named.setdefault(op, []).append(number)
        for op, numbers in named.items():
            only_to_host = all(region.save.ops[number].op == "d2h" for number in numbers)
            self.table[op] = Named(tuple(numbers), only_to_host)
        self.written: dict[Operator, tuple[tuple[int, str], ...]] = {}
        """The operators that ran without being named, and the arguments they write into."""
        self.were_met = False
        """Whether a forward has shown that each required rule matches."""

    def names(self) -> dict[int, Names]:
        """The modules in the region's, which are looked up anew in each forward: adapters may have been put in."""
        return {number: names for module in self.modules for number, names in modules_inside(module).items()}

    def arguments_written(self, op: Operator) -> tuple[tuple[int, str], ...]:
        """As :func:`~dist_ckpt.ops.written_arguments`, noting that the operator ran."""
        found = self.written.get(op)
        if found is None:
            found = self.written[op] = written_arguments(op)
        return found

    def must_note_generator(self, op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether what comes after a call draws from where that call left a generator."""
        return self.region.preserve_rng_state and has_drawn(op, args, kwargs)


class Matches:
    """What each rule has matched in one forward, so that no count is shared by layers, micro-batches or threads."""

    def __init__(self, rules: Rules, find_caller: FindCaller) -> None:
        self._rules = rules
        self._met = [0] * len(rules.region.save.ops)
        self._taken = list(self._met)
        self._find_caller = find_caller
        self._names: dict[int, Names] | None = None

    def rule_for(
        self, numbers: Iterable[int], op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> OpRule | None:
        """The first of the rules that means this call; each counts the calls that no rule before it has taken."""
        for number in numbers:
            rule = self._rules.region.save.ops[number]
            if rule.op == "d2h" and not crosses_to_host(op, args, kwargs):
                continue
            if rule.within != "*" and not lies_within(self._caller(), rule.within):
                continue
            nth = self._met[number]
            self._met[number] += 1
            if (rule.calls and nth not in rule.calls) or nth % rule.every:
                continue
            self._taken[number] += 1
            return rule
        return None

    def _caller(self) -> Names:
        if self._names is None:
            self._names = self._rules.names()
        return self._find_caller(self._names) or ("",)

    def check(self, called: Iterable[Operator]) -> None:
        """Raises PlanError if a required rule took no call, or not all that it counts on, in a forward of its region.

        Args:
            called: named operators that ran, for the message.
        """
        rules = self._rules.region.save.ops
        missing = [number for number, rule in enumerate(rules) if rule.required and self._falls_short(number)]
        if any(self._taken) and not missing:
            self._rules.were_met = True
            return
        ran = set(called)
        what = "; ".join(self._shortfall(number, ran) for number in missing or range(len(rules)))
        operators = ", ".join(sorted(map(str, ran | self._rules.written.keys()))) or "(none)"
        raise PlanError(
            f"op rules that matched no call in the forward of {' + '.join(self._rules.region.modules)}: {what}. "
            f"Operations that did run there: {operators}"
        )

    def _falls_short(self, number: int) -> bool:
        last = max(self._rules.region.save.ops[number].calls, default=-1)
        return not self._taken[number] or last >= self._met[number]

    def _shortfall(self, number: int, ran: set[Operator]) -> str:
        rule = self._rules.region.save.ops[number]
        what, ops = rule.subject, resolve_op(rule.op)
        if self._met[number]:
            return f"{what} (it ran {self._met[number]} times, counted from 0)"
        if ran.isdisjoint(ops):
            return what
        if rule.within != "*":
            names = sorted({name for names in self._rules.names().values() for name in names if name})
            if not any(lies_within((name,), rule.within) for name in names):
                return f"{what} (no such module; there are {', '.join(names) or 'none'})"
            return f"{what} (it ran in other modules, or a rule before it takes those calls)"
        return f"{what} (a rule before it takes these calls)"


@functools.lru_cache(maxsize=4096)
def lies_within(names: Names, pattern: str) -> bool:
    """Whether a module of any of these names is, or lies in, one that a glob matches."""
    for name in names:
        parts = name.split(".")
        if any(glob_match(".".join(parts[:end]), pattern) for end in range(len(parts) + 1)):
            return True
    return False


def modules_inside(module: nn.Module) -> dict[int, Names]:
    """The names of every module in a module, relative to it, by the modules' ``id``; its own is empty."""
    found: dict[int, Names] = {}
    pending: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", module, ())]
    while pending:
        name, one, above = pending.pop()
        found[id(one)] = (*found.get(id(one), ()), name)
        for child, inside in reversed(one._modules.items()):
            if inside is not None and (plain := unwrap(inside)) not in above:
                pending.append((f"{name}.{child}" if name else child, plain, (*above, one)))
    return found
