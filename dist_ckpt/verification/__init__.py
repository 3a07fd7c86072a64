"""Proof that a plan changes memory and recomputed FLOPs, and nothing else."""

from __future__ import annotations

from dist_ckpt.verification.findings import Finding, GradientCheck, Verification, merge
from dist_ckpt.verification.observe import Observation, Observer
from dist_ckpt.verification.proof import judge, like_with_a_plan, untouched, verify

__all__ = [
    "Finding",
    "GradientCheck",
    "Observation",
    "Observer",
    "Verification",
    "judge",
    "like_with_a_plan",
    "merge",
    "untouched",
    "verify",
]
