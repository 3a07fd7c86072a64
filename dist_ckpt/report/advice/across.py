"""What stands out between ranks, in the allocator and in what outlives the step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from dist_ckpt.memory.profile.step_profile import Kind
from dist_ckpt.memory.records import RankMemory, in_bytes
from dist_ckpt.report.advice.view import (
    LARGE,
    SHARE,
    STATES,
    STRONGER,
    UNEVEN,
    Advice,
    View,
    by_source,
    ranks_named,
)

DOUBLED = 1.5
"""Times what an optimizer should hold: halfway to a second copy, and more than padding or scalars explain."""

DOUBLED_OF_ANY = 1.75
"""The same where the optimizer is not known: more than the three moments of AdamW with ``amsgrad``."""

FRAGMENTED = 0.10
"""Of what is reserved: the caching allocator keeps a few per cent in reserve in any run."""

ROOM = 0.9
"""Of a device's memory: what may be planned for, as fragmentation and other processes need the rest."""

LESS_COMPUTE = 0.01
"""Of the FLOPs of an update: a smaller saving would not be seen."""


def _needless(view: View) -> Iterator[Advice]:
    """Recompute that the device would have room without."""
    run = view.run
    of_stage = {cost.stage: cost for cost in run.costs}
    found = [(rank, of_stage.get(rank.stage)) for rank in view.report.ranks]
    without, limit, saved_flops = 0, math.inf, 0.0
    for rank, cost in found:
        if cost is None or rank.capacity is None or cost.recomputed is None:
            return
        more = cost.baseline_saved_bytes - cost.saved_bytes
        without = max(without, (rank.reserved or view.peak_of(rank)) + more)
        limit = min(limit, ROOM * rank.capacity)
        saved_flops = max(saved_flops, cost.recomputed)
    if without <= limit and saved_flops >= LESS_COMPUTE:
        yield Advice(
            f"there is room to recompute nothing: the peak would be about {in_bytes(without)} of "
            f"{in_bytes(limit / ROOM)}, and an update would need up to {saved_flops:.0%} less compute: "
            f"{run.either('ckpt=none', 'no policy')}",
            None,
        )


def _replicated(view: View) -> Iterator[Advice]:
    ranks, at_peak = len(view.report.ranks), view.at_peak_of(view.rank)
    kinds = _whole_kinds(view)
    nbytes = sum(at_peak[kind] for kind in kinds)
    if not kinds or ranks == 1 or nbytes < LARGE * view.peak:
        return
    what = "parameters, gradients and moments" if len(kinds) > 1 else "parameters"
    key = "engine=fsdp2" if view.run.engine == "ddp" else "zero_optimization.stage=3 in the file of engine.config"
    yield Advice(
        f"every rank holds all {what}, {view.of_peak(nbytes)}: {key} keeps 1/{ranks} of them on each rank, and a block "
        "or two whole",
        nbytes * (ranks - 1) // ranks,
    )


def _whole_kinds(view: View) -> tuple[Kind, ...]:
    """The model states of which every rank holds all; of DeepSpeed as far as its memory shows the stage of ZeRO.

    Stage 3 has unsharded copies in forward and backward. With stage 1 or 2 the optimizer has three fp32 values a
    parameter, divided by the ranks; with stage 0 two (bf16: three), undivided.
    """
    if view.run.engine == "ddp":
        return STATES
    profile = view.profile
    if view.run.engine != "deepspeed" or profile is None or profile.phase not in ("forward", "loss", "backward"):
        return ()
    if profile.at_peak["unsharded"]:
        return ()
    undivided = 6 if view.run.get("train.precision") == "bf16" else 2
    return STATES if profile.at_peak["optimizer"] >= 0.9 * undivided * profile.at_peak["params"] else ("params",)


def _fragmented(view: View) -> Iterator[Advice]:
    worst = max(view.report.ranks, key=lambda r: (r.reserved or 0) - (r.peak or 0))
    if worst.reserved is None or worst.peak is None:
        return
    cached = worst.reserved - worst.peak
    if cached >= FRAGMENTED * worst.reserved:
        retried = f", and had to be given back {worst.alloc_retries} times" if worst.alloc_retries else ""
        yield Advice(
            f"rank {worst.rank} reserves {in_bytes(cached)} more than tensors need at the peak "
            f"({cached / worst.reserved:.0%} of {in_bytes(worst.reserved)}){retried}: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator use it",
            cached,
        )


def _uneven_ranks(view: View) -> Iterator[Advice]:
    """Ranks far above those that do the same work; stages in which the same is to be done stand together."""
    remedies: dict[str, str] = {
        "unattributed": "something there holds on to tensors",
        **dict.fromkeys(STATES, "it holds more of the model than the others"),
    }
    found: dict[str, list[tuple[float, RankMemory, float, str]]] = defaultdict(list)
    for stage in {r.stage for r in view.report.ranks}:
        ranks = [r for r in view.report.ranks if r.stage == stage]
        heaviest = max(ranks, key=view.peak_of)
        others = [r for r in ranks if r is not heaviest]
        if not others:
            continue
        usual = median(map(view.peak_of, others))
        more = view.peak_of(heaviest) - usual
        if more < UNEVEN * view.peak_of(heaviest) or not usual:
            continue
        kind = _differing(view, heaviest, min(others, key=lambda r: abs(view.peak_of(r) - usual)))
        remedy = remedies.get(kind, "give every rank micro-batches of the same rows and tokens")
        found[remedy].append((more, heaviest, usual, kind))
    for remedy, uneven in found.items():
        more, heaviest, usual, kind = max(uneven, key=lambda one: one[0])
        here = f" of stage {heaviest.stage}" if heaviest.stage is not None else ""
        rest = sorted(rank.rank for _, rank, _, _ in uneven if rank is not heaviest)
        alike = f" (likewise {ranks_named(rest)}, in other stages)" if rest else ""
        yield Advice(
            f"the memory of rank {heaviest.rank} is {in_bytes(view.peak_of(heaviest))}, {more / usual:.0%} above the "
            f"other ranks{here} ({in_bytes(usual)}), most of it {kind}{alike}: {remedy}",
            int(more),
        )


