"""How much memory of each kind is alive, moment by moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt.memory.profile.allocations import Allocation
from dist_ckpt.memory.profile.step_profile import KINDS, Kind

MAX_POINTS = 1000
"""Of a thinned curve."""


@dataclass(frozen=True)
class Timeline:
    """Bytes of each kind from each of some moments until the next."""

    times: tuple[int, ...]
    """Nanoseconds, growing."""
    by_kind: tuple[tuple[int, ...], ...]
    """For each moment the bytes of all :data:`KINDS`, in their order."""

    @staticmethod
    def of(allocations: Iterable[tuple[Allocation, Kind]], start: int, end: int) -> Timeline:
        """The curve between two moments, which it both contains."""
        steps: list[tuple[int, int, int]] = []
        for one, kind in allocations:
            place = KINDS.index(kind)
            begins = start if one.start is None else max(one.start, start)
            if begins <= end and (one.end is None or one.end > begins):
                steps.append((begins, one.nbytes, place))
                if one.end is not None and one.end <= end:
                    steps.append((one.end, -one.nbytes, place))
        times, curve, now = [start], [[0] * len(KINDS)], [0] * len(KINDS)
        for at, change, place in sorted(steps, key=lambda step: (step[0], step[1])):
            now[place] += change
            if at != times[-1]:
                times.append(at)
                curve.append(list(now))
            else:
                curve[-1] = list(now)
        if times[-1] < end:
            times.append(end)
            curve.append(list(now))
        return Timeline(tuple(times), tuple(map(tuple, curve)))

    def peak(self, start: int, end: int) -> int:
        """Position of the highest moment in a span of time, the first if there are several.

        What is alive when the span begins is a part of it.
        """
        first = max((p for p, at in enumerate(self.times) if at <= start), default=0)
        inside = [p for p in range(first, len(self.times)) if self.times[p] < end] or [first]
        return max(inside, key=lambda p: (sum(self.by_kind[p]), -p))

    def at(self, position: int) -> dict[Kind, int]:
        """Bytes of every kind from one of the moments on."""
        return dict(zip(KINDS, self.by_kind[position], strict=True))

    def total_at(self, moment: int) -> int:
        """All bytes alive at any moment."""
        return sum(self.by_kind[max((p for p, at in enumerate(self.times) if at <= moment), default=0)])

    def thinned(self, points: int = MAX_POINTS) -> Timeline:
        """At most so many moments: of each stretch its highest and its lowest, so that no peak is lost."""
        if len(self.times) <= points:
            return self
        stretches = max(points // 2 - 1, 1)
        kept = {0, len(self.times) - 1}
        for number in range(stretches):
            first, last = (len(self.times) * n // stretches for n in (number, number + 1))
            inside: Sequence[int] = range(first, last)
            kept.add(max(inside, key=lambda p: sum(self.by_kind[p])))
            kept.add(min(inside, key=lambda p: sum(self.by_kind[p])))
        places = sorted(kept)
        return Timeline(tuple(self.times[p] for p in places), tuple(self.by_kind[p] for p in places))
