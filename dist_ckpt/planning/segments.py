"""Mode ``segments``: k consecutive blocks are one region."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import nn

from dist_ckpt.blocks import class_name
from dist_ckpt.errors import PlanError
from dist_ckpt.names import named_children, named_modules
from dist_ckpt.plan import Region, fold_names
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.policy import ConsecutivePolicy, SegmentsPolicy


def plan_segments(target: Target, policy: SegmentsPolicy) -> Planned:
    """Consecutive blocks recompute as one; raises PlanError where ``skip_last`` leaves none."""
    by_stage, notes = cut(target, policy)
    for where, segments in by_stage.items() if policy.skip_last else ():
        if len(segments) == 1:
            raise PlanError(
                f"ckpt.skip_last=true leaves no segment{where}: ckpt.k={policy.k} makes "
                f"{' + '.join(fold_names(segments[0]))} the only one; use a smaller k, or ask for mode 'none'"
            )
    kept = [one for segments in by_stage.values() for one in (segments[:-1] if policy.skip_last else segments)]
    return Planned(tuple(Region(modules) for modules in kept), notes=notes)


def cut(
    target: Target, policy: ConsecutivePolicy, has_inner: bool = False
) -> tuple[Mapping[str, list[tuple[str, ...]]], tuple[str, ...]]:
    """The segments of each stage, run by run of consecutive blocks, and notes on how their length was found.

    Args:
        has_inner: blocks keep little more than their inputs while their segment is recomputed.
    """
    segments: dict[str, list[tuple[str, ...]]] = {}
    notes: dict[str, None] = {}
    for where, blocks in target.by_stage():
        for run in _runs(target.model, blocks):
            k = policy.k
            if isinstance(k, str):
                k, note = _best_length(target, run, has_inner)
                notes[note] = None
            segments.setdefault(where, []).extend(run[start : start + k] for start in range(0, len(run), k))
    return segments, tuple(notes)


def _runs(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Blocks that follow each other in one list, without another one of their kind between them."""
    siblings: dict[str, list[str]] = {}
    for block in blocks:
        siblings.setdefault(block.rpartition(".")[0], []).append(block)
    for parent_name, parent in named_modules(model):
        here = siblings.get(parent_name, [])
        kinds = {class_name(child) for name, child in named_children(parent) if _full(parent_name, name) in here}
        run: list[str] = []
        for name, child in named_children(parent):
            full = _full(parent_name, name)
            if full in here:
                run.append(full)
            elif run and class_name(child) in kinds:
                yield tuple(run)
                run = []
        if run:
            yield tuple(run)


def _full(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _best_length(target: Target, run: tuple[str, ...], has_inner: bool) -> tuple[int, str]:
    """The length with the least peak, and a note that says what it rests on: (n/k)·input + k·block, or with regions
    inside (n/k)·input + k·input + block."""
    n = len(run)
    if has_inner:
        k = max(1, round(math.sqrt(n)))
        return k, f"segments of {k}: √n, as with regions inside blocks keep about their input"
    if target.measured is None:
        k = max(1, round(math.sqrt(n)))
        return k, (
            f"segments of {k}: √n, as no batch was given to measure blocks on. Blocks that keep more than their "
            "input peak lower with shorter segments, or with mode 'nested'"
        )
    sizes = target.measured(run).values()
    inputs, kept = (sum(one.inputs for one in sizes) / n, sum(one.kept for one in sizes) / n)
    k = min(max(1, round(math.sqrt(n * inputs / kept))), n) if kept else n
    return k, f"segments of {k}: √(n·input/block) with inputs of {inputs:,.0f} and blocks of {kept:,.0f} bytes"
