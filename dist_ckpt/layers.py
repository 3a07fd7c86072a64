"""Finding the layers that a model repeats, whatever it is called and however it is nested.

Nothing is known here about any library: what counts is which modules lie side by side, of which classes they are and
which weights they hold.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from dist_ckpt.names import named_children, own_class, unwrap

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def repeated_layers(model: nn.Module) -> set[str]:
    """Names of the layers that the model repeats, outermost first: none of them lies inside another.

    A layer is made of other modules, computes something itself and has parameters. It is repeated where a
    ``ModuleList``, ``ModuleDict``, ``Sequential`` or a numbered row of attributes (``down1``, ``down2``, …) holds
    several of its class, or where lists in several places hold one each (the levels of a U-Net). A list in a list is
    either a stage of several layers or part of one layer (the experts of a mixture): stages differ in width from each
    other, while layers that hold a list are alike. What else the model has of a repeated class belongs to it (a
    U-Net's bottom).

    Layers with a single weight are found only where there are no larger ones: recomputing one operation saves little.
    """
    root = _Part.of("", unwrap(model), set())
    for least_weights in (2, 1):
        if found := _Search(root, least_weights).found():
            return found
    return set()


@dataclass(frozen=True, eq=False)
class _Part:
    """A module with what the search asks about it."""

    name: str
    module: nn.Module
    children: tuple[_Part, ...]
    shapes: tuple[tuple[int, ...], ...] = field(repr=False)
    """Of all its parameters, which makes layers alike or not."""

    @staticmethod
    def of(name: str, module: nn.Module, seen: set[nn.Module]) -> _Part:
        """The module and all in it that is not ``seen`` yet: a shared one has its first name, as in named_modules."""
        seen.add(module)
        children = tuple(
            _Part.of(f"{name}.{child}".lstrip("."), inside, seen)
            for child, inside in named_children(module)
            if inside not in seen
        )
        own = [_shape(parameter) for parameter in module._parameters.values() if parameter is not None]
        return _Part(name, module, children, (*own, *(shape for child in children for shape in child.shapes)))

    @property
    def cls(self) -> type[nn.Module]:
        return own_class(self.module)

    def walk(self) -> Iterator[_Part]:
        yield self
        for child in self.children:
            yield from child.walk()


class _Search:
    def __init__(self, root: _Part, least_weights: int) -> None:
        self._root = root
        self._least_weights = least_weights

    def found(self) -> set[str]:
        groups = self._groups()
        kept = {key: parts for key, parts in groups.items() if not self._is_skeleton(parts)}
        chosen = {part.name for parts in kept.values() for part in parts}
        classes = {part.cls for parts in kept.values() for part in parts} - {nn.Sequential}
        skeleton = {part.name for key, parts in groups.items() if key not in kept for part in parts}
        chosen |= {
            part.name
            for part in self._root.walk()
            if part.cls in classes and part.name and part.name not in skeleton and self._is_layer(part)
        }
        return set(_outermost(self._root, chosen))

    def _is_layer(self, part: _Part) -> bool:
        weights = sum(len(shape) > 1 or self._least_weights == 1 for shape in part.shapes)
        is_container = isinstance(part.module, (nn.ModuleList, nn.ModuleDict))
        return bool(part.children) and not is_container and weights >= self._least_weights

    def _groups(self) -> Mapping[Any, list[_Part]]:
        """Listed layers by kind, of kinds that occur more than once, or fill a list on their own."""
        groups: dict[Any, list[_Part]] = defaultdict(list)
        several: set[Any] = set()
        for holder in self._root.walk():
            for row, is_whole_list in self._rows(holder):
                counts = Counter(part.cls for part in row)
                for part in row:
                    key: Any = part.cls
                    if part.cls is nn.Sequential:  # its class says nothing: those of one row, or of the same make
                        of_row = counts[part.cls] > 1
                        key = holder if of_row else tuple(child.cls for child in part.children)
                    groups[key].append(part)
                    if counts[part.cls] > 1 or (is_whole_list and holder.name):
                        several.add(key)
        return {key: parts for key, parts in groups.items() if len(parts) > 1 or key in several}

    def _rows(self, holder: _Part) -> Iterator[tuple[list[_Part], bool]]:
        """Layers that lie side by side in a module, and whether it holds nothing else."""
        if isinstance(holder.module, _LISTS):
            row = [child for child in holder.children if self._is_layer(child)]
            yield row, len(holder.children) == 1 == len(row)
            return
        numbered: dict[Any, list[_Part]] = defaultdict(list)
        for child in holder.children:
            stem = re.fullmatch(r"(.*?)\d+", child.name.rpartition(".")[2])
            if stem and self._is_layer(child) and not any(self._holds_several(part) for part in child.walk()):
                numbered[stem[1], child.cls].append(child)
        yield from ((row, False) for row in numbered.values() if len(row) > 1)

    def _is_skeleton(self, parts: list[_Part]) -> bool:
        """Whether layers of one kind are what holds the blocks: they lie in each other, or are stages."""
        names = [part.name for part in parts]
        if any(one.startswith(f"{other}.") for one in names for other in names):
            return True
        all_differ = len(parts) > 1 and len({part.shapes for part in parts}) == len(parts)
        return all_differ and any(
            self._holds_several(part) or any(map(self._holds_several, part.children)) for part in parts
        )

    def _holds_several(self, part: _Part) -> bool:
        """Whether it is a list of several layers of one class."""
        if not isinstance(part.module, _LISTS):
            return False
        return max(Counter(child.cls for child in part.children if self._is_layer(child)).values(), default=0) > 1


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return (0, 0) if is_lazy(parameter) else tuple(parameter.shape)


def _outermost(part: _Part, chosen: set[str]) -> Iterator[str]:
    if part.name in chosen:
        yield part.name
    else:
        for child in part.children:
            yield from _outermost(child, chosen)
