"""Proof that a plan changes memory and recomputed FLOPs, and nothing else."""

from __future__ import annotations

from dist_ckpt.verification.findings import Finding, GradientCheck, Verification, merge
from dist_ckpt.verification.proof import verify

__all__ = ["Finding", "GradientCheck", "Verification", "merge", "verify"]
