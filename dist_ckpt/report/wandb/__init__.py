"""Weights & Biases: one run a job, fed by a process of its own (docs/wandb.md)."""

from __future__ import annotations

from dist_ckpt.report.wandb.sink import WandbSink

__all__ = ["WandbSink"]
