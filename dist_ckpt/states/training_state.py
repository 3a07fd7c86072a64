"""Saving and loading a training state: weights, optimizer, random generators, and what the loop adds.

One layout for every engine and number of ranks: tensors lie in the folder under the plain model's names, so
that a state saved under DDP on four ranks loads under FSDP2 on two, under FSDP1, or in one process, bit for
bit. Every rank calls, and then every rank returns or every rank raises the same :class:`StateError`. The
ranks share one file system.
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
    """Writes a training state into the folder ``path``, empty or not there yet. Every rank must call it.

    Changes neither weights nor optimizer nor generators: training goes on as it would have without. A tied
    weight is stored once, under its first name. Of a buffer that differs between ranks, one rank's is stored.

    Args:
        model: a plain module in one process, or one under DDP, FSDP1 (``use_orig_params=True``) or FSDP2.
        optimizer: made from the wrapped model's parameters.
        extra: what the loop wants back, as JSON can hold it (step, position, …); rank 0's is stored.

    Raises:
        StateError: on every rank alike: the folder is in use, a file cannot be written, or something in
            ``extra``, the model or the optimizer is neither a tensor nor plain.
    """
    folder = Path(path)
    rank, world_size = rank_and_world_size()
    _reshard(model)

    def inspect() -> tuple[_Names, dict[str, Any]]:
        _check_extra(extra)
        names = _names(model)
        groups = optimizer_state.group_names(optimizer, names.stored)
        return names, optimizer_state.describe(optimizer, groups)

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
    """Puts a saved training state into model, optimizer and generators. Every rank must call it.

    Every file is checked, and every name and shape compared, before anything is put anywhere. Nothing that
    the state holds is executed. Gradients are dropped; ``fused``, ``foreach`` and the like stay as the
    optimizer has them.

    Returns:
        The ``extra`` of the save, and under ``"rng"`` the generator states that this rank now has again, or
        None if the state is of another number of ranks: its generators cannot be mapped to these, which stay
        as they are.

    Raises:
        StateError: on every rank alike: names the file that is missing, damaged, foreign or not trusted, or
            says how the state does not fit the model or the optimizer. Weights and optimizer are then as
            before, but for a shard forged together with its checksum: that is found while weights are read.
    """
    folder = Path(path)
    state = open_folder(folder)
    _reshard(model)
    with _quiet():
        model_dict = get_model_state_dict(model)

    def fit() -> tuple[_Names, list[dict[str, Any]]]:
        names = _names(model)
        tensors = _stored_tensors(model_dict, names)
        _check_tensors(tensors)
        check_fit(folder, "model", MODEL_PREFIX, tensors, state.entries)
        groups = optimizer_state.group_names(optimizer, names.stored)
        return names, optimizer_state.match_groups(optimizer, groups, state.record["optimizer"], str(folder))

    names, hyper_parameters = agreed(fit)
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
    optimizer_state.set_hyper_parameters(optimizer, hyper_parameters)
    states = {key.rpartition(".")[2]: tensor for key, tensor in rng.items()}
    if states:
        agreed(lambda: set_rng_states(states))
    return {**state.record["extra"], _RNG: states or None}


def _moment_targets(state: StateFolder, model: nn.Module, optimizer: Optimizer, names: _Names) -> dict[str, Any]:
    """The optimizer's state dict, of the parameters that have moments in the state; its values get filled."""
    if not state.record["optimizer"]["stepped"]:
        return {"state": {}}
    moments = optimizer_state.moments(model, optimizer, names.canonical)
    moments = optimizer_state.drop_unsaved(moments, names.canonical, set(state.entries))
    here = optimizer_state.named_moments(moments, names.canonical)
    agreed(lambda: check_fit(state.path, "optimizer", optimizer_state.PREFIX, here, state.entries))
    return moments


def read_tensors(state: StateFolder, tensors: dict[str, Any]) -> None:
    """Fills tensors in place with what a state has under their keys. Every rank must call it.

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
    """Gives the default generators what :func:`rng_states` returned; that of a device not here is left out.

    Raises:
        StateError: these are no states of generators.
    """
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, RuntimeError) as error:
        raise StateError(f"the random generators do not take these states: {error}") from error


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
    """Makes each name of a tied weight hold what was loaded under the first: FSDP1 gives each a copy."""
    by_plain = {unwrapped_name(name): name for name in model_dict}
    for other, first in names.canonical.items():
        if other in by_plain:
            model_dict[by_plain[other]] = model_dict[by_plain[first]]


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise StateError(f"{key}: is {type(value).__name__}; a training state holds nothing but tensors")


def _check_extra(extra: Mapping[str, Any]) -> None:
    if _RNG in extra:
        raise StateError(f"extra: the key {_RNG!r} is taken: generator states are saved with every state")
    try:
        json.dumps(dict(extra))
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"extra: JSON cannot hold it: {error}") from error


def _reshard(model: nn.Module) -> None:
    """Makes FSDP2's parameters those that the optimizer knows; the root's are not after an evaluation."""
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
    """Hides what DCP and FSDP1 warn about their own insides, and that one process is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.")
        yield
