"""Saving and loading a training state: weights, optimizer moments, random generators, and what the loop adds.

The layout is the same for every engine and number of ranks: tensors are stored under the plain model's names, so that
a state saved under DDP on four ranks loads under FSDP2 on two, under FSDP1, or in one process, bit for bit. These
functions are collective: either every rank returns, or every rank raises the same :class:`StateError`. All ranks need
access to the same file system.
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
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dist_ckpt.compat.dcp import StateReader, StateWriter
from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrap, unwrapped_name
from dist_ckpt.states import optimizer as optimizer_state
from dist_ckpt.states.agreement import agreed, rank_and_world_size, together
from dist_ckpt.states.files import StateFolder, open_folder, prepare_folder, seal_folder
from dist_ckpt.states.fit import check_fit

MODEL_PREFIX = "model."
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
    folder = Path(path)
    rank, world_size = rank_and_world_size()
    _reshard(model)

    def inspect() -> tuple[_Names, dict[str, Any]]:
        _check_extra(extra)
        names = _names(model)
        return names, optimizer_state.describe(optimizer, names.stored)

    names, described = agreed(inspect)
    had_state = bool(optimizer.state)
    stepped = any(together(lambda: had_state))
    prepare_folder(folder)
    with _quiet():
        tensors: dict[str, Any] = _stored_tensors(get_model_state_dict(model), names)
        if stepped:  # for an optimizer without state DCP makes one, by a step that it would then remember
            moments = optimizer_state.moments(model, optimizer, names.canonical)
            tensors |= optimizer_state.named_moments(moments, names.canonical)
            if not had_state:  # FSDP1 with fewer elements than ranks: this one has no part of any parameter
                optimizer.state.clear()
        agreed(lambda: _check_tensors(tensors))
        tensors |= {_rng_key(rank, kind): state for kind, state in rng_states().items()}
        _run(folder, lambda: dcp.save(tensors, storage_writer=StateWriter(folder)))
    record = {
        "torch": torch.__version__,
        "world_size": world_size,
        "tied": names.canonical,
        "optimizer": {**described, "stepped": stepped},
        "extra": dict(extra),
    }
    seal_folder(folder, record)


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
    folder = Path(path)
    state = open_folder(folder)
    _reshard(model)
    with _quiet():
        model_dict = get_model_state_dict(model)

    def fit() -> _Names:
        names = _names(model)
        tensors = _stored_tensors(model_dict, names)
        _check_tensors(tensors)
        check_fit(folder, "model", MODEL_PREFIX, tensors, state.entries)
        described = optimizer_state.describe(optimizer, names.stored)
        optimizer_state.check_same(described, state.record["optimizer"], str(folder))
        return names

    names = agreed(fit)
    rng = _rng_targets(state)
    before = dict(optimizer.state)
    optimizer_state.forget(optimizer)
    try:
        with _quiet():
            moments = _moment_targets(state, model, optimizer, names)
            tensors = {**_stored_tensors(model_dict, names), **rng}
            read_tensors(state, tensors | optimizer_state.named_moments(moments, names.canonical))
            _put_tied(model_dict, names)
            set_model_state_dict(model, model_dict)
            if moments["state"]:
                optimizer_state.set_moments(model, optimizer, moments)
    except StateError:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
    states = {key.rpartition(".")[2]: tensor for key, tensor in rng.items()}
    if states:
        agreed(lambda: set_rng_states(states))
    return {**state.record["extra"], _RNG: bool(states)}


def _moment_targets(state: StateFolder, model: nn.Module, optimizer: Optimizer, names: _Names) -> dict[str, Any]:
    """The optimizer's state dict, restricted to parameters that have moments in the state; its values are filled."""
    if not state.record["optimizer"]["stepped"]:
        return {"state": {}}
    moments = optimizer_state.moments(model, optimizer, names.canonical)
    moments = optimizer_state.drop_unsaved(moments, names.canonical, set(state.entries))
    here = optimizer_state.named_moments(moments, names.canonical)
    agreed(lambda: check_fit(state.path, "optimizer", optimizer_state.PREFIX, here, state.entries))
    return moments


def read_tensors(state: StateFolder, tensors: dict[str, Any]) -> None:
    """Reads a state's values into the tensors with the same keys, in place. Every rank must call it.

    Raises:
        StateError: a file does not hold the tensors that it should; some tensors may have been filled.
    """
    reader, planner = (
        StateReader(state.path, state.metadata),
        dcp.DefaultLoadPlanner(flatten_state_dict=False),
    )
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


@dataclass(frozen=True)
class _Names:
    """The plain names of a model's parameters."""

    stored: Mapping[int, str]
    """By a parameter's ``id``: the first of its names, under which a state has it."""
    canonical: Mapping[str, str]
    """The first name of a tied weight by each of its others."""


def _names(model: nn.Module) -> _Names:
    inner = unwrap(getattr(model, "_orig_mod", model))  # compiled whole, inside or outside of DDP
    stored: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        plain = unwrapped_name(name)
        first = stored.setdefault(id(parameter), plain)
        if first != plain:
            canonical[plain] = first
    return _Names(stored, canonical)


def _stored_tensors(model_dict: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    """A model's state dict under the keys of a state, each tied weight once."""
    plain = {unwrapped_name(name): tensor for name, tensor in model_dict.items()}
    return {MODEL_PREFIX + name: tensor for name, tensor in plain.items() if name not in names.canonical}


def _put_tied(model_dict: dict[str, Any], names: _Names) -> None:
    """Puts what was loaded under a tied weight's first name under its others too: FSDP1 has a copy for each."""
    by_plain = {unwrapped_name(name): name for name in model_dict}
    for other, first in names.canonical.items():
        if other in by_plain:
            model_dict[by_plain[other]] = model_dict[by_plain[first]]


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise StateError(f"{key}: is {type(value).__name__}; a training state holds only tensors")


def _check_extra(extra: Mapping[str, Any]) -> None:
    if _RNG in extra:
        raise StateError(f"extra: the key {_RNG!r} is taken: generator states are saved with every state")
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"extra: is not JSON: {error}") from error


def _reshard(model: nn.Module) -> None:
    """Makes FSDP2's parameters the sharded ones that the optimizer has; after an evaluation the root's are not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
