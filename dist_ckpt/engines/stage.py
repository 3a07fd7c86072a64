"""One stage of a model: what a rank of a pipeline keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dist_ckpt.errors import EngineError
from dist_ckpt.names import named_modules, named_parameters
from dist_ckpt.plan import fold_names


def shared_parameters(model: nn.Module, stages: Sequence[Sequence[str]]) -> Mapping[str, tuple[int, ...]]:
    """The weights of a whole model that several stages use, each by its first name → those stages.

    Every one of these stages has a copy of its own, which is kept equal by adding up the gradients.
    """
    users = _users(model, stages)
    return {name: users[p] for name, p in named_parameters(model) if len(users.get(p, ())) > 1}


def refuse_untrained(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Raises EngineError if a stage of a whole model has no parameter that is trained: it has no optimizer then."""
    users = _users(model, stages)
    for stage, names in enumerate(stages):
        if not any(stage in used for parameter, used in users.items() if parameter.requires_grad):
            raise EngineError(
                f"stage {stage} of {len(stages)} ({', '.join(fold_names(tuple(names)))}) has no parameter that is "
                "trained: use fewer engine.stages or another engine.partition"
            )


def keep_stage(model: nn.Module, stages: Sequence[Sequence[str]], stage: int) -> None:
    """Removes from a whole model, in place, what belongs to other stages alone.

    What is left has the names that it has in the whole model. A module without parameters that no stage owns stays on
    all of them. A weight shared with an earlier layer stays registered in that layer's module as well, of which nothing
    else is left: so it has its first name on every stage, and initial values, optimizers and states that go by names
    know it.
    """
    users = _users(model, stages)
    modules = dict(model.named_modules(remove_duplicate=False))
    first: dict[nn.Parameter, nn.Module] = {}
    for _, module in named_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                first.setdefault(parameter, module)
    pruning = _Pruning(
        owned=frozenset(stages[stage]),
        elsewhere=frozenset(name for names in stages for name in names) - frozenset(stages[stage]),
        kept=frozenset(inside for name in stages[stage] for inside in modules[name].modules()),
        first={p: first[p] for p, used in users.items() if stage in used},
    )
    pruning.prune("", model)


def _users(model: nn.Module, stages: Sequence[Sequence[str]]) -> dict[nn.Parameter, tuple[int, ...]]:
    """The stages in whose modules each parameter lies."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[nn.Parameter, set[int]] = {}
    for stage, names in enumerate(stages):
        for name in names:
            for parameter in modules[name].parameters():
                found.setdefault(parameter, set()).add(stage)
    return {parameter: tuple(sorted(used)) for parameter, used in found.items()}


@dataclass(frozen=True)
class _Pruning:
    """What one stage keeps of a model."""

    owned: frozenset[str]
    """Names of the modules that it owns."""
    elsewhere: frozenset[str]
    """Names of the modules that only other stages own."""
    kept: frozenset[nn.Module]
    """What it owns, with all that is inside."""
    first: Mapping[nn.Parameter, nn.Module]
    """For each of its parameters, the module of the whole model that gives it its name."""

    def prune(self, prefix: str, module: nn.Module) -> None:
        for key, child in list(module._modules.items()):
            name = f"{prefix}{key}"
            if child is None or name in self.owned:
                continue
            if name not in self.elsewhere:
                self.prune(f"{name}.", child)
            elif not self._is_shell(child):
                del module._modules[key]

    def _is_shell(self, module: nn.Module) -> bool:
        """Leaves to a module of other stages the weights of this one that have their name from it; whether any are."""
        if module in self.kept:  # the same object under another name
            return True
        for name, parameter in list(module._parameters.items()):
            if parameter is None or self.first.get(parameter) is not module:
                del module._parameters[name]
        for name in list(module._buffers):
            del module._buffers[name]
        for name, child in list(module._modules.items()):
            if child is None or not self._is_shell(child):
                del module._modules[name]
        return bool(module._parameters or module._modules)
