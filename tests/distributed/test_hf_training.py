"""``model=hf`` under every engine: policies change no bit, and a saved state resumes under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dist_ckpt import make_plan, named_parameters
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.export import export_weights
from dist_ckpt.trainer.job import build_engine
from dist_ckpt.trainer.models.source import model_source
from dist_ckpt.trainer.process import Place
from tests.hf_models import VOCAB, build
from tests.ranks import RankGroups

ENGINES = ["ddp", "fsdp1", "fsdp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for name in ("gpt2", "llama", "mixtral"):
        build(name).save_pretrained(root / name)
    return root


def trained(rank: int, world: int, overrides: list[str], load: str | None, save: str | None, steps: int) -> Any:
    """(losses, this rank's part of each weight) of some steps on fixed data."""
    config = load_config(["model=hf", "data=synthetic", "train.seq_len=8", "train.lr=0.01", *overrides])
    source = model_source(config.model, seed=5)
    engine = build_engine(config, Place(rank, world, rank, world), torch.device("cpu"), source)
    torch.manual_seed(rank)
    engine.prepare(source.model, make_plan(source.model, config.ckpt))
    if load is not None:
        engine.load(load)
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * engine.step + rank)
        torch.manual_seed(1000 * engine.step + rank)  # dropout, whatever step a run has started from
        ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
        losses.append(engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}]).loss)
    if save is not None:
        engine.save(save, {})
    weights: dict[str, Tensor] = {n: local_tensor(p).detach().clone() for n, p in named_parameters(engine.model)}
    return losses, weights


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert [n for n in expected[1] if not torch.equal(found[1][n], expected[1][n])] == []


def check(ranks: RankGroups, engine: str, path: Path, policies: list[list[str]], *options: str) -> None:
    base = [f"engine={engine}", f"model.path={path}", *options]
    expected = ranks(2).run(trained, base, None, None, 2)
    assert len(set(expected[0][0])) == 2
    for policy in policies:
        for found, wanted in zip(ranks(2).run(trained, base + policy, None, None, 2), expected, strict=True):
            assert_equal(found, wanted)


def test_a_policy_changes_no_bit(ranks: RankGroups, folder: Path) -> None:
    check(ranks, "fsdp2", folder / "llama", [["+ckpt=selective"]])


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("engine", ENGINES)
def test_policies_change_no_bit(ranks: RankGroups, folder: Path, engine: str, name: str, precision: str) -> None:
    policies = [["+ckpt=full"], ["+ckpt=selective"], ["+ckpt=segments", "ckpt.k=2"], ["+ckpt=nested", "ckpt.k=2"]]
    options = (f"train.precision={precision}", "model.weights=pretrained")
    check(ranks, engine, folder / name, policies, *options)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_resumes_under_another_policy(ranks: RankGroups, folder: Path, engine: str, tmp_path: Path) -> None:
    base = [f"engine={engine}", f"model.path={folder / 'gpt2'}"]
    whole = ranks(2).run(trained, base, None, None, 3)
    ranks(2).run(trained, [*base, "+ckpt=full"], None, str(tmp_path / "step_2"), 2)
    rest = ranks(2).run(trained, [*base, "+ckpt=selective"], str(tmp_path / "step_2"), None, 1)
    for found, expected in zip(rest, whole, strict=True):
        assert_equal(found, (expected[0][2:], expected[1]))
    exported = export_weights(tmp_path / "step_2", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "gpt2" / "config.json").read_text())
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(dict(theirs.named_parameters())[name], exported[name]) for name in exported)


@pytest.mark.full
def test_every_engine_starts_from_the_same_weights(ranks: RankGroups, folder: Path) -> None:
    losses = [
        outcome[0][0]
        for engine in ENGINES
        for outcome in ranks(2).run(trained, [f"engine={engine}", f"model.path={folder / 'llama'}"], None, None, 1)
    ]
    assert len(set(losses)) == 1
