"""What a pipeline can cut: a model's forward as a list of layers, and how layers are dealt to stages."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.blocks import class_name, find_blocks
from dist_ckpt.errors import EngineError, PlanError, choices
from dist_ckpt.names import named_modules, unwrap
from dist_ckpt.plan import Stages, fold_names

OutputLoss = Callable[[Tensor, Tensor], Tensor]
"""(the model's output, labels) → the sum over tokens of the loss, an fp32 scalar."""


@dataclass(frozen=True)
class Layer:
    """One step of a model's forward: what the layer before returned → what the next one is given."""

    modules: tuple[str, ...]
    """Names of the modules that it owns, in the whole model; the first one names the layer."""
    run: Callable[[nn.Module, Tensor], Tensor]
    """(model, whole or with this stage's modules alone; input) → output. The first layer is given the input ids."""


@dataclass(frozen=True)
class LayerList:
    """A model's forward and loss."""

    layers: tuple[Layer, ...]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """(model, the last layer's output, labels) → the sum over tokens of the loss, an fp32 scalar. It may use modules
    that the last layer owns."""


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy in nats, an fp32 scalar; output: (…, classes), labels: (…) int64."""
    return F.cross_entropy(output.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def layers_of(model: nn.Module, loss: OutputLoss | None = None) -> LayerList:
    """The layers of a model that says them itself, or of an ``nn.Sequential``.

    A model says them with a method ``pipeline_layers(self) -> LayerList``. Of a ``Sequential`` each child is a layer.

    Args:
        loss: of a ``Sequential``: (output, labels) → summed token loss; by default :func:`token_loss`.

    Raises:
        EngineError: the model is neither, or its layers leave out a module that has parameters.
    """
    model = unwrap(model)
    if callable(says := getattr(model, "pipeline_layers", None)):
        if loss is not None:
            raise EngineError(f"{class_name(model)}.pipeline_layers() says the loss itself: pass no other")
        layers = says()
        if not (isinstance(layers, LayerList) and layers.layers and all(layer.modules for layer in layers.layers)):
            raise EngineError(
                f"{class_name(model)}.pipeline_layers() must return a LayerList of layers that own modules"
            )
    elif isinstance(model, nn.Sequential):
        children = tuple(model._modules)
        if not children:
            raise EngineError(f"{class_name(model)} has no layers")
        layers = LayerList(
            tuple(Layer((name,), functools.partial(_run_child, name)) for name in children),
            functools.partial(_output_loss, loss or token_loss),
        )
    else:
        raise EngineError(
            f"{class_name(model)} does not say how it can be cut into stages: give it a method pipeline_layers(self) "
            "that returns a LayerList, or make it an nn.Sequential"
        )
    _refuse_incomplete(model, layers)
    return layers


def partition(layers: LayerList, model: nn.Module, stages: int, how: str | tuple[int, ...] = "parameters") -> Stages:
    """Deals layers to the stages of a pipeline, in order: for each stage the names of the modules that it owns.

    Args:
        how: ``uniform`` deals as many layers that hold blocks to each stage as can be, the first stages one more;
            ``type:Class`` the same with layers that hold modules of a class. ``parameters`` makes the largest number
            of parameters of a stage the least that is possible; a weight that layers share counts once in each stage
            that holds it. Numbers, one a stage, count the layers that hold blocks. What comes before the first of the
            layers that count belongs to the first stage, any other to the stage of the one before it.

    Raises:
        EngineError: what was asked is no way to cut, leaves a stage without layers, or does not add up.
    """
    if type(stages) is not int or stages < 1:
        raise EngineError(f"engine.stages={stages!r}: must be at least 1, and whole")
    if how == "parameters":
        starts = _balanced(layers, model, stages)
    elif isinstance(how, str) and (how == "uniform" or how.startswith("type:")):
        counted, what = _counted(layers, model, how)
        if stages > len(counted):
            raise EngineError(
                f"engine.stages={stages}: engine.partition={how} has {len(counted)} {what} to deal, at least one a "
                f"stage; use at most {len(counted)} stages"
            )
        each, more = divmod(len(counted), stages)
        starts = _starts(counted, [each + (stage < more) for stage in range(stages)])
    elif isinstance(how, str):
        valid = ("uniform", "parameters", "type:CLASS", "[N,N,…]")
        raise EngineError(f"engine.partition={how}: no such way; {choices(how, valid)}")
    else:
        starts = _explicit(layers, model, stages, how)
    bounds = [*starts, len(layers.layers)]
    owned = (layers.layers[start:stop] for start, stop in itertools.pairwise(bounds))
    return tuple(tuple(dict.fromkeys(name for layer in stage for name in layer.modules)) for stage in owned)


def layers_by_stage(layers: LayerList, stages: Stages) -> tuple[tuple[Layer, ...], ...]:
    """The layers of each stage.

    Raises:
        EngineError: the stages are not made of these layers in their order.
    """
    found: list[list[Layer]] = [[] for _ in stages]
    at, missing = 0, set(stages[0])
    for layer in layers.layers:
        # A tied module's name stands in several stages: a complete stage goes on only where the next cannot start.
        if not missing and at + 1 < len(stages) and stages[at + 1][: len(layer.modules)] == layer.modules:
            at, missing = at + 1, set(stages[at + 1])
        if strange := [name for name in layer.modules if name not in stages[at]]:
            raise EngineError(
                f"the stages are not those of this model's layers: stage {at} does not own {strange[0]!r}"
            )
        found[at].append(layer)
        missing -= set(layer.modules)
    if missing or at + 1 < len(stages):
        raise EngineError(f"the stages are not those of this model's layers: they end within stage {at}")
    return tuple(map(tuple, found))


def _run_child(name: str, model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model.get_submodule(name)(x)
    return out


def _output_loss(loss: OutputLoss, model: nn.Module, output: Tensor, labels: Tensor) -> Tensor:
    return loss(output, labels)


def _refuse_incomplete(model: nn.Module, layers: LayerList) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    owned = tuple(name for layer in layers.layers for name in layer.modules)
    if unknown := [name for name in owned if name not in modules or not name]:
        raise EngineError(f"{class_name(model)}.pipeline_layers() names {unknown[0]!r}: {choices(unknown[0], modules)}")
    ours = {p for name in owned for p in modules[name].parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in ours:
            raise EngineError(
                f"the layers of {class_name(model)} leave out the parameter {name!r}: each module with parameters has "
                "to belong to a layer, so that one stage owns it"
            )


def _balanced(layers: LayerList, model: nn.Module, stages: int) -> tuple[int, ...]:
    """The first layer of each stage so that the largest stage is the smallest possible, and of those cuts one with the
    least sum of squares that its prefixes allow: dynamic programming over (stages, layers)."""
    count = len(layers.layers)
    if stages > count:
        raise EngineError(
            f"engine.stages={stages}: engine.partition=parameters has {count} layers to deal, at least one a stage; "
            f"use at most {count} stages"
        )
    held = [list(_parameters(model, layer.modules)) for layer in layers.layers]
    sizes: list[list[int]] = []  # of the layers start … stop: sizes[start][stop - start]
    for start in range(count):
        seen: set[nn.Parameter] = set()
        total, row = 0, [0]
        for parameters in held[start:]:
            total += sum(parameter.numel() for parameter in dict.fromkeys(parameters) if parameter not in seen)
            seen.update(parameters)
            row.append(total)
        sizes.append(row)
    Cut = tuple[int, int, tuple[int, ...]]
    best: list[Cut | None] = [None, *((sizes[0][stop], sizes[0][stop] ** 2, (0,)) for stop in range(1, count + 1))]
    for _ in range(1, stages):
        longer: list[Cut | None] = [None] * (count + 1)
        for stop in range(1, count + 1):
            tried = [
                (max(cut[0], size), cut[1] + size**2, (*cut[2], start))
                for start in range(1, stop)
                if (cut := best[start]) is not None
                for size in (sizes[start][stop - start],)
            ]
            longer[stop] = min(tried, default=None)
        best = longer
    found = best[count]
    assert found is not None, "there are as many layers as stages"
    return found[2]


def _parameters(model: nn.Module, names: Sequence[str]) -> Iterator[nn.Parameter]:
    for name in names:
        yield from model.get_submodule(name).parameters()


def _counted(layers: LayerList, model: nn.Module, how: str) -> tuple[list[int], str]:
    """Which layers count, and what they are called in a message."""
    if how == "uniform":
        return _with_blocks(layers, model), "layers with blocks"
    wanted = how.removeprefix("type:")
    of_class = {name for name, module in named_modules(model) if name and class_name(module) == wanted}
    found = [n for n, layer in enumerate(layers.layers) if _holds(layer, of_class)]
    if not found:
        counts = Counter(class_name(module) for name, module in named_modules(model) if name)
        raise EngineError(f"engine.partition={how}: no layer has a module of that class; {choices(wanted, counts)}")
    return found, f"layers with a {wanted}"


def _with_blocks(layers: LayerList, model: nn.Module) -> list[int]:
    """The layers that hold blocks; all of them in a model without any."""
    try:
        blocks = set(find_blocks(model))
    except PlanError:
        return list(range(len(layers.layers)))
    return [n for n, layer in enumerate(layers.layers) if _holds(layer, blocks)]


def _holds(layer: Layer, names: set[str]) -> bool:
    return any(name == own or name.startswith(f"{own}.") for name in names for own in layer.modules)


def _starts(counted: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """The first layer of each stage, where stages have so many of the layers that count."""
    firsts = itertools.accumulate(counts[:-1])
    return (0, *(counted[first] if first < len(counted) else counted[-1] + 1 for first in firsts))


def _explicit(layers: LayerList, model: nn.Module, stages: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    counted = _with_blocks(layers, model)
    asked = f"engine.partition=[{','.join(map(str, counts))}]"
    if any(type(count) is not int or count < 0 for count in counts):
        raise EngineError(f"{asked}: numbers of blocks, one a stage")
    if len(counts) != stages:
        raise EngineError(f"{asked}: {len(counts)} numbers for engine.stages={stages}; one a stage")
    if sum(counts) != len(counted):
        blocks = fold_names(tuple(layers.layers[n].modules[0] for n in counted))
        raise EngineError(
            f"{asked}: adds up to {sum(counts)}, but {len(counted)} layers hold blocks ({', '.join(blocks)})"
        )
    starts = _starts(counted, counts)
    for stage, (start, stop) in enumerate(itertools.pairwise((*starts, len(layers.layers)))):
        if start == stop:
            raise EngineError(
                f"{asked}: leaves stage {stage} without layers; only the first and the last stage, which have what "
                "comes before and after the blocks, may have no block"
            )
    return starts