def _uneven_stages(view: View) -> Iterator[Advice]:
    if view.uneven_stages is None:
        return
    heaviest, second = view.uneven_stages
    assert heaviest.stage is not None, "it has one"
    gain = view.peak_of(heaviest) - view.peak_of(second)
    what = (
        f"stage {heaviest.stage} has a peak of {in_bytes(view.peak_of(heaviest))}, "
        f"{gain / view.peak_of(second):.0%} above the next one, stage {second.stage} "
        f"({in_bytes(view.peak_of(second))}), most of it {_differing(view, heaviest, second)}"
    )
    modes, at_peak = list(view.run.modes), view.at_peak_of(heaviest)
    stronger = STRONGER.get(modes[heaviest.stage]) if heaviest.stage < len(modes) else None
    move = view.run.either("engine.partition moves blocks to other stages", "move blocks to other stages")
    if at_peak["activations"] + at_peak.get("recompute", 0) < gain:
        yield Advice(f"{what}: {move}", gain)
    elif stronger is None:
        yield Advice(f"{what}: {move}, which have room", gain)
    else:
        modes[heaviest.stage] = stronger
        key = view.run.either(f"'ckpt.per_stage=[{','.join(modes)}]'", f"the policy {stronger!r} there")
        yield Advice(f"{what}: {key} recomputes more where it counts", gain)


def _unattributed(view: View) -> Iterator[Advice]:
    """What nobody owns, by who holds it."""
    holders: dict[str, dict[int, int]] = defaultdict(dict)
    for number, profile in view.profiles.items():
        unowned = (replace(h, source=_holder(h.source)) for h in profile.holdings if h.kind == "unattributed")
        for source, nbytes in by_source(unowned).items():
            if nbytes >= SHARE * profile.peak_bytes:
                holders[source][number] = nbytes
    for source, by_rank in holders.items():
        most = max(by_rank.values())
        where = f" on {ranks_named(by_rank)}" if len(view.report.ranks) > 1 else ""
        yield Advice(
            f"{in_bytes(most)} that no part of the training owns is held by {source}{where}, before or after the step: "
            "let go of it, or move it to the host",
            most,
        )
    if not view.profiles and view.matters(unknown := view.rank.unattributed or 0):
        deep = view.run.either("report.profile_step=N", "MemoryMeter.profile()")
        yield Advice(
            f"{view.of_peak(unknown)} is owned by nothing that is known{view.where}: {deep} names what holds it",
            unknown,
        )


def _holder(source: str) -> str:
    """Who holds something in the end, without the way there: all of a copied state is to be let go of as one.

    ``dict 'best' in train.py:12 (train)`` of ``dict['state'] dict[0] dict['exp_avg'] 'best' in train.py:12 (train)``,
    and ``variable 'average' in train.py:12 (train)`` of ``Linear.weight of variable 'average' in train.py:12 (train)``.
    """
    if found := re.search(r" of (variable '.*' in .*)", source):
        return found[1]
    found = re.match(r"(\w+)(?:\[.*?\])? (?:\w+(?:\[.*?\])? )*('.*' in .*)", source)
    return f"{found[1]} {found[2]}" if found else source


def _doubled_optimizer(view: View) -> Iterator[Advice]:
    """More state than AdamW's: a copy, or the state of a second optimizer. In anybody's own loop the optimizer may be
    one that needs more, as AdamW with ``amsgrad`` and LBFGS do.

    Compared with the gradients at the boundary, which are sharded as the moments are, and in the dtype that is reduced:
    two moments to an fp32 gradient, three with DeepSpeed's fp32 masters, six to a bf16 gradient.
    """
    engine, rank = view.run.engine, max(view.report.ranks, key=lambda r: r.optimizer)
    if not rank.grads or (engine is None and not view.profiles):
        return
    profile = view.profiles.get(rank.rank)
    if engine is None:
        held = [h for h in profile.holdings if h.kind in ("params", "grads")] if profile is not None else []
        low = any(h.dtype in ("bfloat16", "float16") for h in held)
        usual = 6 if low else 2
    elif str(engine).startswith("deepspeed"):
        usual = 6 if view.run.get("train.precision") == "bf16" else 3
    else:
        usual = 2
    expected = usual * rank.grads
    most = (DOUBLED if engine is not None else DOUBLED_OF_ANY) * expected
    if rank.optimizer <= most or not view.matters(rank.optimizer - expected):
        return
    what = (
        f"the optimizer of rank {rank.rank} holds {in_bytes(rank.optimizer)}, {rank.optimizer / rank.grads:.1f} "
        f"times its gradients, and AdamW {usual} times"
    )
    if engine is not None:
        yield Advice(f"{what}: a copy, or the state of a second one, is among it; drop it", rank.optimizer - expected)
    else:
        yield Advice(f"{what}: unless it is one that needs more, it may hold a copy, or a second one's state", None)


def _differing(view: View, heavy: RankMemory, light: RankMemory) -> str:
    """The kind of memory by which two ranks differ most at their peaks."""
    one, other = view.at_peak_of(heavy), view.at_peak_of(light)
    return max(one, key=lambda kind: one[kind] - other.get(kind, 0))


RULES = (
    _needless, _replicated, _fragmented, _uneven_ranks, _uneven_stages, _unattributed, _doubled_optimizer,
)  # fmt: skip
