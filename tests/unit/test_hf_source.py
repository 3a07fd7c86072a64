"""``model=hf``: built from files on this machine, or a message that says why not."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dist_ckpt import make_plan, named_parameters, plan_cost
from dist_ckpt.errors import ConfigError
from dist_ckpt.names import named_buffers
from dist_ckpt.trainer.checks import check_model_sizes
from dist_ckpt.trainer.config import config_from_yaml, config_yaml, load_config
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.source import model_source
from tests.hf_models import BLOCKS, build

CAUSAL = ["gpt2", "llama", "gemma3", "mixtral"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a model, as ``save_pretrained`` writes it."""
    root = tmp_path_factory.mktemp("hf")
    for name in (*CAUSAL, "bert", "t5"):
        build(name).save_pretrained(root / name)
    return root


def source_of(path: Path, **options: Any) -> Any:
    return model_source(ModelConfig(kind="hf", path=str(path), **options), seed=5)  # type: ignore[arg-type]


def with_memory(source: Any) -> torch.nn.Module:
    model = source.model.to_empty(device="cpu")
    model.tie_weights()
    source.initialize(model)
    return model


@pytest.mark.parametrize("name", CAUSAL)
def test_random_weights_are_the_models_own_and_follow_from_the_seed(folder: Path, name: str) -> None:
    source = source_of(folder / name / "config.json")
    assert all(p.is_meta for p in source.model.parameters()) and make_plan(source.model, "full").blocks == BLOCKS[name]
    state = torch.get_rng_state()
    model, again = with_memory(source), with_memory(source_of(folder / name))
    assert torch.equal(torch.get_rng_state(), state)
    for named in (named_parameters, named_buffers):
        first, second, other = dict(named(model)), dict(named(again)), dict(named(build(name)))
        assert list(first) == list(other) and all(torch.equal(first[n], second[n]) for n in first)
        assert all(torch.equal(first[n], other[n]) == (named is named_buffers or "norm" in n or "ln_" in n)
                   for n in first if "bias" not in n)  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
def test_pretrained_weights_are_those_of_the_folder(folder: Path, name: str) -> None:
    model, expected = with_memory(source_of(folder / name, weights="pretrained")), dict(build(name).named_parameters())
    assert [n for n, p in named_parameters(model) if not torch.equal(p, expected[n])] == []


def test_the_loss_is_the_sum_over_tokens_of_the_next_ones(folder: Path) -> None:
    source = source_of(folder / "llama")
    model = with_memory(source).eval()
    ids = torch.randint(3, 32, (2, 9))
    labels = ids[:, 1:].clone()
    labels[0, 4:] = -100
    loss = source.loss_sum(model, {"input_ids": ids[:, :-1], "labels": labels})
    expected = model(input_ids=ids[:, :-1], labels=F.pad(labels, (1, 0), value=-100)[:, :-1], shift_labels=labels).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss / (labels != -100).sum(), expected)


def test_what_a_plan_costs_is_known_before_there_is_memory(folder: Path) -> None:
    source = source_of(folder / "gpt2")
    batch = {name: torch.empty(2, 16, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    cost = plan_cost(source.model, make_plan(source.model, "full"), batch, source.loss_sum)
    assert 0 < cost.saved_bytes < cost.baseline_saved_bytes


def test_sizes_are_read_from_the_model_and_checked(folder: Path) -> None:
    source = source_of(folder / "llama")
    assert (source.vocab_size, source.max_seq_len) == (32, 64)
    config = load_config(["model=hf", f"model.path={folder / 'llama'}"])
    with pytest.raises(ConfigError, match=r"train.seq_len=128: is above model.max_seq_len=64"):
        check_model_sizes(config, source.vocab_size, source.max_seq_len)
    with pytest.raises(ConfigError, match=r"model.vocab_size=32: data=stdlib has one token per byte"):
        check_model_sizes(load_config(["train.seq_len=32"]), source.vocab_size, source.max_seq_len)


def test_the_configuration_survives_its_yaml(folder: Path) -> None:
    config = load_config(["model=hf", f"model.path={folder / 'llama'}", "model.weights=pretrained"])
    assert config_from_yaml(config_yaml(config)) == config and config.model.kind == "hf"


MISTAKES: list[tuple[list[str], str]] = [
    (["model=hf"], r"model.path: model=hf needs one"),
    (["model.path=x"], r"model.path=x: is an option of model.kind=hf, not of decoder"),
    (["model.weights=pretrained"], r"model.weights=pretrained: is an option of model.kind=hf"),
    (["model=hf", "model.path=x", "model.n_layers=2"], r"model.n_layers=2: .* has it from its config.json"),
    (["model=hf", "model.path=x", "model.attention=chunked"], r"model.attention=chunked: .* sdpa and eager"),
    (["model=hf", "model.path=x", "model.weights=best"], r"model.weights=best: Valid: pretrained, random"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=str)
def test_mistakes_that_need_no_library(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


def test_paths_and_files_that_are_no_model(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path, message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            source_of(path, **options)

    refused(tmp_path / "none", "no such folder or file on this machine; models are never downloaded")
    refused(tmp_path, "the folder has no config.json")
    for name, text in {"text": "hello", "list": "[]", "unknown": '{"model_type": "nothing"}', "empty": "{}"}.items():
        (tmp_path / f"{name}.json").write_text(text)
        refused(tmp_path / f"{name}.json", "no configuration of a model")
    remote = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (tmp_path / "remote.json").write_text(json.dumps(remote))
    refused(tmp_path / "remote.json", "no configuration of a model")
    refused(folder / "t5", "t5 is no causal language model")
    refused(folder / "bert", "bert is no causal language model")
    refused(folder / "llama" / "config.json", "must be a folder with safetensors", weights="pretrained")
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_text((folder / "llama" / "config.json").read_text())
    refused(weightless, "has no safetensors file; model.weights=random needs none", weights="pretrained")
    routed = json.loads((folder / "mixtral" / "config.json").read_text()) | {"output_router_logits": True}
    (tmp_path / "routed.json").write_text(json.dumps(routed))
    refused(tmp_path / "routed.json", "output_router_logits adds a loss")


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "gpt2" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "llama" / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"model.weights=pretrained: .*have no .* and \d+ more"):
        with_memory(source_of(tmp_path, weights="pretrained"))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"model.weights=pretrained: .*cannot be loaded"):
        with_memory(source_of(tmp_path, weights="pretrained"))


def test_without_the_library_the_message_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "dist_ckpt.trainer.models.hf"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'dist_ckpt\[hf\]'"):
        source_of(folder / "llama")
