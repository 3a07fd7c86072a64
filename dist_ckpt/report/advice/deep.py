"""What the worst moment of the heaviest rank consists of, and what would lower it. Each rule needs a deep step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Kind, Phase, StepProfile
from dist_ckpt.memory.records import in_bytes
from dist_ckpt.report.advice.view import LARGE, STATES, STRONGER, Advice, View, by_source

FEW_ACTIVATIONS = 0.10
"""Of the peak: with fewer activations than a tenth, recomputing all of them would hardly be noticed."""

_SHARDED = ("engine=fsdp2, more ranks", "FSDP2 or ZeRO, more ranks")
_FEWER_ROWS = ("train.micro_batch", "smaller micro-batches")
_ALIKE = "smaller blocks, fewer of them in a segment"
_BUCKETS = "DeepSpeed: reduce_bucket_size; FSDP: what is sharded as one"
_WHAT_LOWERS: dict[Kind, tuple[str, tuple[str, str] | None]] = {
    "params": ("parameters", _SHARDED),
    "grads": ("gradients", _SHARDED),
    "optimizer": ("the optimizer's state", _SHARDED),
    "activations": ("activations", _FEWER_ROWS),
    "recompute": ("what is computed again", _FEWER_ROWS),
    "unsharded": ("unsharded parameters", (_ALIKE, _ALIKE)),
    "communication": ("communication buffers", (_BUCKETS, _BUCKETS)),
    "temporary": ("temporary results", ("train.micro_batch, model.loss=chunked", f"{_FEWER_ROWS[1]}, loss in pieces")),
    "buffers": ("the model's buffers", None),
    "unattributed": ("what nobody owns", None),
}
"""What to lower, and how: with keys of the training program, and in words."""

LOSS_PIECES = 8
"""Into which a loss is advised to be cut: an eighth of the logits is left, and each piece is still a large product."""

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
_OF_LOSS = ("log_softmax", "cross_entropy", "nll_loss")
_CASTS = ("aten::_to_copy", "aten::to", "aten::empty_strided")
_SCORES = ("aten::_softmax", "aten::softmax", "aten::_softmax_backward_data", "aten::masked_fill", "aten::baddbmm")
_ALSO_SCORES = ("aten::bmm", "aten::mul", "aten::div")


def _logits(view: View) -> Iterator[Advice]:
    """Results of the head for a whole micro-batch, their softmax and their gradients."""
    profile, run = view.profile, view.run
    held = _logits_held(view)
    if profile is None or not held:
        return
    nbytes = sum(h.nbytes for h in held)
    heads = {h.module for h in held if h.module}
    rows = max(math.prod(h.shape[:-1]) for h in held if h.shape)
    micro_batch = run.get("train.micro_batch")
    if run.get("model.kind") == "decoder":
        is_chunked = run.get("model.loss") == "chunked"
        if is_chunked:
            rows = min(rows, run.get("model.loss_chunk") or rows)
        if rows < LOSS_PIECES:
            return
        chunked = "" if is_chunked else "model.loss=chunked "
        left = 1 / LOSS_PIECES
        remedy = f"{chunked}model.loss_chunk={rows // LOSS_PIECES} keeps an eighth of it"
        remedy += "" if is_chunked else " and computes the head twice"
    elif micro_batch is not None and micro_batch > 1:
        left = (micro_batch // 2) / micro_batch
        remedy = f"train.micro_batch={micro_batch // 2} with more train.grad_accum halves it"
    else:
        left = 1 / LOSS_PIECES
        remedy = "a loss in pieces, as torch.nn.functional.linear_cross_entropy computes it, keeps a part of it"
    gain = _gain(profile, nbytes * (1 - left), _lifetimes(profile, heads))
    if view.matters(gain):
        shape = " × ".join(map(str, max(held, key=lambda h: h.nbytes).shape or ()))
        yield Advice(
            f"logits ({shape}), with what the loss makes of them, are {view.of_peak(nbytes)}{view.where}: {remedy}",
            gain,
        )


def _logits_held(view: View) -> list[Holding]:
    """Products of the head, and what the loss makes of them.

    Their shape alone does not tell: hidden states have the same where the model is as wide as there are classes.
    """
    run = view.run
    made = [h for h in view.made if h.shape and len(h.shape) > 1 and view.block_of(h.module) is None]
    own = run.get("model.vocab_size") if run.get("model.kind") == "decoder" else None  # of others it is no option
    classes = own or next((h.shape[-1] for h in made if h.shape and "log_softmax" in h.source), None)
    made = [h for h in made if h.shape and h.shape[-1] == classes]
    products = [h for h in made if h.source in _PRODUCTS]
    heads = {h.module for h in products}
    states = (h for h in view.profile.holdings if h.kind in STATES and h.module in heads) if view.profile else ()
    if run.get("model.d_model") == classes or any(h.shape and h.shape[-1] == classes for h in states):
        products = [h for h in products if h.kind != "temporary"]  # the gradients of the head's input look alike
    of_loss = (
        h
        for h in made
        if any(name in h.source for name in _OF_LOSS)
        or (h.module in (None, "") and h.dtype == "float32" and h.source in _CASTS)
    )
    return [*products, *of_loss]


def _attention_scores(view: View) -> Iterator[Advice]:
    profile, run, seq = view.profile, view.run, view.run.get("train.seq_len")
    if profile is None or run.get("model.attention") != "eager":
        return
    heads, width, rows = run.get("model.n_heads"), run.get("model.d_model"), run.get("train.micro_batch")
    # Hidden states and queries may have the same shape: products tell only where no head is as wide as a row is long.
    is_told = bool(heads and width and rows) and width // heads != seq
    nbytes = sum(
        h.nbytes
        for h in view.made
        if h.shape and h.shape[-2:] == (seq, seq) and view.block_of(h.module) is not None
        if h.source in _SCORES or (is_told and h.source in _ALSO_SCORES and math.prod(h.shape[:-2]) == rows * heads)
    )
    if view.matters(nbytes):
        yield Advice(
            f"attention scores (…, {seq} × {seq}) are {view.of_peak(nbytes)}{view.where}: model.attention=sdpa "
            "computes attention without them",
            nbytes,
        )


def _optimizer_step(view: View) -> Iterator[Advice]:
    """What only the optimizer step allocates, where that is the worst moment."""
    profile = view.profile
    if profile is None or profile.phase != "optimizer":
        return
    sources = by_source(h for h in profile.holdings if h.kind == "temporary")
    nbytes = profile.at_peak["temporary"]
    gain = min(nbytes, profile.peak_bytes - _highest(p for p in profile.phases if p.name != "optimizer"))
    if not view.matters(gain) or not sources:
        return
    source = max(sources, key=lambda name: sources[name])
    what = f"the peak is in the optimizer step, of which {view.of_peak(nbytes)} is temporary{view.where}"
    if "_foreach_" in source:
        yield Advice(
            f"{what} ({source}): AdamW(fused=True) needs none of it, foreach=False a parameter's at a time", gain
        )
    else:
        yield Advice(f"{what}, most of it allocated by {source}: do it in pieces, or in place", gain)


def _unsharded_gradients(view: View) -> Iterator[Advice]:
    run = view.run
    if run.get("train.accum_sync") != "boundary" or run.engine not in ("fsdp1", "fsdp2") or not run.accumulates:
        return
    if view.profile is not None:
        nbytes = view.profile.at_peak["grads"] - view.rank.grads
    else:
        nbytes = 4 * sum(cost.parameters for cost in run.costs)
    if view.matters(nbytes):
        yield Advice(
            f"train.accum_sync=boundary keeps {view.of_peak(nbytes)} of unsharded gradients{view.where}: "
            "train.accum_sync=every frees them, for a reduction each micro-batch",
            nbytes,
        )


def _whole_blocks(view: View) -> Iterator[Advice]:
    """Blocks of a segment, all of them unsharded while it runs again."""
    profile, run = view.profile, view.run
    if profile is None or run.segment < 2:
        return
    listed = [(view.block_of(h.module), h.nbytes) for h in profile.holdings if h.kind == "unsharded"]
    # Their largest weights tell how many there are: of any block, small ones may be whole all the time.
    largest = max((nbytes for block, nbytes in listed if block is not None), default=0)
    count = len({block for block, nbytes in listed if block is not None and nbytes >= largest / 2})
    nbytes = view.of_blocks(profile, "unsharded")
    # Two are there in any case: the one at work, and the next one, which is fetched ahead.
    gain = nbytes * (count - 2) // max(count, 1)
    if view.matters(gain):
        k = run.segment // 2
        half = f"{run.either(f'ckpt.k={k}', f'segments of {k}')} has fewer of them, " if run.segment > 3 else ""
        full = run.either("ckpt=full", "the policy 'full'")
        yield Advice(
            f"segments of {run.segment} blocks hold {count} unsharded blocks at once, "
            f"{view.of_peak(nbytes)}{view.where}: {half}{full} has one or two and keeps each block's input",
            gain,
        )


def _few_activations(view: View) -> Iterator[Advice]:
    """That no policy will lower this peak."""
    profile = view.profile
    if profile is None:
        return
    nbytes = profile.at_peak["activations"] + profile.at_peak["recompute"]
    if nbytes >= FEW_ACTIVATIONS * view.peak:
        return
    kind = max(KINDS, key=lambda k: profile.at_peak[k])
    limit = f"save more than {in_bytes(nbytes)}" if nbytes else "lower it"
    what, how = _WHAT_LOWERS[kind]
    by = f" ({view.run.either(*how)})" if how is not None else ""
    yield Advice(
        f"activations are only {nbytes / view.peak:.0%} of the peak{view.where}, in the {_moment(profile)}: "
        f"recompute cannot {limit}; first lower {what}{by}: {view.of_peak(profile.at_peak[kind])}",
        None,
    )


def _policy_that_keeps_less(view: View) -> Iterator[Advice]:
    """What blocks keep where they are not recomputed whole, or make where they are."""
    profile, run = view.profile, view.run
    if profile is None or run.plan is None:
        return
    mode = run.mode_of(view.rank.stage)
    stronger = STRONGER.get(mode)
    kind: Kind = "recompute" if mode in ("full", "segments") else "activations"
    nbytes = view.of_blocks(profile, kind)
    # The piece that runs again needs its own in any case: the larger half of a block, or one block of several.
    ran = {span.module for span in profile.spans} & view.blocks
    pieces = {"full": 2, "segments": run.segment}.get(mode, len(ran)) or 1
    gain = _gain(profile, nbytes * (pieces - 1) / pieces, _lifetimes(profile, view.blocks))
    if stronger is None or gain < LARGE * view.peak or view.uneven_stages is not None:
        return
    what = f"{view.of_peak(nbytes)}{view.where}, with {run.either(f'ckpt={mode}', f'the policy {mode!r}')}"
    if kind == "recompute":
        key = _policy(view, "nested", {"k": "1", "inner": "[attention,mlp]"} if mode == "full" else {})
        text = f"what blocks compute again is {what}: {key} does it in smaller pieces"
    else:
        less = f" (so the figure); {_policy(view, stronger)} frees less, and computes less again"
        only = f"{_policy(view, 'full')} keeps only their inputs{less if stronger != 'full' else ''}"
        text = f"what blocks keep for backward is {what}: {only}"
    yield Advice(f"{text}{run.either('; launch/sweep.py compares their costs', '')}", gain)


def _lifetimes(profile: StepProfile, modules: Iterable[str]) -> list[tuple[float, float]]:
    """For each micro-batch, from the forward of some modules until their backward has ended."""
    wanted = set(modules)
    times: dict[int | None, list[float]] = defaultdict(list)
    for span in profile.spans:
        if span.module in wanted:
            times[span.micro_batch] += (span.start_s, span.end_s)
    return [(min(found), max(found)) for found in times.values()]


def _gain(profile: StepProfile, nbytes: float, alive: Sequence[tuple[float, float]]) -> int:
    """How far the peak falls without some bytes: no further than to the highest moment at which they were not alive.

    Args:
        alive: from when to when they are, in seconds of the step; none where it is not known.
    """
    if not alive:
        return int(nbytes)
    totals = zip(profile.times_s, zip(*profile.timeline.values(), strict=True), strict=True)
    beside = [sum(kinds) for time, kinds in totals if not any(start <= time <= end for start, end in alive)]
    return int(min(nbytes, profile.peak_bytes - max(beside, default=0)))


def _policy(view: View, mode: str, options: Mapping[str, str] | None = None) -> str:
    """The keys that give the heaviest rank's stage another policy."""
    modes, options = list(view.run.modes), options or {}
    if view.run.engine is None:
        return f"the policy {mode!r}"
    if len(modes) == 1:
        return " ".join([f"ckpt={mode}", *(f"ckpt.{name}={value}" for name, value in options.items())])
    inside = ", ".join([f"mode: {mode}", *(f"{name}: {value}" for name, value in options.items())])
    modes[view.rank.stage or 0] = f"{{{inside}}}" if options else mode
    return f"'ckpt.per_stage=[{','.join(modes)}]'"


def _moment(profile: StepProfile) -> str:
    return {"optimizer": "optimizer step", "other": "engine's own work"}.get(profile.phase, profile.phase)


def _highest(phases: Iterable[Phase]) -> int:
    return max((phase.peak_bytes for phase in phases), default=0)


RULES = (
    _logits,
    _attention_scores,
    _optimizer_step,
    _unsharded_gradients,
    _whole_blocks,
    _few_activations,
    _policy_that_keeps_less,
)
