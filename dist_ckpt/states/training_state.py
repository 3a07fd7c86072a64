"""Saving and loading a training state: weights, optimizer moments, random generators, and what the loop adds.

The layout is the same for every engine and number of ranks: tensors are stored under the plain model's names, so that
a state saved under DDP on four ranks loads under FSDP2 on two, under FSDP1, or in one process, bit for bit. These
functions are collective: either every rank returns, or every rank raises the same :class:`StateError`. All ranks need
access to the same file system. What differs between engines is in a :class:`~dist_ckpt.states.source.StateSource`;
:class:`~dist_ckpt.states.deepspeed.DeepSpeedSource` is that of a DeepSpeed engine.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.compat.dcp import StateReader, StateWriter
from dist_ckpt.compat.dcp_pieces import PieceLoadPlanner, PieceSavePlanner
from dist_ckpt.errors import StateError
from dist_ckpt.states.agreement import agreed, rank_and_world_size, together
from dist_ckpt.states.files import StateFolder, open_folder, prepare_folder, seal_folder
from dist_ckpt.states.fit import check_fit, check_same
from dist_ckpt.states.modules import ModuleSource
from dist_ckpt.states.optimizer import PREFIX
from dist_ckpt.states.source import MODEL_PREFIX, Entry, Inventory, StateSource

_RNG = "rng"


def save_training_state(path: str | Path, model: nn.Module, optimizer: Optimizer, extra: Mapping[str, Any]) -> None:
    """Writes a training state into the folder ``path``, which is empty or does not exist. Every rank must call it.

    Changes neither weights nor optimizer nor generators: saving has no effect on the training. A tied weight is
    stored once, under its first name. Of a buffer that differs between ranks, one rank's is stored.

    Args:
        model: a plain module in one process, or one under DDP, FSDP1 (``use_orig_params=True``) or FSDP2.
        optimizer: made from the wrapped model's parameters.
        extra: what the loop wants back, JSON-serializable (step, position, …); rank 0's is stored.

    Raises:
        StateError: on every rank: the folder is in use, a file cannot be written, ``extra`` is not JSON, or the state
            of the model or the optimizer holds anything but tensors.
    """
    save_state(path, ModuleSource(model, optimizer), extra)


def load_training_state(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Loads a training state into model, optimizer and random generators. Every rank must call it.

    Every file is verified, and every name and shape compared, before anything is changed. Nothing in the state is
    executed. Gradients are dropped. Of the optimizer, the moments alone are restored: its groups
    keep the options that they have, the learning rate among them.

    Returns:
        The ``extra`` of the save, and under ``"rng"`` whether the random generators go on where they were. False if
        the state is of another number of ranks: its generators cannot be mapped to these, which stay as they are.

    Raises:
        StateError: on every rank: names the file that is missing, damaged, foreign or not trusted, or
            says how the state does not fit the model or the optimizer. Weights and optimizer are then
            unchanged, except if a shard was forged together with its checksum: that is found while reading weights.
    """
    return load_state(path, ModuleSource(model, optimizer))


def save_state(path: str | Path, source: StateSource, extra: Mapping[str, Any]) -> None:
    """:func:`save_training_state` of any training."""
    folder = Path(path)
    rank, world_size = rank_and_world_size()

    def inspect() -> Inventory:
        _check_extra(extra)
        return source.inventory()

    with _quiet():
        source.settle()
        inventory = _of_all_stages(source, inspect)
    stepped = any(together(source.stepped))
    prepare_folder(folder)
    with _quiet():
        tensors = {**source.saved_weights(), **(source.saved_moments() if stepped else {})}
        tensors |= {_rng_key(rank, kind): state for kind, state in rng_states().items()}
        _run(folder, lambda: dcp.save(tensors, storage_writer=StateWriter(folder), planner=PieceSavePlanner()))
    record = {
        "torch": torch.__version__,
        "world_size": world_size,
        "tied": dict(inventory.tied),
        "optimizer": {"kind": inventory.kind, "parameters": sorted(inventory.parameters), "stepped": stepped},
        "extra": dict(extra),
    }
    seal_folder(folder, record)


