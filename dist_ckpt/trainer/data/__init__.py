"""Rows of token ids: deterministic given the seed, sharded by data-parallel rank, resumable to the sample."""

from __future__ import annotations

from dist_ckpt.trainer.data.config import DataConfig
from dist_ckpt.trainer.data.corpus import build_data
from dist_ckpt.trainer.data.rows import RowDataset, micro_batch

__all__ = ["DataConfig", "RowDataset", "build_data", "micro_batch"]
