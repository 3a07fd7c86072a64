"""Saving and loading a training state: weights, optimizer, random generators, and what the loop adds.

One layout for every engine and number of ranks: tensors lie in the folder under the plain model's names, so that a
state saved under DDP on four ranks loads under FSDP2 on two, under FSDP1, or in one process, bit for bit. Every rank
calls, and then every rank returns or every rank raises the same :class:`StateError`. The ranks share one file system.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dist_ckpt.compat.dcp import StateReader, StateWriter
from dist_ckpt.engines import optimizer_state
from dist_ckpt.engines.agreement import own_part, rank_and_world_size, together
from dist_ckpt.engines.state_files import StateFolder, open_folder, prepare_folder, seal_folder
from dist_ckpt.engines.state_fit import check_fit
from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrap, unwrapped_name

MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_RNG_KEY = "rng"


def save_training_state(
    path: str | Path, model: nn.Module, optimizer: Optimizer, extra: Mapping[str, Any]
) -> None:
    """Writes a training state into the folder ``path``, which must not exist or be empty. Every rank must call it.

    Changes neither weights, optimizer nor generators: training goes on as it would have without. A tied weight is
    stored once; of a buffer that differs between ranks one rank's copy is.

    Args:
        model: a plain module in one process, or wrapped by DDP, FSDP1 (``use_orig_params=True``) or FSDP2.
        optimizer: made from the wrapped model's parameters.
        extra: what the loop wants back, as JSON can hold it (step, position, …); rank 0's is kept.

    Raises:
        StateError: on every rank alike: the folder is in use, a file cannot be written, or something in ``extra``, the
            model or the optimizer is neither a tensor nor plain.
    """
    folder = Path(path)
    _reshard(model)

    def inspect() -> tuple[_Names, dict[str, Any], bool]:
        _check_extra(extra)
        names = _names(model)
        groups = optimizer_state.group_names(optimizer, names.stored)
        return names, optimizer_state.describe(optimizer, groups), bool(optimizer.state)

    names, described, has_state = own_part(inspect)
    stepped = any(together(lambda: has_state))
    prepare_folder(folder)
    rank, world_size = rank_and_world_size()
    with _quiet():
        tensors = own_part_of_model(get_model_state_dict(model), names)
        if stepped:  # DCP would make a fresh optimizer step, and count it
            moments = optimizer_state.moments(model, optimizer, names.canonical)
            tensors |= optimizer_state.named_moments(moments, names.canonical)
            if not has_state:  # FSDP1 on more ranks than elements: no shard here, but DCP has made this rank step
                optimizer.state.clear()
        tensors |= {_rng_key(rank, kind): state for kind, state in rng_states().items()}
        _run_dcp(folder, lambda: dcp.save(tensors, storage_writer=StateWriter(folder)))
    record = {
        "torch": torch.__version__,
        "world_size": world_size,
        "tied": names.canonical,
        "optimizer": {**described, "stepped": stepped},
        "extra": dict(extra),
    }
    seal_folder(folder, record)
