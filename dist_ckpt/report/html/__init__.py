"""Runs as pages: one HTML file each, which needs nothing else."""

from __future__ import annotations

from dist_ckpt.report.html.report import write_report

__all__ = ["write_report"]
