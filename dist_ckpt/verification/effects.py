"""What came out of a step, compared: gradients, losses, buffers, random streams."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_ckpt.verification.differences import first_other_call
from dist_ckpt.verification.digest import fingerprint
from dist_ckpt.verification.findings import Finding, GradientCheck, of_gradients
from dist_ckpt.verification.observe import Observation, shown

NOISE_FACTOR = 8.0
"""How many times the difference of two runs without a plan a difference with it may be."""
ROUNDING = 1e-3
"""Relative differences up to this may come from the order of arithmetic; larger ones make a proof impossible."""
SMALLEST = 5e-324
"""Stands for a difference in bits alone: the sign of a zero, the payload of a NaN."""


@dataclass(frozen=True)
class Noise:
    """How much two runs of the same step differ without a plan."""

    relative: float = 0.0
    """Largest relative difference of a gradient, buffer or loss."""
    where: str = ""
    modules: frozenset[str] = frozenset()
    """Modules that computed other values in their forward."""
    state: frozenset[object] = field(default_factory=frozenset)
    """Streams and pieces of state that ended elsewhere."""

    def __bool__(self) -> bool:
        return bool(self.relative)


def noise_of(one: Observation, other: Observation) -> Noise:
    """What two runs of the same step without a plan have shown."""
    found = [(check.relative, check.name) for check in compare_gradients(one, other, 0.0) if check.status == "differs"]
    found += [(relative, name) for name, _, relative in _differing(one.buffers, other.buffers)]
    found += [(relative, "the loss") for _, _, relative in _differing(_losses(one), _losses(other))]
    relative, where = max(found, default=(0.0, ""))
    modules = {a.module for a, b in zip(one.calls, other.calls, strict=False) if a != b}
    state = {key for key in one.looks[-1] if one.looks[-1][key] != other.looks[-1].get(key)}
    streams = {name for name in one.streams[-1] if one.streams[-1][name] != other.streams[-1].get(name)}
    return Noise(relative, where, frozenset(modules), frozenset(state | streams))


def compare_gradients(base: Observation, planned: Observation, tolerance: float) -> tuple[GradientCheck, ...]:
    """One check a trainable parameter; gradients within a relative tolerance count as equal."""
    checks = []
    for name, wanted in base.grads.items():
        found = planned.grads.get(name)
        if wanted is None or found is None:
            status = "none" if wanted is found else "only with the plan" if wanted is None else "only without the plan"
            checks.append(GradientCheck(name, status))  # type: ignore[arg-type]
        else:
            max_abs, relative = _difference(found, wanted)
            is_equal = relative <= tolerance
            checks.append(GradientCheck(name, "equal" if is_equal else "differs", max_abs, relative))
    return tuple(checks)


def effects(
    base: Observation, planned: Observation, checks: Sequence[GradientCheck], tolerance: float, noise: Noise
) -> Iterator[Finding]:
    """What the plan has changed in the outcome of the step."""
    yield from _of_forward(base, planned, tolerance, noise)
    yield from of_gradients(checks)
    for name, max_abs, relative in _differing(base.buffers, planned.buffers):
        if relative > tolerance:
            yield Finding(name, f"the buffer differs after the step, by up to {max_abs:.3g} ({relative:.2g} relative)")
    for name, number in base.numbers.items():
        if (other := planned.numbers[name]) != number and abs(other - number) > tolerance * abs(number):
            yield Finding(name, f"is {other} with the plan and {number} without")


def of_state(base: Observation, planned: Observation, noisy: Collection[object]) -> Iterator[Finding]:
    """Streams and state that end elsewhere, where no recompute is to blame."""
    for name, state in base.streams[-1].items():
        if planned.streams[-1].get(name) != state and name not in noisy:
            yield Finding(f"random stream {name}", "ends elsewhere with the plan")
    before, after = base.looks[-1], planned.looks[-1]
    for owner, path in dict.fromkeys((*before, *after)):
        without, found = before.get((owner, path)), after.get((owner, path))
        if without != found and (owner, path) not in noisy:
            values = f"{shown(found)} with the plan, {shown(without)} without"
            yield Finding(owner or "the model", f"{path or 'its value'} ends as {values}".strip())


def _of_forward(base: Observation, planned: Observation, tolerance: float, noise: Noise) -> Iterator[Finding]:
    losses = _differing(_losses(base), _losses(planned))
    if not any(relative > tolerance for _, _, relative in losses):
        return
    event = first_other_call(list(base.calls), list(planned.calls))
    where = "the loss" if event is None or event.module in noise.modules else event.module or "the model"
    text = "; ".join(f"{_mean(base, n):.6g} → {_mean(planned, n):.6g}" for n, _, _ in losses)
    yield Finding(where, f"the forward itself computes something else with the plan; loss {text}")


def _mean(seen: Observation, number: str) -> float:
    """A loss as it is; what a stage of a pipeline hands on, by its mean."""
    return float(seen.losses[int(number)].double().mean())


def _losses(seen: Observation) -> dict[str, Tensor]:
    return {str(number): loss for number, loss in enumerate(seen.losses)}


def _differing(base: Mapping[str, Tensor], planned: Mapping[str, Tensor]) -> list[tuple[str, float, float]]:
    """(name, largest difference, the same as a fraction of the largest element) where not every bit is the same."""
    return [
        (name, *_difference(planned[name], wanted))
        for name, wanted in base.items()
        if name in planned and fingerprint(planned[name]) != fingerprint(wanted)
    ]


def _difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    if fingerprint(found) == fingerprint(wanted):
        return 0.0, 0.0
    if found.shape != wanted.shape:
        return float("inf"), float("inf")
    dtype = torch.complex128 if wanted.is_complex() else torch.float64
    one, other = found.to(dtype).nan_to_num(), wanted.to(dtype).nan_to_num()
    max_abs, largest = float((one - other).abs().max()), float(other.abs().max())
    if not largest:
        return max_abs, float("inf") if max_abs else SMALLEST
    return max_abs, max(max_abs / largest, SMALLEST)
