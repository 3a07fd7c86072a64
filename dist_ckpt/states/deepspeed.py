"""The training of a DeepSpeed engine, ZeRO 0 to 3 or a pipeline, as every other engine saves and loads it.

A state has fp32 weights under the model's own names: of an engine that computes in bfloat16 they are the fp32 masters,
and frozen parameters as it has rounded them. Buffers have the numbers that the model has.
Nothing is gathered: each rank writes the elements that it holds and reads those that it is to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt.compat.dcp_pieces import Piece
from dist_ckpt.compat.deepspeed_state import (
    Held,
    Layout,
    Moment,
    computes_in_16_bits,
    in_accumulation,
    layout_of,
    moment_kinds,
    moments_of,
    resting,
    stored_dtype,
)
from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrapped_name
from dist_ckpt.states.names import StateNames, state_names
from dist_ckpt.states.optimizer import moment_key
from dist_ckpt.states.source import MODEL_PREFIX, Entry, Inventory


class DeepSpeedSource:
    """See :class:`dist_ckpt.states.source.StateSource`.

        save_state(path, DeepSpeedSource(engine), {"step": step})
        extra = load_state(path, DeepSpeedSource(engine))

    Args:
        engine: what ``deepspeed.initialize`` returned, with a torch optimizer passed to it.
        model: the module whose names a state has; of a pipeline the part of the model that this rank's stage has,
            under the names of the whole. By default ``engine.module``.
        elsewhere: of a pipeline, the weights that this rank's stage shares with another one, which saves them.
    """

    def __init__(self, engine: Any, model: nn.Module | None = None, elsewhere: Collection[str] | None = None) -> None:
        self.staged = elsewhere is not None
        self._engine = engine
        self._model: nn.Module = engine.module if model is None else model
        self._elsewhere = frozenset(elsewhere or ())
        self._names: StateNames
        self._layout: Layout
        self._moments: dict[str, Tensor | Piece] = {}

    def settle(self) -> None:
        if in_accumulation(self._engine):
            raise StateError("a training state is saved and loaded between updates; gradients of one are waiting here")
        self._layout = layout_of(self._engine)
        self._names = state_names(self._model)

    def inventory(self) -> Inventory:
        if self._layout.held.keys() - self._names.stored.keys():
            raise StateError("the optimizer of the DeepSpeed engine has parameters that are not in the model")
        for held in self._layout.held.values():
            moments_of(self._layout.optimizer, held.master)
        weights = {key: Entry(value.size(), value.dtype) for key, value in self.weights_to_fill().items()}
        names = frozenset(name for name, _ in self._trained())
        return Inventory(type(self._layout.optimizer).__name__, names, self._names.canonical, weights)

    def stepped(self) -> bool:
        return any(self._layout.optimizer.state.values())

    def saved_weights(self) -> Mapping[str, Any]:
        weights = self.weights_to_fill()
        return {key: value for key, value in weights.items() if key.removeprefix(MODEL_PREFIX) not in self._elsewhere}

    def saved_moments(self) -> Mapping[str, Any]:
        return {
            moment_key(name, kind): held.part(value) if value.shape == held.master.shape else value
            for name, held in self._trained()
            if name not in self._elsewhere
            for kind, value in moments_of(self._layout.optimizer, held.master).items()
            if value.shape == held.master.shape or held.has_first()
        }

    def forget(self) -> Callable[[], None]:
        self._engine.zero_grad()  # first, for a guarded engine refuses it within an update
        state = self._layout.optimizer.state
        before = dict(state)
        state.clear()

        def remember() -> None:
            state.clear()
            state.update(before)

        return remember

    def weights_to_fill(self) -> Mapping[str, Tensor | Piece]:
        parameters = {id(parameter): parameter for parameter in self._model.parameters()}
        buffers = {id(buffer) for buffer in self._model.buffers()}
        found = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            plain = unwrapped_name(name)
            if id(value) in parameters:
                found[MODEL_PREFIX + self._names.stored[id(value)]] = self._weight(parameters[id(value)])
            elif id(value) in buffers:
                found[MODEL_PREFIX + plain] = value.detach()
            else:
                raise StateError(
                    f"{plain}: is neither parameter nor buffer; nothing else of a DeepSpeed engine is saved"
                )
        return found

    def moments_to_fill(self, saved: Collection[str]) -> Mapping[str, Tensor | Piece]:
        """Those of a parameter that has none in the state are zero if it lies in a row with others that have some."""
        optimizer = self._layout.optimizer
        kinds: dict[int, Mapping[str, Moment]] = {}
        self._moments = {}
        for name, held in self._trained():
            if id(held.group) not in kinds:
                kinds[id(held.group)] = moment_kinds(optimizer, held)
            of_group = kinds[id(held.group)]
            if not any(moment_key(name, kind) in saved for kind in of_group):
                continue
            if held.master not in optimizer.state:
                optimizer.state[held.master] = {kind: moment.blank(held.master) for kind, moment in of_group.items()}
            for kind, value in optimizer.state[held.master].items():
                alike = of_group[kind].alike
                target = held.part(value) if alike or held.in_row is None else torch.empty_like(value)
                self._moments[moment_key(name, kind)] = target
        return self._moments

    def check_moments(self, where: str) -> None:
        for _, kind, counts in self._counts():
            unlike: dict[float, str] = {}
            for name, count in counts.items():
                unlike.setdefault(float(count), name)
            if len(unlike) > 1:
                (one, first), (other, second), *_ = unlike.items()
                raise StateError(
                    f"{where}: the optimizer's {kind} of {first} is {one:g}, that of {second} {other:g}, and ZeRO has "
                    "one for all parameters of a group; engines that have one for each can load it: ddp, fsdp1, fsdp2, "
                    "or deepspeed with stage 0"
                )

    def adopt(self) -> None:
        with torch.no_grad():
            for master, kind, counts in self._counts():
                self._layout.optimizer.state[master][kind].copy_(next(iter(counts.values())))
        self._layout.publish()

    def _trained(self) -> Iterator[tuple[str, Held]]:
        for parameter in self._model.parameters():
            if (held := self._layout.held.get(id(parameter))) is not None:
                yield self._names.stored[id(parameter)], held

    def _counts(self) -> Iterator[tuple[Tensor, str, dict[str, Tensor]]]:
        """What a state has for each parameter and the optimizer for several in a row: of each row, by kind and name."""
        rows: dict[tuple[int, str], tuple[Tensor, str, dict[str, Tensor]]] = {}
        for name, held in self._trained():
            master = held.master
            for kind, value in self._layout.optimizer.state.get(master, {}).items():
                target = self._moments.get(moment_key(name, kind))
                if held.in_row is not None and value.shape != master.shape and isinstance(target, Tensor):
                    rows.setdefault((id(master), kind), (master, kind, {}))[2][name] = target
        yield from rows.values()

    def _weight(self, parameter: nn.Parameter) -> Tensor | Piece:
        held = self._layout.held.get(id(parameter))
        return self._frozen(resting(parameter)) if held is None else held.part(held.master)

    def _frozen(self, value: Tensor | Piece) -> Tensor | Piece:
        """As a state has it, in 32 bits where DeepSpeed has cast it to the 16 that it computes in."""
        if not computes_in_16_bits(self._engine) or stored_dtype(value.dtype) == value.dtype:
            return value
        if isinstance(value, Piece):
            return replace(value, dtype=stored_dtype(value.dtype))
        return Piece(value.shape, value, dtype=stored_dtype(value.dtype))
