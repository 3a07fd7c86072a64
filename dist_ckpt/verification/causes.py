"""Why a recompute does otherwise than its forward, and what helps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dist_ckpt.compat.torch import failed_frame
from dist_ckpt.errors import DistCkptError
from dist_ckpt.verification.differences import Difference, first_difference, other_count
from dist_ckpt.verification.effects import Noise
from dist_ckpt.verification.findings import Finding
from dist_ckpt.verification.observe import Change, Observation, shown
from dist_ckpt.verification.record import Checkpoint, Run
from dist_ckpt.verification.state import Key

LEAVE_OUT = "leave the module out of the plan (ckpt.exclude)"
OF_STREAMS = (
    "draw from torch's own generators, on the CPU or the device of what the region is given, which a recompute "
    f"replays; or draw outside of the region and pass the numbers in; or {LEAVE_OUT}"
)
OF_CACHES = (
    "switch the cache off in training (Hugging Face: use_cache=False), or fill it outside of the region, or "
    + LEAVE_OUT
)
OF_NUMBERS = (
    "keep it in a buffer (register_buffer), which a recompute finds as its forward did and leaves alone, or change it "
    f"outside of the region, or {LEAVE_OUT}"
)
OF_EDITS = "edit a copy, or pass the tensor's values in by a buffer"
OF_FILLS = f"run the region to its end (ckpt.early_stop=false), or {LEAVE_OUT}"
UNKNOWN = f"pass in as an argument or a buffer what its forward reads, or {LEAVE_OUT}"


def of_choices(ops: Collection[str]) -> str:
    """Advice for a routing decision that a recompute takes anew."""
    named = ", ".join(f'"{op}"' for op in sorted(ops))
    return f'keep the decision of the forward: {{"mode": "selective", "save": [{named}]}}'


def causes(base: Observation, planned: Observation, noise: Noise) -> list[Finding]:
    """What went wrong in the recomputes of a step, module by module; what two runs without a plan do is no cause."""
    findings, explained = [], set[Any]()
    if isinstance(planned.error, DistCkptError):  # it ended at the first region that its guards refuse
        for stream, modules in base.draws.items():
            if stream not in base.replayed:
                findings += [Finding(m, f"it {_drawing(stream, m, base)}", OF_STREAMS) for m in modules]
        return findings
    state = {key: change for key, change in _changed_again(base, planned).items() if key not in noise.state}
    for difference in _differences(planned):
        if difference.module not in noise.modules:
            finding, reasons = _explained(difference, planned, state)
            findings.append(finding)
            explained |= reasons
    for stream, change in planned.stream_changes().items():
        known = base.stream_changes().get(stream)
        if change.in_backward and not (known and known.in_backward) and stream not in explained:
            for module in planned.draws.get(stream, ["a region"]):
                what = f"its recompute draws again: it {_drawing(stream, module, planned)}"
                findings.append(Finding(module, what, OF_STREAMS))
    for owner in dict.fromkeys(owner for owner, _ in state):
        keys = [key for key in state if key[0] == owner and key not in explained]
        if keys:
            what = f"its recompute changes what its forward has changed: {_told(keys, state)}"
            advice = _state_advice([state[key] for key in keys])
            findings += [Finding(module, what, advice) for module in planned.users.get(owner) or (owner,)]
    return findings


def _differences(planned: Observation) -> Iterator[Difference]:
    failed = planned.checkpoint_of(failed_frame(planned.error)) if planned.error is not None else None
    found: dict[Checkpoint, Difference] = {}
    for checkpoint in planned.checkpoints:
        runs = checkpoint.recomputes or ([Run(checkpoint)] if checkpoint.was_compared else [])
        difference = next((d for run in runs if (d := first_difference(checkpoint, run))), None)
        if difference is None and checkpoint is failed:
            difference = other_count(checkpoint)
        if difference is not None:
            found[checkpoint] = difference
    # Where what a nested region was given is recomputed wrongly, that is the finding, and not what follows.
    yield from (difference for checkpoint, difference in found.items() if checkpoint.outer not in found)


def _explained(difference: Difference, planned: Observation, state: dict[Key, Change]) -> tuple[Finding, set[Any]]:
    """A finding about a difference; and the streams and pieces of state that it speaks of."""
    module, what = difference.module, difference.what
    if difference.kind == "unfilled":
        return Finding(module, f"{what}: gradients are those of whatever was in its memory", OF_FILLS), set()
    reasons: list[str] = []
    spoken = set[Any]()
    advice = ""
    for stream, modules in planned.draws.items():
        change = planned.stream_changes().get(stream)
        moved = stream not in planned.replayed or (change is not None and change.in_backward)
        if moved and any(_related(module, other) for other in modules):
            reasons.append(f"it {_drawing(stream, module, planned)}")
            spoken.add(stream)
            advice = OF_STREAMS
    keys = _read_by(difference, planned)
    if keys and not reasons:
        changes = planned.changes()
        reasons.append(_told(keys, changes))
        spoken |= set(keys)
        advice = _state_advice([changes[key] for key in keys])
    if difference.choices:
        reasons.insert(0, f"{difference.choices[0]} chose otherwise")
        advice = of_choices(difference.choices) + (f"; or {advice}" if advice else "")
    edited = [label for label, region in planned.edited if region == difference.region]
    if edited and not reasons:
        reasons.append(f"{' and '.join(edited)} of the region was edited after its forward")
        advice = OF_EDITS
    because = "; ".join(reasons) or "it reads something else than its arguments that has changed since"
    return Finding(module, f"{what}: {because}", advice or UNKNOWN), spoken


def _changed_again(base: Observation, planned: Observation) -> dict[Key, Change]:
    """State that a backward with the plan changed, and that is not as it is after the same step without."""
    last, wanted = planned.looks[-1], base.looks[-1]
    without = base.changes()
    return {
        key: change
        for key, change in planned.changes().items()
        if change.in_backward and not (key in without and without[key].in_backward and last.get(key) == wanted.get(key))
    }


def _read_by(difference: Difference, planned: Observation) -> list[Key]:
    """State that changed in the forward and that the module to blame may read: its own, or else what is nearest."""
    ranked: dict[int, list[Key]] = {}
    for key, change in planned.changes().items():
        if change.in_forward and key[1] != "training":
            owner = key[0]
            users = planned.users.get(owner)
            distances = [_distance(difference.module, user, difference.region) for user in users or (owner,)]
            if users is not None:
                distances = [d + 1 for d in distances]
            ranked.setdefault(min(distances, default=9), []).append(key)
    nearest = min(ranked, default=9)
    return ranked[nearest] if nearest < 9 else []


def _distance(module: str, other: str, region: str) -> int:
    if module == other:
        return 0
    if other.startswith(f"{module}."):
        return 1
    is_around = module.startswith(f"{other}.") and (other == region or other.startswith(f"{region}."))
    return 2 if is_around else 9


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _drawing(stream: str, module: str, seen: Observation) -> str:
    where = (stream.removeprefix(f"{module}.") if module else stream).partition(" #")[0]
    return f"draws from {where}, which " + ("was not replayed" if stream in seen.replayed else "no checkpoint replays")


def _state_advice(changes: Collection[Change]) -> str:
    return OF_CACHES if any(map(_grows, changes)) else OF_NUMBERS


def _grows(change: Change) -> bool:
    """Whether something was added, as to a cache, rather than overwritten or counted."""
    values = [value for value in _steps(change) if value is not None]
    numbers = all(isinstance(value, (bool, int, float, complex)) for value in values)
    return not numbers and len({shown(value) for value in _steps(change)}) > 1


def _told(keys: Collection[Key], changes: dict[Key, Change], most: int = 2) -> str:
    """What changed, by the pieces that say most: those of which three states can be told apart first."""
    meaningful = [key for key in keys if changes[key].in_forward] or list(keys)
    order = sorted(meaningful, key=lambda key: len({shown(value) for value in _steps(changes[key])}), reverse=True)
    told = [_story(_named(key), changes[key]) for key in order[:most]]
    return "; ".join(told) + (f"; and {len(order) - most} more" if len(order) > most else "")


def _story(name: str, change: Change) -> str:
    values = [shown(value) for value in _steps(change)]
    if len(set(values)) == 1:
        return f"{name} ({values[0]}) had other values"
    left = f", which left {values[2]}" if len(values) == 3 else ""
    return f"{name} was {values[0]} for its forward and {values[1]} for its recompute{left}"


def _steps(change: Change) -> list[Any]:
    steps = [change.before, change.after_forward]
    return [*steps, change.after_backward] if change.in_backward else steps


def _named(key: Key) -> str:
    owner, path = key
    return path if " " not in owner else f"{owner}{path}"
