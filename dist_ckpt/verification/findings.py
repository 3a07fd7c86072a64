"""What a proof says: its findings, and the figures of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dist_ckpt.memory.records import byte_unit, format_bytes
from dist_ckpt.plan import fold_names
from dist_ckpt.states.fit import listed


@dataclass(frozen=True)
class Finding:
    """Something that the plan changes and must not."""

    where: str
    """A module, a parameter, a random stream; several of a kind are folded: ``layers.{0-3}.attention``."""
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n  advice: {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class GradientCheck:
    """One trainable parameter's gradient without and with the plan."""

    name: str
    status: Literal["equal", "differs", "none", "only without the plan", "only with the plan"]
    """``none``: it has no gradient in either. ``only without the plan``: the plan has lost it."""
    max_abs: float = 0.0
    """Largest difference of an element."""
    relative: float = 0.0
    """The same, as a fraction of the gradient's largest element."""


@dataclass(frozen=True)
class Verification:
    """The outcome of running a step without and with a plan."""

    mode: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What does not speak against the plan but limits the proof."""
    has_failed: bool = False
    """The step could not be done with the plan."""
    is_refused: bool = False
    """One of the plan's own guards refused it when the step ran, as it would in training."""
    gradients: tuple[GradientCheck, ...] = ()
    losses: tuple[float, ...] = ()
    """Without the plan, one a micro-batch."""
    regions: int = 0
    """Regions of the plan, nested ones included."""
    recomputes: int = 0
    """Recomputes in the step's backward."""
    buffers: int = 0
    streams: tuple[str, ...] = ()
    """Sources of random numbers that were compared."""
    saved_bytes: int | None = None
    """Kept between forward and backward with the plan; ``None`` where it was not measured."""
    baseline_saved_bytes: int | None = None
    flops: int | None = None
    """Of the whole step with the plan; ``None`` for compiled code."""
    baseline_flops: int | None = None
    stage: int | None = None
    """Pipeline stage of the rank; figures are of that stage, and of all of them once merged."""

    @property
    def ok(self) -> bool:
        """Whether nothing but memory and recomputed FLOPs has changed."""
        return not self.findings

    def __str__(self) -> str:
        verdict = "proven: the step is the same without and with it" if self.ok else self._count()
        regions, recomputes = _counted(self.regions, "region"), _counted(self.recomputes, "recompute")
        lines = [f"verify: {self.mode}, {regions}, {recomputes}; {verdict}"]
        for number, finding in enumerate(self.findings, start=1):
            lines += [f"  {number}. {line}" if not n else f"     {line}" for n, line in _numbered(str(finding))]
        lines += [f"  {name:<10} {text}" for name, text in self._figures()]
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)

    def _count(self) -> str:
        return f"NOT proven, {len(self.findings)} finding{'s'[: len(self.findings) != 1]}"

    def _figures(self) -> list[tuple[str, str]]:
        checks = self.gradients
        equal = sum(check.status in ("equal", "none") for check in checks)
        figures = [
            ("loss", ", ".join(f"{loss:.6g}" for loss in self.losses[:4])),
            ("gradients", f"{equal} of {len(checks)} equal" if checks else "not compared"),
            ("compared", f"{self.buffers} buffers; random streams {', '.join(self.streams)}"),
        ]
        if self.saved_bytes is not None and self.baseline_saved_bytes is not None:
            unit = byte_unit([self.saved_bytes, self.baseline_saved_bytes])
            saved, baseline = (format_bytes(n, unit) for n in (self.saved_bytes, self.baseline_saved_bytes))
            figures.append(("memory", f"{saved} {unit} saved for backward, {baseline} {unit} without the plan"))
        if self.flops is not None and self.baseline_flops:
            added = self.flops - self.baseline_flops
            figures.append(
                ("FLOPs", f"{added:,} added to {self.baseline_flops:,} (+{added / self.baseline_flops:.1%})")
            )
        return figures


def of_gradients(checks: Sequence[GradientCheck]) -> tuple[Finding, ...]:
    """What there is to say about gradients."""
    found = []
    differing = [check for check in checks if check.status == "differs"]
    if differing:
        worst = max(differing, key=lambda check: check.relative)
        what = (
            f"gradients differ, {worst.name} the most: by up to {worst.max_abs:.3g}, {worst.relative:.2g} times its "
            "largest element"
        )
        found.append(Finding(_folded([check.name for check in differing]), what))
    for status, what in (
        ("only without the plan", "no gradient with the plan, and one without"),
        ("only with the plan", "a gradient with the plan, and none without"),
    ):
        names = [check.name for check in checks if check.status == status]
        if names:
            found.append(Finding(_folded(names), what))
    return tuple(found)


def fold(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings that say the same of several places, as one each."""
    places: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        known = places.setdefault((finding.what, finding.advice), [])
        where = finding.where or "the model"  # the root has no name
        if where not in known:
            known.append(where)
    return tuple(Finding(_folded(where), what, advice) for (what, advice), where in places.items())


def merge(ranks: Sequence[Verification]) -> Verification:
    """One report of what every rank found: each finding once, with the ranks if it is not all.

    Of each figure it has the largest of a rank, or in a pipeline the sum over stages of their largest.
    """
    found: dict[Finding, list[int]] = {}
    for rank, one in enumerate(ranks):
        for finding in one.findings:
            if finding not in of_gradients(one.gradients):  # said once for all ranks, which may hold parts of them
                found.setdefault(finding, []).append(rank)
    findings = tuple(
        finding if len(on) == len(ranks) else dataclasses.replace(finding, what=f"{finding.what} (on {_ranks(on)})")
        for finding, on in found.items()
    )
    gradients = {check.name: check for check in ranks[0].gradients}
    for check in (check for one in ranks for check in one.gradients):
        gradients[check.name] = max(gradients.get(check.name, check), check, key=_badness)
    return dataclasses.replace(
        ranks[0],
        findings=(*findings, *of_gradients(tuple(gradients.values()))),
        notes=tuple(dict.fromkeys(note for one in ranks for note in one.notes)),
        has_failed=any(one.has_failed for one in ranks),
        is_refused=any(one.is_refused for one in ranks),
        gradients=tuple(gradients.values()),
        losses=next((one.losses for one in ranks if one.losses), ()),  # only the last stage of a pipeline has any
        recomputes=_of_all(ranks, lambda one: one.recomputes) or 0,
        saved_bytes=_of_all(ranks, lambda one: one.saved_bytes),
        baseline_saved_bytes=_of_all(ranks, lambda one: one.baseline_saved_bytes),
        flops=_of_all(ranks, lambda one: one.flops),
        baseline_flops=_of_all(ranks, lambda one: one.baseline_flops),
        stage=None,
    )


def _of_all(ranks: Sequence[Verification], figure: Callable[[Verification], int | None]) -> int | None:
    most: dict[int | None, int] = {}
    for one in ranks:
        value = figure(one)
        if value is None:
            return None
        most[one.stage] = max(most.get(one.stage, 0), value)
    return sum(most.values())


def _badness(check: GradientCheck) -> tuple[int, float]:
    """A rank that holds nothing of a parameter has no gradient of it, and says less than one that has."""
    return {"none": 0, "equal": 1}.get(check.status, 2), check.max_abs


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s'[: len(numbers) != 1]} {', '.join(map(str, numbers))}"


def _folded(names: Sequence[str], most: int = 5) -> str:
    return listed(fold_names(tuple(names)), most)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s'[: number != 1]}"


def _numbered(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.splitlines()))
