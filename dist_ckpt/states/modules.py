"""The training of a plain module, or of one under DDP, FSDP1 or FSDP2, by way of DCP's state dicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dist_ckpt.errors import StateError
from dist_ckpt.names import unwrapped_name
from dist_ckpt.states import optimizer as optimizer_state
from dist_ckpt.states.names import StateNames, state_names
from dist_ckpt.states.source import MODEL_PREFIX, Entry, Inventory


class ModuleSource:
    """See :class:`dist_ckpt.states.source.StateSource`.

    Args:
        model: FSDP1 needs ``use_orig_params=True``.
        optimizer: made from the wrapped model's parameters.
    """

    staged = False

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._names: StateNames
        self._model_dict: dict[str, Any]
        self._moments: dict[str, Any] = {"state": {}}

    def settle(self) -> None:
        """Makes FSDP2's parameters the sharded ones that the optimizer has; after an evaluation the root's are not."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._model_dict = get_model_state_dict(self._model)

    def inventory(self) -> Inventory:
        self._names = state_names(self._model)
        described = optimizer_state.describe(self._optimizer, self._names.stored)
        weights = {}
        for key, tensor in self.weights_to_fill().items():
            if not isinstance(tensor, Tensor):
                raise StateError(f"{key}: is {type(tensor).__name__}; a training state holds only tensors")
            weights[key] = Entry(tensor.size(), tensor.dtype)
        return Inventory(described["kind"], frozenset(described["parameters"]), self._names.canonical, weights)

    def stepped(self) -> bool:
        return bool(self._optimizer.state)

    def saved_weights(self) -> Mapping[str, Any]:
        return self.weights_to_fill()

    def saved_moments(self) -> Mapping[str, Any]:
        """Not for an optimizer without state on any rank: DCP makes one, by a step that it would then remember."""
        had_state = bool(self._optimizer.state)
        moments = optimizer_state.moments(self._model, self._optimizer, self._names.canonical)
        if not had_state:  # FSDP1 with fewer elements than ranks: this one has no part of any parameter
            self._optimizer.state.clear()
        return optimizer_state.named_moments(moments, self._names.canonical)

    def forget(self) -> Callable[[], None]:
        before = dict(self._optimizer.state)
        optimizer_state.forget(self._optimizer)

        def remember() -> None:
            self._optimizer.state.clear()
            self._optimizer.state.update(before)

        return remember

    def weights_to_fill(self) -> Mapping[str, Any]:
        plain = {unwrapped_name(name): tensor for name, tensor in self._model_dict.items()}
        return {MODEL_PREFIX + name: tensor for name, tensor in plain.items() if name not in self._names.canonical}

    def moments_to_fill(self, saved: Collection[str]) -> Mapping[str, Any]:
        moments = optimizer_state.moments(self._model, self._optimizer, self._names.canonical)
        self._moments = optimizer_state.drop_unsaved(moments, self._names.canonical, set(saved))
        return optimizer_state.named_moments(self._moments, self._names.canonical)

    def check_moments(self, where: str) -> None:
        """Each parameter has its own; whatever they are fits."""

    def adopt(self) -> None:
        self._put_tied()
        set_model_state_dict(self._model, self._model_dict)
        if self._moments["state"]:
            optimizer_state.set_moments(self._model, self._optimizer, self._moments)

    def _put_tied(self) -> None:
        """Puts what was loaded under a tied weight's first name under its others too: FSDP1 has a copy for each."""
        by_plain = {unwrapped_name(name): name for name in self._model_dict}
        for other, first in self._names.canonical.items():
            if other in by_plain:
                self._model_dict[by_plain[other]] = self._model_dict[by_plain[first]]
