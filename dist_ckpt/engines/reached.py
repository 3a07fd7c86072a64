"""Which parameters a backward reaches, where ``grad`` cannot say it afterwards."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from dist_ckpt.names import named_parameters


class Reached:
    """Notes each trained parameter that gets a gradient: DeepSpeed takes ``grad`` away, and has zeros where none was.

    Args:
        model: not yet sharded, while its parameters have their shapes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: set[str] = set()
        self._hooks = [
            parameter.register_hook(functools.partial(self._note, name))
            for name, parameter in named_parameters(model)
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, grad: Tensor) -> None:
        self.names.add(name)
