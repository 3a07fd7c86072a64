"""A model's layers, and how they are dealt to the stages of a pipeline."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.errors import EngineError
from dist_ckpt.stages import Layer, LayerList, layers_by_stage, layers_of, partition
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.toys import Block, Stack


class Cut(Stack):
    """A stack that says its layers."""

    def pipeline_layers(self) -> LayerList:
        blocks = [Layer((f"blocks.{n}",), lambda m, x, n=n: m.get_submodule(f"blocks.{n}")(x)) for n in range(self.n)]
        first, last = Layer(("embed",), lambda m, x: m.embed(x)), Layer(("head",), lambda m, x: m.head(x))
        return LayerList((first, *blocks, last), lambda m, x, labels: (x - labels).square().sum())

    @property
    def n(self) -> int:
        return len(self.blocks)


def counts(stages: Any, word: str = "blocks.") -> list[int]:
    return [sum(name.startswith(word) for name in stage) for stage in stages]


def test_the_layers_of_a_model_are_its_forward() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    for model in (Cut(3), nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))):
        out = x
        for layer in layers_of(model).layers:
            out = layer.run(model, out)
        assert torch.equal(out, model(x))


def test_a_transformer_says_its_own() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(n_layers=2, vocab_size=32))
    ids = torch.randint(0, 32, (2, 6))
    layers = layers_of(model)
    x = ids
    for layer in layers.layers:
        x = layer.run(model, x)
    assert torch.equal(layers.loss(model, x, ids), model(ids, ids))


def test_the_loss_of_a_sequential_is_given_or_that_of_tokens() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    ids = torch.tensor([[1, 2, 3]])
    labels = torch.tensor([[2, 3, IGNORE_INDEX]])
    out = model(ids)
    expected = -(out[0, 0].log_softmax(-1)[2] + out[0, 1].log_softmax(-1)[3])
    torch.testing.assert_close(layers_of(model).loss(model, out, labels), expected)

    def squares(output: Tensor, labels: Tensor) -> Tensor:
        return output.square().sum()

    assert torch.equal(layers_of(model, squares).loss(model, out, labels), out.square().sum())


class Loose(Cut):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.position = nn.Parameter(torch.zeros(3))


class Wrong(Cut):
    def pipeline_layers(self) -> LayerList:
        return LayerList((Layer(("blokcs.0",), lambda m, x: x),), super().pipeline_layers().loss)


class Nothing(Cut):
    def pipeline_layers(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Stack(2), None, r"Stack does not say how it can be cut .* pipeline_layers\(self\)"),
        (Cut(2), lambda output, labels: output.sum(), "says the loss itself"),
        (Loose(), None, "leave out the parameter 'position'"),
        (Wrong(2), None, "names 'blokcs.0': did you mean 'blocks.0'"),
        (Nothing(2), None, "must return a LayerList"),
        (nn.Sequential(), None, "has no layers"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_cut_is_said(model: nn.Module, loss: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        layers_of(model, loss)


@pytest.mark.parametrize(
    ("depth", "stages", "how", "expected"),
    [
        (8, 4, "uniform", [2, 2, 2, 2]),
        (7, 3, "uniform", [3, 2, 2]),
        (3, 3, "uniform", [1, 1, 1]),
        (6, 4, "type:Block", [2, 2, 1, 1]),
        (6, 2, "type:SelfMix", [3, 3]),
        (6, 3, (3, 2, 1), [3, 2, 1]),
        (4, 3, (0, 2, 2), [0, 2, 2]),
        (4, 3, (2, 2, 0), [2, 2, 0]),
        (5, 1, "uniform", [5]),
        (5, 1, "parameters", [5]),
        (8, 4, "parameters", [2, 2, 2, 2]),
    ],
)
def test_blocks_are_dealt_as_asked(depth: int, stages: int, how: Any, expected: list[int]) -> None:
    model = Cut(depth)
    layers = layers_of(model)
    found = partition(layers, model, stages, how)
    assert counts(found) == expected
    assert [name for stage in found for name in stage] == ["embed", *(f"blocks.{n}" for n in range(depth)), "head"]
    assert [[layer.modules[0] for layer in stage] for stage in layers_by_stage(layers, found)] == list(map(list, found))


def test_a_sequential_without_blocks_deals_its_layers() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert partition(layers_of(model), model, 2, "uniform") == (("0", "1", "2"), ("3", "4"))
    assert partition(layers_of(model), model, 2, (1, 4)) == (("0",), ("1", "2", "3", "4"))


def test_what_stands_between_blocks_goes_with_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.LayerNorm(8), Block(), nn.LayerNorm(8))
    assert partition(layers_of(model), model, 2, "uniform") == (("0", "1", "2"), ("3", "4"))


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_stage_is_the_smallest_possible(seed: int) -> None:
    """Against all cuts there are."""
    draw = random.Random(seed)
    model = nn.Sequential(*(nn.Linear(draw.randint(1, 30), draw.randint(1, 30), bias=False) for _ in range(9)))
    sizes = [layer.weight.numel() for layer in model]
    stages = draw.randint(2, 6)
    cuts = ((0, *inner, 9) for inner in itertools.combinations(range(1, 9), stages - 1))
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    found = partition(layers_of(model), model, stages, "parameters")
    assert max(sum(sizes[int(name)] for name in stage) for stage in found) == best
    assert all(found)


def test_the_largest_stage_counts_before_the_evenness_of_all() -> None:
    """The least sum of squares would be that of stages with 9, 10 and 15."""
    model = nn.Sequential(*(nn.Linear(1, width, bias=False) for width in (4, 5, 5, 5, 9, 6)))
    assert partition(layers_of(model), model, 3, "parameters") == (("0", "1", "2"), ("3", "4"), ("5",))


def test_a_weight_that_layers_share_counts_once_in_a_stage() -> None:
    model = nn.Sequential(*(nn.Linear(4, width, bias=False) for width in (25, 25, 15)))
    assert partition(layers_of(model), model, 2, "parameters") == (("0",), ("1", "2"))
    model[1].weight = model[0].weight
    assert partition(layers_of(model), model, 2, "parameters") == (("0", "1"), ("2",))


def test_a_tied_layer_belongs_to_both_of_its_stages() -> None:
    layers = LayerList(
        tuple(Layer((name,), lambda m, x: x) for name in ("embed", "0", "1", "embed")), lambda m, x, labels: x.sum()
    )
    for stages in ((("embed", "0"), ("1", "embed")), (("embed", "0", "1"), ("embed",))):
        found = layers_by_stage(layers, stages)
        assert [tuple(layer.modules[0] for layer in stage) for stage in found] == list(stages)


@pytest.mark.parametrize(
    ("stages", "how", "message"),
    [
        (0, "uniform", r"engine\.stages=0: must be at least 1"),
        (5, "uniform", r"engine\.stages=5: .*uniform has 4 layers with blocks to deal.*at most 4"),
        (7, "parameters", r"engine\.stages=7: .* has 6 layers to deal.*at most 6"),
        (5, "type:Block", r"engine\.stages=5: .*4 layers with a Block"),
        (2, "type:Blok", r"engine\.partition=type:Blok: no layer .*did you mean 'Block'"),
        (2, "unifrom", r"engine\.partition=unifrom: no such way; did you mean 'uniform'\? Valid: \[N,N"),
        (2, (1, 2, 1), r"engine\.partition=\[1,2,1\]: 3 numbers for engine\.stages=2"),
        (2, (1, 2), r"engine\.partition=\[1,2\]: adds up to 3, but 4 layers hold blocks \(blocks\.\{0-3\}\)"),
        (2, (-1, 5), r"engine\.partition=\[-1,5\]: numbers of blocks"),
        (3, (2, 0, 2), r"leaves stage 1 without layers; only the first and the last"),
        (3, (4, 0, 0), r"leaves stage 1 without layers"),
        (3, (0, 0, 4), r"leaves stage 1 without layers"),
    ],
)
def test_what_cannot_be_dealt_is_said_with_numbers(stages: int, how: Any, message: str) -> None:
    model = Cut(4)
    with pytest.raises(EngineError, match=message):
        partition(layers_of(model), model, stages, how)


def test_a_stage_needs_layers_before_or_after_the_blocks_to_be_without_blocks() -> None:
    model = nn.Sequential(Block(), Block())
    for how in ((0, 2), (2, 0)):
        with pytest.raises(EngineError, match=r"leaves stage \d without layers"):
            partition(layers_of(model), model, 2, how)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((("embed", "blocks.0"), ("head", "blocks.1")), "does not own 'blocks.1'"),
        ((("embed", "blocks.0"),), "stage 0 does not own 'blocks.1'"),
        ((("embed", "blocks.0", "blocks.1", "head"), ("more",)), "end within stage 0"),
        ((("embed", "blocks.0", "blocks.1", "head", "more"),), "end within stage 0"),
    ],
)
def test_stages_of_another_model_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        layers_by_stage(layers_of(Cut(2)), stages)
