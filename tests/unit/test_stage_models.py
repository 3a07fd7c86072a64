"""What is left of a model for one stage of a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.engines.stage import keep_stage, refuse_untrained, shared_parameters
from dist_ckpt.errors import EngineError
from dist_ckpt.stages import layers_of, partition
from dist_ckpt.trainer.models.config import Loss, ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer


def transformer(**options: object) -> Transformer:
    torch.manual_seed(0)
    sizes = {"n_layers": 4, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "vocab_size": 31}
    model = Transformer(ModelConfig(**(sizes | options)))  # type: ignore[arg-type]
    init_parameters(model, seed=1, n_layers=4)
    return model


STAGES = (
    ("tok_embeddings", "dropout", "layers.0"),
    ("layers.1", "layers.2"),
    ("layers.3", "norm", "output"),
)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_the_whole_models_names_between_them(tied: bool) -> None:
    whole = transformer(tied=tied)
    names = dict(whole.named_parameters())
    shared = shared_parameters(whole, STAGES)
    assert shared == ({"tok_embeddings.weight": (0, 2)} if tied else {})
    found: list[str] = []
    for stage in range(3):
        model = transformer(tied=tied)
        keep_stage(model, STAGES, stage)
        own = dict(model.named_parameters())
        assert all(torch.equal(own[name], names[name]) for name in own)
        assert {name for name, _ in model.named_buffers()} == {"rope_cos", "rope_sin"}
        found += own
    assert sorted(found) == sorted([*names, *shared])


def test_a_tied_head_keeps_a_shell_of_the_embedding_and_nothing_more() -> None:
    model = transformer(tied=True)
    keep_stage(model, STAGES, 2)
    assert model.output.weight is model.tok_embeddings.weight
    assert sorted(name for name, _ in model.named_parameters(remove_duplicate=False)) == sorted(
        ["tok_embeddings.weight", "output.weight", "norm.weight"]
        + [f"layers.3.{name}" for name, _ in transformer().layers[3].named_parameters()]
    )


@pytest.mark.parametrize("loss", [Loss.full, Loss.chunked])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_another_are_the_model(tied: bool, loss: Loss) -> None:
    options = {"tied": tied, "loss": loss, "dropout": 0.1} | ({"loss_chunk": 5} if loss is Loss.chunked else {})
    ids, labels = torch.randint(0, 31, (2, 2, 9)).unbind()
    whole = transformer(**options)
    models = [transformer(**options) for _ in STAGES]
    torch.manual_seed(3)
    expected = whole(ids, labels)
    torch.manual_seed(3)
    x: Tensor = ids
    layers = layers_of(whole).layers
    for stage, (names, model) in enumerate(zip(STAGES, models, strict=True)):
        keep_stage(model, STAGES, stage)
        for layer in layers:
            if set(layer.modules) <= set(names):
                x = layer.run(model, x)
    assert torch.equal(layers_of(whole).loss(model, x, labels), expected)


class Tree(nn.Module):
    """Two names for one module, one for a part of another, and helpers without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = nn.Dropout(0.5)
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.again = self.first
        self.second = nn.ModuleDict({"a": nn.Linear(3, 3), "part": self.first[1]})


def test_a_module_under_two_names_is_kept_whole_where_it_is_used() -> None:
    stages = (("first",), ("second",), ("again",))
    for stage, names in enumerate(
        (
            {"first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias"},
            {"first.1.weight", "first.1.bias", "second.a.weight", "second.a.bias"},
            {"first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias"},
        )
    ):
        tree = Tree()
        keep_stage(tree, stages, stage)
        assert {name for name, _ in tree.named_parameters()} == names
        assert "helper" in tree._modules
        if names_of_modules := [name for name in stages[stage] if name != "second"]:
            assert tree.get_submodule(names_of_modules[0])(torch.ones(1, 3)).shape == (1, 3)
    assert shared_parameters(Tree(), stages) == {
        "first.0.weight": (0, 2),
        "first.0.bias": (0, 2),
        "first.1.weight": (0, 1, 2),
        "first.1.bias": (0, 1, 2),
    }


def test_a_stage_without_anything_to_train_is_refused() -> None:
    model = transformer()
    refuse_untrained(model, STAGES)
    model.layers[1].requires_grad_(False)
    refuse_untrained(model, STAGES)
    model.layers[2].requires_grad_(False)
    with pytest.raises(EngineError, match=r"stage 1 of 3 \(layers\.\{1-2\}\) has no parameter that is trained"):
        refuse_untrained(model, STAGES)


def test_the_models_own_layers_can_be_cut() -> None:
    model = transformer()
    assert partition(layers_of(model), model, 3, (1, 2, 1)) == STAGES
