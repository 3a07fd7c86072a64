"""What a configuration becomes: choices, values, defaults, and the way to YAML and back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.policy import (
    POLICIES,
    EveryKPolicy,
    FullPolicy,
    NoPolicy,
    Policy,
    SelectiveAttentionPolicy,
    SelectivePolicy,
)
from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import (
    AccumSync,
    Config,
    DeviceType,
    EngineConfig,
    EngineName,
    Precision,
    TrainConfig,
    config_from_yaml,
    config_yaml,
    load_config,
)
from dist_ckpt.trainer.data.config import DataKind
from dist_ckpt.trainer.models.config import Attention, Loss, ModelConfig
from dist_ckpt.trainer.overrides import CONFIGS, GROUPS, group_choices


def test_nothing_given_is_every_default() -> None:
    assert load_config([]) == Config()


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ([], NoPolicy()),
        (["ckpt=none"], NoPolicy()),
        (["+ckpt=none"], NoPolicy()),
        (["++ckpt=none"], NoPolicy()),
        (["ckpt=null"], NoPolicy()),
        (["+ckpt=null"], NoPolicy()),
        (["ckpt=full"], FullPolicy()),
        (["+ckpt=full"], FullPolicy()),
        (["++ckpt=full"], FullPolicy()),
        (["ckpt='full'"], FullPolicy()),
        (["+ckpt=every_k"], EveryKPolicy()),
        (["+ckpt=every_k", "ckpt.k=4"], EveryKPolicy(k=4)),
        (["+ckpt=every_k", "+ckpt.k=4"], EveryKPolicy(k=4)),
        (["ckpt.k=4", "ckpt=every_k"], EveryKPolicy(k=4)),
        (["ckpt={mode: full}"], FullPolicy()),
        (["+ckpt={mode: every_k, k: 3}"], EveryKPolicy(k=3)),
        (["ckpt.mode=every_k", "ckpt.k=3"], EveryKPolicy(k=3)),
        (["ckpt=every_k", "ckpt.k=${model.n_layers}"], EveryKPolicy(k=4)),
        (["ckpt=full", "ckpt.blocks=model.layers.*"], FullPolicy(blocks="model.layers.*")),
        (["ckpt=selective"], SelectivePolicy()),
        (["ckpt=selective", "ckpt.save=[mm, attention]"], SelectivePolicy(save=("mm", "attention"))),
        (
            ["ckpt=selective_attention", "ckpt.modules=[attention, 'mlp.*']"],
            SelectiveAttentionPolicy(modules=("attention", "mlp.*")),
        ),
    ],
)
def test_policies(arguments: list[str], policy: Policy) -> None:
    config = load_config(arguments)
    assert config.ckpt == policy
    assert config == Config(ckpt=policy)


def test_every_mode_has_a_file_with_its_defaults() -> None:
    assert set(group_choices("ckpt")) == set(POLICIES)
    for mode, policy in POLICIES.items():
        assert load_config([f"ckpt={mode}"]).ckpt == policy()


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("+train.steps=7", "train.steps", 7),
        ("++train.steps=7", "train.steps", 7),
        ("train={steps: 7}", "train.steps", 7),
        ("train.steps=1_000", "train.steps", 1000),
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("train.lr=1", "train.lr", 1.0),
        ("train.clip=null", "train.clip", None),
        ("train.compile=True", "train.compile", True),
        ("train.precision=bf16", "train.precision", Precision.bf16),
        ("train.accum_sync=boundary", "train.accum_sync", AccumSync.boundary),
        ("train.resume=outputs/a/states/step_12/", "train.resume", "outputs/a/states/step_12/"),
        ("train.warmup_steps=${train.steps}", "train.warmup_steps", 60),
        ("engine=ddp", "engine.name", EngineName.ddp),
        ("+engine=fsdp1", "engine.name", EngineName.fsdp1),
        ("engine.replicas=2", "engine.replicas", 2),
        ("model.dropout=0.1", "model.dropout", 0.1),
        ("model.attention=eager", "model.attention", Attention.eager),
        ("data=synthetic", "data.kind", DataKind.synthetic),
        ("data={kind: text, glob: 'a/**/*.txt'}", "data.glob", "a/**/*.txt"),
        ("device=cpu", "device.type", DeviceType.cpu),
        ("report.every=5", "report.every", 5),
        ("run_dir=outputs/a b", "run_dir", "outputs/a b"),
        ("run_dir=outputs/${train.seed}-${ckpt.mode}-${engine.name}", "run_dir", "outputs/0-none-fsdp2"),
        ("run_dir=2024", "run_dir", "2024"),
        ("run_dir=007", "run_dir", "007"),
        ("run_dir=1e3", "run_dir", "1e3"),
        ("run_dir=true", "run_dir", "true"),
        ('run_dir="é=[1,2]"', "run_dir", "é=[1,2]"),
        (r"run_dir=\${x}", "run_dir", "${x}"),
        ("dry_run=true", "dry_run", True),
        ("world_size=64", "world_size", 64),
    ],
)
def test_values_have_their_types(argument: str, key: str, value: Any) -> None:
    config = load_config([argument])
    read: Any = config
    for name in key.split("."):
        read = getattr(read, name)
    assert read == value
    assert type(read) is type(value)
    assert config_from_yaml(config_yaml(config)) == config


def test_the_last_of_two_values_counts() -> None:
    assert load_config(["train.steps=1", "train.steps=2"]).train.steps == 2


def test_named_values_format_as_their_names() -> None:
    engine = load_config(["engine=ddp"]).engine
    assert f"{engine.name}" == str(engine.name) == engine.name == "ddp"


def test_python_may_give_plain_names_and_whole_numbers() -> None:
    model = ModelConfig(attention="sdpa", loss="chunked", rope_theta=500_000)  # type: ignore[arg-type]
    assert model.attention is Attention.sdpa and model.loss is Loss.chunked
    assert type(model.rope_theta) is float
    assert dataclasses.replace(model, attention="eager").attention is Attention.eager  # type: ignore[arg-type]
    assert TrainConfig(accum_sync="every").accum_sync is AccumSync.every  # type: ignore[arg-type]


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_loads_and_comes_back_from_yaml(group: str) -> None:
    for name in group_choices(group):
        needed = {"text": "data.glob='*.txt'", "tokens": "data.glob='*.bin'", "hf": "model.path=folder"}.get(name)
        config = load_config([f"{group}={name}", *([needed] if needed else [])])
        assert config_from_yaml(config_yaml(config)) == config


def _parameters(model: ModelConfig) -> int:
    attention = 2 * model.d_model**2 + 2 * model.d_model * model.n_kv_heads * model.head_dim
    block = attention + 3 * model.d_model * model.d_ff + 2 * model.d_model
    return model.n_layers * block + (2 - model.tied) * model.vocab_size * model.d_model + model.d_model


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 0.2), ("gpt2_small", 124), ("gpt2_xl", 1560), ("llama_7b", 6738), ("llama_70b", 68977)],
)
def test_models_have_the_size_they_are_known_for(name: str, millions: float) -> None:
    model = load_config([f"model={name}"]).model
    assert _parameters(model) / 1e6 == pytest.approx(millions, rel=0.01 if millions > 1 else 0.2)
    if name == "tiny":
        assert model == ModelConfig()


TEXTS = ["a", "${x}", r"\${x}", r"\\${x}", "a\\", "${", "$${a}", "1e3", "true", "null", "null ", "2024", "1_0", "0x1f"]
TEXTS += ["1:30", "x: y", "é", "'", '"', "~", "???", "a #b", "[a]", "{a: b}", "-", "- a", "=", "yes", " a", "\na"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_yaml(text: str) -> None:
    config = Config(run_dir=text, ckpt=FullPolicy(blocks=(text, "b")))
    assert config_from_yaml(config_yaml(config)) == config


def test_yaml_holds_every_key_and_may_leave_some_out() -> None:
    written = config_yaml(Config())
    for field in dataclasses.fields(TrainConfig):
        assert f"\n  {field.name}: " in written
    assert config_from_yaml("train: {lr: 1e-3}\nckpt: full") == Config(train=TrainConfig(lr=1e-3), ckpt=FullPolicy())


@pytest.mark.parametrize(
    ("train", "world_size", "accum", "batch"),
    [
        (TrainConfig(), 8, 1, 32),
        (TrainConfig(grad_accum=3), 2, 3, 24),
        (TrainConfig(global_batch=64), 8, 2, 64),
        (TrainConfig(global_batch=64), 1, 16, 64),
        (TrainConfig(global_batch=64, grad_accum=2), 8, 2, 64),
        (TrainConfig(micro_batch=3, global_batch=3), 1, 1, 3),
    ],
)
def test_accumulation_follows_from_the_batch(train: TrainConfig, world_size: int, accum: int, batch: int) -> None:
    config = Config(train=train)
    check(config, world_size)
    assert config.resolved_grad_accum(world_size) == accum
    assert config.resolved_global_batch(world_size) == batch


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_the_engine_reduces_gradients_when_it_is_best_unless_told(engine: str) -> None:
    assert load_config([f"engine={engine}"]).train.accum_sync is None
    for chosen in AccumSync:
        asked = load_config([f"engine={engine}", f"train.accum_sync={chosen}"])
        check(asked, 2)
        assert asked.train.accum_sync is chosen


def test_a_dry_run_is_checked_for_the_ranks_it_plans_for() -> None:
    planned = Config(dry_run=True, world_size=64, engine=EngineConfig(replicas=8))
    planned.train.global_batch = 256
    check(planned, 1)
    assert planned.ranks(1) == 64
    assert Config(dry_run=True).ranks(1) == 1
    check(Config(world_size=4), 4)
    assert Config(world_size=4).ranks(4) == 4


def test_loading_is_quick_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_config([])
    began = time.perf_counter()
    load_config(["+ckpt=every_k", "ckpt.k=4", "model=llama_7b", "engine=ddp"])
    assert time.perf_counter() - began < 0.5
    assert not list(tmp_path.iterdir())


def test_a_program_that_uses_hydra_itself_finds_its_own_again(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "mine.yaml").write_text("x: 1\n")
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.2"):
        assert load_config(["+ckpt=full"]).ckpt == FullPolicy()
        with pytest.raises(ValueError, match=r"train\.foo"):
            load_config(["train.lr=${train.foo}"])
        assert compose("mine").x == 1
    assert not GlobalHydra.instance().is_initialized()
    assert load_config(["+ckpt=full"]).ckpt == FullPolicy()


def test_mistakes_are_found_before_torch_is_imported() -> None:
    script = (
        "import sys, dist_ckpt.trainer.checks, dist_ckpt.trainer.config, dist_ckpt.trainer.help;"
        "dist_ckpt.trainer.config.load_config(['+ckpt=full', 'data=synthetic']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=CONFIGS.parent, check=True)
