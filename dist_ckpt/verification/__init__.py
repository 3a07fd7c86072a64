"""Proof that a plan changes memory and recomputed FLOPs, and nothing else."""

from __future__ import annotations

from dist_ckpt.verification.findings import Finding, GradientCheck, Verification, merge
from dist_ckpt.verification.observe import Observation, Observer
from dist_ckpt.verification.proof import judge, untouched, verify

__all__ = [
    "Finding",
    "GradientCheck",
    "Observation",
    "Observer",
    "Verification",
    "judge",
    "merge",
    "untouched",
    "verify",
]