def load_state(path: str | Path, source: StateSource) -> dict[str, Any]:
    """:func:`load_training_state` into any training."""
    folder = Path(path)
    state = open_folder(folder)
    with _quiet():
        source.settle()
        inventory = _of_all_stages(source, source.inventory)

    def fit() -> None:
        check_fit(folder, "model", MODEL_PREFIX, inventory.weights, state.entries)
        check_same(inventory, state.record["optimizer"], str(folder))

    agreed(fit)
    rng = _rng_targets(state)
    remember = source.forget()
    try:
        with _quiet():
            if state.record["optimizer"]["stepped"]:
                moments = source.moments_to_fill(state.entries.keys())
                _check_moments_fit(state, source, moments)
                read_tensors(state, dict(moments))
                agreed(lambda: source.check_moments(str(folder)))
            read_tensors(state, {**source.weights_to_fill(), **rng})
            source.adopt()
    except StateError:
        remember()
        raise
    states = {key.rpartition(".")[2]: tensor for key, tensor in rng.items()}
    if states:
        agreed(lambda: set_rng_states(states))
    return {**state.record["extra"], _RNG: bool(states)}


def _of_all_stages(source: StateSource, inspect: Callable[[], Inventory]) -> Inventory:
    """What ``inspect`` finds on this rank, and if ranks have different parameters, what it finds on all."""
    if not source.staged:
        return agreed(inspect)
    stages = together(inspect)
    return Inventory(
        stages[0].kind,
        frozenset().union(*(stage.parameters for stage in stages)),
        {other: first for stage in stages for other, first in stage.tied.items()},
        {key: entry for stage in stages for key, entry in stage.weights.items()},
    )


def _check_moments_fit(state: StateFolder, source: StateSource, moments: Mapping[str, Any]) -> None:
    here = {key: Entry(value.size(), value.dtype) for key, value in moments.items()}
    if source.staged:
        here = {key: entry for stage in together(lambda: here) for key, entry in stage.items()}
    agreed(lambda: check_fit(state.path, "optimizer", PREFIX, here, state.entries))


def read_tensors(state: StateFolder, tensors: dict[str, Any]) -> None:
    """Reads a state's values into the tensors with the same keys, in place. Every rank must call it.

    Raises:
        StateError: a file does not hold the tensors that it should; some tensors may have been filled.
    """
    reader, planner = StateReader(state.path, state.metadata), PieceLoadPlanner(flatten_state_dict=False)
    with _quiet():
        _run(state.path, lambda: dcp.load(tensors, storage_reader=reader, planner=planner))


def rng_states() -> dict[str, Tensor]:
    """The states of this process's default generators: ``cpu``, and ``cuda`` (current device) if in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Tensor]) -> None:
    """Restores what :func:`rng_states` returned; the state of a device that is not available here is ignored.

    Raises:
        StateError: these are not states of generators.
    """
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, RuntimeError) as error:
        raise StateError(f"these are not states of random generators: {error}") from error


def _rng_targets(state: StateFolder) -> dict[str, Tensor]:
    """Tensors for this rank's generator states, by key; none if the state is of another number of ranks."""
    rank, world_size = rank_and_world_size()
    if state.record["world_size"] != world_size:
        return {}
    sizes = {key: state.entries[key].size for kind in ("cpu", "cuda") if (key := _rng_key(rank, kind)) in state.entries}
    return {key: torch.empty(size, dtype=torch.uint8) for key, size in sizes.items()}


def _rng_key(rank: int, kind: str) -> str:
    return f"{_RNG}.{rank}.{kind}"


def _check_extra(extra: Mapping[str, Any]) -> None:
    if _RNG in extra:
        raise StateError(f"extra: the key {_RNG!r} is taken: generator states are saved with every state")
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"extra: is not JSON: {error}") from error


def _run(folder: Path, action: Callable[[], Any]) -> None:
    """Runs a collective of DCP, which reports every rank's failure to all; turns that into one message."""
    try:
        action()
    except dcp.CheckpointException as failure:  # a BaseException, and the same on every rank
        rank, (error, _) = min(failure.failures.items())
        if not isinstance(error, Exception):  # an interrupt
            raise error from failure
        message = str(error) if isinstance(error, StateError) else f"{folder}: rank {rank}: {error}"
        raise StateError(message) from failure


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings of DCP and FSDP1 about their own internals, and about running without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.")
        yield
