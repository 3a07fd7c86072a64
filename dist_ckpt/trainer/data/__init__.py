"""Rows of token ids: deterministic given the seed, sharded by data-parallel rank, resumable to the sample.

Names load on first use: the configuration needs :class:`DataConfig` and is checked before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt.trainer.data.config import DataConfig
    from dist_ckpt.trainer.data.corpus import build_data
    from dist_ckpt.trainer.data.rows import RowDataset, micro_batch, micro_batches

_HOMES = {
    "DataConfig": "config",
    "RowDataset": "rows",
    "build_data": "corpus",
    "micro_batch": "rows",
    "micro_batches": "rows",
}

__all__ = ["DataConfig", "RowDataset", "build_data", "micro_batch", "micro_batches"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
