"""What to try next, from what a run has measured: sentences with the numbers behind them.

Each rule looks at one cause. It says nothing where the bytes are a small share of the peak, nor where the peak would
only move to another moment of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dist_ckpt.memory.profile.step_profile import StepProfile
from dist_ckpt.memory.records import MemoryReport
from dist_ckpt.report.advice import across, deep
from dist_ckpt.report.advice.facts import RunFacts
from dist_ckpt.report.advice.view import Advice, View

__all__ = ["Advice", "RunFacts", "advice"]


def advice(report: MemoryReport, profiles: Sequence[StepProfile], run: RunFacts) -> tuple[Advice, ...]:
    """What to try next, the largest gain first.

    Args:
        report: of all ranks; that of the deep step where there was one.
        profiles: of the deep step, of each rank or of some; without, only what a report shows is advised.
        run: what is known of the run besides its memory.
    """
    view = View.of(report, profiles, run)
    found = [one for rule in (*deep.RULES, *across.RULES) for one in rule(view)] if view.peak else []
    return tuple(sorted(found, key=lambda one: -math.inf if one.gain_bytes is None else one.gain_bytes, reverse=True))
