"""The records as the rules of advice look at them, and the shares below which they say nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Kind, StepProfile
from dist_ckpt.memory.records import ACCOUNTED, MemoryReport, RankMemory, in_bytes
from dist_ckpt.plan import fold_names
from dist_ckpt.report.advice.facts import RunFacts

SHARE = 0.05
"""Of the peak: less than a twentieth is not worth a change. Batches of other lengths and an allocator's rounding move
a peak by about as much."""

LARGE = 0.25
"""Of the peak: from a quarter on, what a kind of memory holds decides which policy is right."""

UNEVEN = 0.10
"""Of the heaviest rank's peak: shards that do not divide evenly stay well below a tenth."""

STATES: tuple[Kind, ...] = ("params", "grads", "optimizer")

STRONGER = {
    "none": "selective", "every_k": "full", "first_n": "full", "selective": "full", "selective_attention": "full",
    "offload": "full", "full": "nested", "segments": "nested",
}  # fmt: skip
"""The next policy that keeps less."""


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    text: str
    """What is there, and what to do."""
    gain_bytes: int | None
    """About how far the peak of the rank that it is about would fall; None where it is no matter of bytes, or where
    they cannot be told before it is tried."""


@dataclass(frozen=True)
class View:
    """The records, seen from the heaviest rank."""

    report: MemoryReport
    profiles: Mapping[int, StepProfile]
    run: RunFacts
    rank: RankMemory
    """The heaviest one."""

    @staticmethod
    def of(report: MemoryReport, profiles: Sequence[StepProfile], run: RunFacts) -> View:
        by_rank = {profile.rank: profile for profile in profiles}
        deep = [rank for rank in report.ranks if rank.rank in by_rank]
        heaviest = max(deep, key=lambda r: by_rank[r.rank].peak_bytes) if deep else report.heaviest
        return View(report, by_rank, run, heaviest)

    @property
    def profile(self) -> StepProfile | None:
        return self.profiles.get(self.rank.rank)

    @property
    def made(self) -> tuple[Holding, ...]:
        """What forward, recompute and backward have made, and is there at the peak."""
        kinds = ("activations", "recompute", "temporary")
        return tuple(h for h in self.profile.holdings if h.kind in kinds) if self.profile is not None else ()

    @property
    def peak(self) -> int:
        return self.peak_of(self.rank)

    def peak_of(self, rank: RankMemory) -> int:
        """The measured peak, or what is accounted where nothing can say it."""
        profile = self.profiles.get(rank.rank)
        return profile.peak_bytes if profile is not None else rank.peak_or_accounted or 0

    def at_peak_of(self, rank: RankMemory) -> Mapping[str, int]:
        """Bytes by kind at the peak, or by category where there was no deep step."""
        profile = self.profiles.get(rank.rank)
        if profile is not None:
            return {kind: profile.at_peak[kind] for kind in KINDS}
        if rank.at_peak is not None:
            return {kind: count for kind, count in rank.at_peak.items() if kind != "phase"}
        return {kind: getattr(rank, kind) or 0 for kind in ACCOUNTED}

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The model's blocks: the plan's, or what runs under numbered names where nothing is recomputed."""
        if self.run.plan is not None and self.run.plan.blocks:
            return frozenset(self.run.plan.blocks)
        ran = {span.module for profile in self.profiles.values() for span in profile.spans}
        return frozenset(name for name in ran if name.rpartition(".")[2].isdecimal())

    def block_of(self, module: str | None) -> str | None:
        """The block that a module is, or lies in."""
        parts = (module or "").split(".")
        return next((b for n in range(len(parts), 0, -1) if (b := ".".join(parts[:n])) in self.blocks), None)

    def of_blocks(self, profile: StepProfile, kind: Kind) -> int:
        """Bytes of one kind in blocks at the peak: all but what is listed elsewhere, as small ones are not listed."""
        listed = (h for h in profile.holdings if h.kind == kind and self.block_of(h.module) is None)
        return profile.at_peak[kind] - sum(h.nbytes for h in listed)

    @cached_property
    def uneven_stages(self) -> tuple[RankMemory, RankMemory] | None:
        """The heaviest ranks of the heaviest stage and of the next one, where that is far below."""
        heaviest_of: dict[int, RankMemory] = {}
        for rank in self.report.ranks:
            if rank.stage is not None:
                heaviest_of[rank.stage] = max(heaviest_of.get(rank.stage, rank), rank, key=self.peak_of)
        if len(heaviest_of) < 2:
            return None
        first, second = sorted(heaviest_of.values(), key=self.peak_of, reverse=True)[:2]
        return (first, second) if self.peak_of(first) - self.peak_of(second) >= UNEVEN * self.peak_of(first) else None

    def matters(self, nbytes: float) -> bool:
        return nbytes >= SHARE * self.peak

    def of_peak(self, nbytes: float) -> str:
        """``1.250 GiB (40% of the peak)``."""
        is_measured = self.profile is not None or self.rank.peak is not None
        whole = "the peak" if is_measured else "what is accounted for"
        return f"{in_bytes(nbytes)} ({nbytes / self.peak:.0%} of {whole})"

    @property
    def where(self) -> str:
        """`` on rank 3``; nothing where there is one rank."""
        return f" on rank {self.rank.rank}" if len(self.report.ranks) > 1 else ""


def by_source(holdings: Iterable[Holding]) -> dict[str, int]:
    """Bytes by what allocated or holds them."""
    found: dict[str, int] = defaultdict(int)
    for holding in holdings:
        found[holding.source] += holding.nbytes
    return found


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2,5``."""
    numbers = tuple(map(str, sorted(ranks)))
    return f"rank{'s'[: len(numbers) > 1]} {fold_names(numbers)[0].strip('{}')}"
