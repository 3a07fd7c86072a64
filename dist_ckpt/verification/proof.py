"""The proof of a plan: one real step without and with it, on copies, and what differs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from dist_ckpt.cost import LossFn, ModelInput, default_loss
from dist_ckpt.errors import DistCkptError, PlanError
from dist_ckpt.guards.caches import switch_off_caches
from dist_ckpt.names import is_plain
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.planning import make_plan
from dist_ckpt.policy import PolicySpec
from dist_ckpt.verification.causes import causes
from dist_ckpt.verification.effects import (
    NOISE_FACTOR,
    ROUNDING,
    Noise,
    compare_gradients,
    effects,
    noise_of,
    of_state,
)
from dist_ckpt.verification.failures import failure
from dist_ckpt.verification.findings import Finding, Verification, fold
from dist_ckpt.verification.observe import Observation, Observer
from dist_ckpt.verification.state import Keepsake, Roots
from dist_ckpt.verification.streams import streams_of
from dist_ckpt.wrap.apply import apply_plan, remove_plan
from dist_ckpt.wrap.module import is_recomputed


def verify(
    model: nn.Module,
    batch: ModelInput,
    loss_fn: LossFn | None,
    plan: Plan | PolicySpec,
    *,
    tolerance: float = 0.0,
) -> Verification:
    """Runs forward and backward without and with a plan and reports all that the plan changes.

    Compared are the loss, every gradient, buffers, random streams, and the Python state that forwards leave behind; and
    within the plan's own run, what each module computes in its recompute with what it computed in its forward. Memory
    and FLOPs are measured. The step runs for real, three times, on copies of the model and the batch; the model,
    random generators, and what the step's code keeps in globals and closures are left as they are. A model in eval
    mode is proven in training mode.

    Args:
        model: the whole model before sharding and compiling, with or without a plan applied.
        batch: a micro-batch as the model takes it: a mapping (keyword arguments), a sequence (positional ones) or a
            tensor.
        loss_fn: (model, batch) → scalar loss, by default :func:`~dist_ckpt.cost.default_loss`. It has to call the
            model that it is given.
        plan: a plan, or a policy in any form that :func:`~dist_ckpt.make_plan` takes.
        tolerance: largest relative difference of a gradient or buffer that counts as equal. 0: every bit.

    Raises:
        PlanError: the plan does not fit the model, or the model or the batch cannot be copied.
        Exception: whatever the step raises without a plan.
    """
    loss_fn = loss_fn or default_loss
    if any(p.is_meta for p in model.parameters()):
        raise PlanError("verify runs a step for real, and this model has no memory: it is on the meta device")
    if not is_plain(model):
        raise PlanError(
            "verify needs the model before sharding and compiling; launch/verify.py proves a plan under an engine"
        )
    if not isinstance(plan, Plan):
        plan = make_plan(model, plan, batch, loss_fn)
    with untouched(model, loss_fn) as start_over:
        runs = []
        for asked in (Plan(), Plan(), plan):
            start_over()
            runs.append(_observed(model, batch, loss_fn, plan, asked))
            if asked is not plan and runs[-1].error is not None:
                raise runs[-1].error
        base, again, planned = runs
    if not any(grad is not None for grad in base.grads.values()):
        raise PlanError("no parameter has a gradient: loss_fn(model, batch) has to call the model that it is given")
    return judge(base, again, planned, plan, tolerance)


def judge(base: Observation, again: Observation, planned: Observation, plan: Plan, tolerance: float) -> Verification:
    """The outcome of three observed runs of the same step: two without the plan, one with it."""
    noise = noise_of(base, again)
    allowed = max(tolerance, NOISE_FACTOR * noise.relative)
    checks = compare_gradients(base, planned, allowed) if planned.error is None else ()
    findings = causes(base, planned, noise)
    has_cause = bool(findings)
    if planned.error is not None and not (has_cause and isinstance(planned.error, CheckpointError)):
        findings.append(failure(planned))
    elif planned.error is None:
        findings += effects(base, planned, checks, allowed, noise)
        if not has_cause:
            findings += of_state(base, planned, noise.state)
    if noise.relative > ROUNDING:
        findings.insert(0, _unprovable(noise))
    return Verification(
        mode=str(plan.policy.get("mode", "none")),
        findings=fold(findings),
        has_failed=planned.error is not None,
        is_refused=isinstance(planned.error, DistCkptError),
        notes=tuple(_notes(base, planned, plan, noise)),
        gradients=checks,
        losses=tuple(float(loss) for loss in base.losses if loss.numel() == 1),
        regions=sum(1 for _ in plan.all_regions()),
        recomputes=sum(len(checkpoint.recomputes) or checkpoint.was_compared for checkpoint in planned.checkpoints),
        buffers=len(base.buffers),
        streams=tuple(base.streams[0]),
        saved_bytes=planned.saved_bytes,
        baseline_saved_bytes=base.saved_bytes,
        flops=planned.flops,
        baseline_flops=base.flops,
        stage=planned.stage,
    )


def like_with_a_plan(model: nn.Module, plan: Plan) -> None:
    """Makes a model that has no plan differ from one that has by the plan alone, and not by what comes along with it.

    A key/value cache lays keys out otherwise in memory, and that rounds gradients otherwise.
    """
    if plan.regions and not any(map(is_recomputed, model.modules())):
        switch_off_caches(model)


def _observed(model: nn.Module, batch: Any, loss_fn: LossFn, plan: Plan, applied: Plan) -> Observation:
    copied, copied_batch = _copy(model), _copy(batch)
    remove_plan(copied)
    apply_plan(copied, applied)
    like_with_a_plan(copied, plan)
    if not copied.training:
        copied.train()
    observer = Observer(copied, plan, loss_fn, copied_batch, original=model)

    def step() -> None:
        loss = loss_fn(copied, copied_batch)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise PlanError("loss_fn(model, batch) has to return a scalar tensor that needs a gradient")
        observer.forward_ended(loss, measure=True)
        loss.backward()
        observer.boundary()

    with torch.enable_grad():
        return observer.run(step)


@contextmanager
def untouched(model: nn.Module, loss_fn: LossFn) -> Iterator[Any]:
    """Gives a function that makes the state outside of the model what it was, and calls it in the end."""
    kept = Keepsake(Roots(model, loss_fn, None))
    streams = [(stream, stream.state()) for stream in streams_of({p.device for p in model.parameters()}, {})]

    def start_over() -> None:
        kept.put_back()
        for stream, state in streams:
            stream.restore(state)

    try:
        yield start_over
    finally:
        start_over()


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        what = type(value).__name__ if isinstance(value, nn.Module) else "the batch"
        raise PlanError(
            f"verify runs on copies, and {what} cannot be copied ({type(error).__name__}: {error}). A tensor that an "
            "earlier forward has left in an attribute, with its graph, is a common cause: delete it first"
        ) from error


def _unprovable(noise: Noise) -> Finding:
    return Finding(
        noise.where,
        f"the step itself is not deterministic: two runs without the plan differ by {noise.relative:.2g} of its "
        "largest element, so nothing can be proven",
        "draw from generators that can be put back (torch, numpy, random), not from the clock or the system",
    )


def _notes(base: Observation, planned: Observation, plan: Plan, noise: Noise) -> Iterator[str]:
    if planned.error is not None:
        yield f"the step fails with the plan ({type(planned.error).__name__}), so what follows was not compared"
    if noise and noise.relative <= ROUNDING:
        yield (
            f"the step itself is not deterministic: two runs without the plan differ by up to {noise.relative:.2g} of "
            f"the largest element ({noise.where}); differences with the plan up to {NOISE_FACTOR:g} times that count "
            "as equal"
        )
    here = set(planned.names.values())  # what is not lies in another stage of a pipeline
    regions = [one for one in plan.all_regions() if not one.save.offloads_everything and here & set(one.modules)]
    recomputed = [checkpoint for checkpoint in planned.checkpoints if checkpoint.recomputes or checkpoint.was_compared]
    if regions and not recomputed and planned.error is None:
        yield "no region was recomputed in this step: nothing in them needs a gradient, or none was called"
    called = {event.module for event in planned.calls}
    silent = [name for region in plan.all_regions() for name in region.modules if name in here - called]
    if silent and recomputed and not planned.is_compiled:
        yield f"not called in this step, so not proven: {', '.join(fold_names(tuple(silent)))}"
    if not (base.is_complete and planned.is_complete):
        yield "the step's state is too large to be compared as a whole: the first part of it was"
