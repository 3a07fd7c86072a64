"""Mode ``selective``: each block is a region that keeps the results of chosen operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dist_ckpt.blocks import glob_match
from dist_ckpt.errors import PlanError
from dist_ckpt.ops import Operator, resolve_op
from dist_ckpt.plan import OpRule, Region, SaveRule
from dist_ckpt.planning.inside import select_inside
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import SelectivePolicy, listed

DEFAULT_SAVE = ("matmul", "convolution", "attention", "collective", "topk", "d2h", "amax")
"""What is expensive to recompute: arithmetic that grows faster than the bytes kept, and everything that communicates
or waits for the host. ``topk`` is kept because a routing that flips in the recompute changes gradients, and ``amax``
because fp8 scaling factors are made of it, at a few bytes a tensor."""


def plan_selective(target: Target, policy: SelectivePolicy) -> Planned:
    """Every block recomputes all but what the rules keep.

    Raises:
        PlanError: an unknown operation, options without effect or against each other, or a glob that matches nothing.
    """
    kept = _kept_rules(policy)
    recomputed: dict[str, list[OpRule]] = {}
    matched: dict[str, int] = {}
    patterns = policy.recompute_matmuls_of
    for pattern in listed(patterns):
        if not any(_matmul() & resolve_op(rule.op) for rule in kept):
            raise PlanError(f"ckpt.recompute_matmuls_of={pattern!r}: ckpt.save keeps no matrix product anyway")
        if pattern in ("*", "**", "block"):
            raise PlanError(
                f"ckpt.recompute_matmuls_of={pattern!r} leaves no matrix product to keep: leave matmul out of ckpt.save"
            )
        found, counts = select_inside(target, pattern, key="recompute_matmuls_of")
        matched |= counts
        for block, within in _globs(pattern, found, target.blocks):
            recomputed.setdefault(block, []).append(OpRule("recompute", "matmul", within=within))
    regions = (Region((block,), SaveRule(ops=(*recomputed.get(block, ()), *kept))) for block in target.blocks)
    return Planned(tuple(regions), matched)


def save_rules(names: Iterable[str], key: str) -> tuple[OpRule, ...]:
    """A rule for each operation that is to be kept.

    Args:
        key: the option that holds the names, for messages.

    Raises:
        PlanError: an unknown operation, or one that the names before it cover.
    """
    rules = tuple(OpRule("save", name) for name in names)
    _covered(rules, key)
    return rules


def _kept_rules(policy: SelectivePolicy) -> tuple[OpRule, ...]:
    """What is offloaded or kept, in this order."""
    offloaded = tuple(OpRule("offload", name) for name in listed(policy.offload))
    waiting = _covered(offloaded, "offload")
    # No model has every kind of operation, so single default rules may match nothing; what a user names must occur.
    is_named = policy.save is not None
    saved = save_rules(DEFAULT_SAVE if policy.save is None else listed(policy.save), "save")
    for rule in saved:
        if is_named and resolve_op(rule.op) <= waiting:
            raise PlanError(f"ckpt.save and ckpt.offload both name {rule.op!r}: its results can be in one place only")
    saved = tuple(rule for rule in saved if not resolve_op(rule.op) <= waiting)
    if policy.every_nth_matmul > 1:
        saved = _every_nth(saved, policy.every_nth_matmul)
    if not is_named:
        saved = tuple(OpRule(r.action, r.op, every=r.every, required=False) for r in saved)
    return (*offloaded, *saved)


def _every_nth(saved: tuple[OpRule, ...], n: int) -> tuple[OpRule, ...]:
    """The rules of which the one for matrix products keeps every n-th only."""
    products = [rule.op for rule in saved if resolve_op(rule.op) <= _matmul()]
    if not products:
        raise PlanError(
            f"ckpt.every_nth_matmul={n} has nothing to count: ckpt.save keeps no matrix product. Add matmul to it"
        )
    if len(products) > 1:
        raise PlanError(
            f"ckpt.every_nth_matmul={n} would count {' and '.join(products)} each by itself: write matmul, which "
            "stands for all of them"
        )
    return tuple(OpRule("save", r.op, every=n) if r.op == products[0] else r for r in saved)


def _covered(rules: tuple[OpRule, ...], key: str) -> frozenset[Operator]:
    """The operators that some rules name."""
    covered: frozenset[Operator] = frozenset()
    for rule in rules:
        try:
            ops = resolve_op(rule.op)
        except PlanError as error:
            raise PlanError(f"ckpt.{key}: {error}") from None
        if ops <= covered:
            raise PlanError(f"ckpt.{key}: {rule.op!r} says nothing that the names before it do not say")
        covered |= ops
    return covered


def _globs(pattern: str, found: tuple[str, ...], blocks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(block, glob inside it) for the modules that a pattern chose; a word stands for modules of other names."""
    for block in blocks:
        inside = [name.removeprefix(f"{block}.") for name in found if name.startswith(f"{block}.")]
        if any(glob_match(name, pattern) for name in inside):
            yield block, pattern
        else:
            yield from ((block, name) for name in inside)


def _matmul() -> frozenset[Operator]:
    return resolve_op("matmul")
