"""The state that a step reads and leaves behind: looked at between its phases, and put back where it is no copy's."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from dist_ckpt.compat import zero
from dist_ckpt.generators import generator_state, restore_generator
from dist_ckpt.names import named_modules, named_parameters, own_class
from dist_ckpt.verification.bindings import Binding, class_bindings, function_bindings
from dist_ckpt.verification.digest import fingerprint
from dist_ckpt.verification.reach import Walk, attributes_of, is_array

Key = tuple[str, str]
"""(owner, path in it); an owner is a module's name, or says what else it is: ``global 'step' of train``."""
Look = Mapping[Key, Any]
"""What was found: plain values, and fingerprints of tensors."""

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOT_STATE = ("_dist_ckpt_", "_fsdp_", "_is_hf_initialized", *zero.MODULE_ATTRIBUTES)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass
class Roots:
    """Where the state of a step hangs.

    Args:
        model: the copy that runs, or a model under an engine.
        loss_fn: (model, batch) → loss; its closure and what it calls belong to the state.
            batch: what it gets.
        original: the user's model where ``model`` is a copy of it, which is no state of this step.
    """

    model: nn.Module
    loss_fn: Any
    batch: Any
    original: nn.Module | None = None
    outside: tuple[Binding, ...] = ()
    """Names that the code of the modules and of ``loss_fn`` uses."""
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Label of such a name, or of an argument → the modules that use it; none for those of ``loss_fn`` alone."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Label → an argument of a region that its forward could change or find changed."""

    def __post_init__(self) -> None:
        found: dict[tuple[int, str], tuple[Binding, list[str]]] = {}
        by_class: dict[type, list[str]] = {}
        for name, module in named_modules(self.model):
            by_class.setdefault(own_class(module), []).append(name)
            for binding in _bindings_of_object(module):
                found.setdefault(binding.place, (binding, []))[1].append(name)
        for cls, names in by_class.items():
            for binding in class_bindings(cls):
                found.setdefault(binding.place, (binding, []))[1].extend(names)
        for binding in _bindings_of_loss(self.loss_fn):
            found.setdefault(binding.place, (binding, []))
        outside, labels = [], collections.Counter[str]()
        for binding, users in found.values():
            labels[binding.label] += 1
            number = f" #{labels[binding.label]}" if labels[binding.label] > 1 else ""
            binding = Binding(binding.label + number, binding.place, binding.read, binding.write)
            outside.append(binding)
            self.users[binding.label] = tuple(dict.fromkeys(users))
        self.outside = tuple(outside)

    def walk(self) -> Walk:
        """Everything that can be reached now."""
        walk = self.walk_outside()
        # Sharding exchanges parameters for gathered ones and back, FSDP1 even for plain attributes.
        sharded = is_sharded(self.model)
        skipped = {name for name, _ in named_parameters(self.model)} if sharded else set()
        for name, module in named_modules(self.model):
            for attribute, value in vars(module).items():
                is_state = attribute not in _OF_MODULES and not attribute.startswith(_NOT_STATE)
                if is_state and f"{name}.{attribute}".lstrip(".") not in skipped:
                    walk.visit(name, attribute, value)
            for attribute, parameter in module._parameters.items():
                if parameter is not None and not sharded and not is_lazy(parameter):
                    walk.visit(name, attribute, parameter.detach())
        for label, value in self.arguments.items():
            walk.visit(label, "", value)
        walk.visit("the batch", "", self.batch)
        return walk

    def walk_outside(self) -> Walk:
        """What can be reached by names outside of the model."""
        walk = self.new_walk()
        for binding in self.outside:
            walk.visit(binding.label, "", binding.read())
        walk.visit("the loss function", "", self.loss_fn)
        return walk

    def new_walk(self) -> Walk:
        """A walk that does not enter the model."""
        models = [self.model] if self.original is None else [self.model, self.original]
        return Walk(frozenset(id(module) for model in models for module in model.modules()))


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP or ZeRO-3 holds the model's parameters."""
    is_fsdp = any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules())
    return is_fsdp or any(zero.is_partitioned(parameter) for parameter in model.parameters())


def look(walk: Walk) -> Look:
    """What a walk found, in a form that lasts while the state changes."""
    return {key: _lasting(leaf) for key, leaf in walk.leaves.items()}


def _lasting(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return fingerprint(leaf)
    return (str(leaf.shape), str(leaf.dtype), hash(leaf.tobytes())) if is_array(leaf) else leaf


def _bindings_of_object(value: Any) -> Iterator[Binding]:
    """Names that functions in an object's attributes and a module's hooks use."""
    for attribute, item in list(vars(value).items()):
        functions: Iterable[Any] = item.values() if attribute in _HOOKS else (item,)
        for function in functions:
            yield from function_bindings(function)


def _bindings_of_loss(loss_fn: Any) -> Iterator[Binding]:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    function = getattr(loss_fn, "__func__", loss_fn)
    if isinstance(function, types.FunctionType):
        yield from function_bindings(function)
    elif attributes_of(loss_fn) is not None:
        yield from class_bindings(type(loss_fn))
        yield from _bindings_of_object(loss_fn)


class Keepsake:
    """The state outside of the model, to be put back: a step on a copy of the model must leave no trace.

    Args:
        roots: of the user's model, which is not touched.
    """

    def __init__(self, roots: Roots) -> None:
        walk = roots.walk_outside()
        self._names = [(binding, binding.read()) for binding in roots.outside]
        self._contents = [
            (value, _shallow(value)) for value in walk.containers if not isinstance(value, (tuple, frozenset))
        ]
        leaves = walk.leaves.values()
        self._tensors = [(leaf, leaf.detach().clone()) for leaf in leaves if _may_change(leaf)]
        self._arrays = [(leaf, leaf.copy()) for leaf in leaves if is_array(leaf) and leaf.shape]
        self._generators = [(value, generator_state(value)) for value in walk.generators.values()]

    def put_back(self) -> None:
        """Makes the state what it was."""
        for value, contents in self._contents:
            if _identities(value) != _identities(contents):
                _refill(value, contents)
        for binding, value in self._names:
            if binding.read() is not value:
                binding.write(value)
        with torch.no_grad():
            for tensor, copy in self._tensors:
                if fingerprint(tensor) != fingerprint(copy):
                    tensor.detach().copy_(copy)
        for array, copy in self._arrays:
            if array.tobytes() != copy.tobytes():
                array[...] = copy
        for generator, state in self._generators:
            restore_generator(generator, state)


def _may_change(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_meta


def _shallow(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(dict.items(value))
    return set(value) if isinstance(value, set) else list(value)


def _identities(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in dict.items(value)]
    return value if isinstance(value, set) else list(map(id, value))


def _refill(value: Any, contents: Any) -> None:
    value.clear()
    value.extend(contents) if hasattr(value, "extend") else value.update(contents)
