"""Each mistake on the command line has one message: what, where, what would be valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dist_ckpt.errors import ConfigError, DistCkptError
from dist_ckpt.trainer.checks import check, check_batch
from dist_ckpt.trainer.config import Config, EngineConfig, TrainConfig, config_from_yaml, load_config
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.overrides import CONFIGS

MESHES = "tensor/context parallel meshes are not supported"

# The command line, split at spaces unless it is a list; then what the message has to say.
MISTAKES: list[tuple[str | list[str], tuple[str, ...]]] = [
    # group choices
    (
        "ckpt=selectve",
        ("ckpt=selectve", "did you mean 'selective'?", "every_k, first_n, full", "or null"),
    ),
    ("+ckpt=selectve", ("ckpt=selectve", "did you mean 'selective'?")),
    ("ckpt=None", ("did you mean 'none'?",)),
    ("ckpt=[full]", ("no such choice", "every_k, first_n, full")),
    ("ckpt=", ("no such choice", "every_k, first_n, full")),
    ("ckpt=${engine.name}", ("no such choice",)),
    ("engine=fsdp3", ("engine=fsdp3", "did you mean 'fsdp2'?", "Valid: ddp, deepspeed, deepspeed_pipe, fsdp1, fsdp2")),
    ("engine=null", ("engine=null", "Valid: ddp, deepspeed, deepspeed_pipe, fsdp1, fsdp2")),
    ("model=tinny", ("did you mean 'tiny'?", "gpt2_small, gpt2_xl, hf, llama_70b, llama_7b, tiny")),
    ("model=7", ("model=7", "llama_7b")),
    ("data=txt", ("did you mean 'text'?", "stdlib, synthetic, text, tokens")),
    ("device=gpu", ("auto, cpu, cuda",)),
    ("engine=ddp engine=fsdp2", ("engine is given twice", "engine=ddp and engine=fsdp2")),
    ("+ckpt=full ckpt=selective", ("ckpt is given twice", "+ckpt=full and ckpt=selective")),
    ("ckpt=full ckpt=null", ("ckpt is given twice",)),
    (["ckpt=full", "ckpt={mode: full}"], ("ckpt is given twice",)),
    ("ckpt=full,selective", ("several values", "one run takes one")),
    ("ckpt@x=full", ("'ckpt@x' is not a key",)),
    ("ckpt/x=full", ("did you mean ckpt.x?",)),
    ("~ckpt", ("not deleted", "ckpt=none")),
    # policies
    ("ckpt.k=4", ("ckpt.k", "no policy is chosen", "option of every_k", "+ckpt=every_k")),
    ("+ckpt.k=4", ("ckpt.k", "no policy is chosen", "+ckpt=every_k")),
    ("ckpt.foo=1", ("ckpt.foo", "no policy is chosen", "+ckpt=full or +ckpt=every_k")),
    ("ckpt=null ckpt.k=4", ("no policy is chosen",)),
    ("ckpt=none ckpt.k=4", ("ckpt.k", "'none'", "option of every_k")),
    ("+ckpt=full ckpt.k=4", ("ckpt.k", "'full'", "option of every_k")),
    ("+ckpt=every_k ckpt.mode=full", ("ckpt.k", "'full'", "option of every_k")),
    ("+ckpt=every_k ckpt.kk=4", ("ckpt.kk", "every_k", "'k'")),
    ("+ckpt=every_k ckpt.k=0", ("ckpt.k", "at least 1")),
    ("+ckpt=every_k ckpt.k=two", ("ckpt.k=two", "an integer")),
    ("+ckpt=selective ckpt.save=3", ("ckpt.save=3", "a string or a list of strings or null")),
    ("+ckpt=selective ckpt.save=[mm", ("ckpt.save=[mm", "cannot be read")),
    (["ckpt={mode: fulll}"], ("'fulll'", "did you mean 'full'?")),
    (["ckpt={k: 3}"], ("no policy is chosen", "+ckpt=every_k")),
    ("ckpt.mode=fll", ("'fll'", "did you mean 'full'?")),
    # keys
    ("train.stpes=3", ("train.stpes", "did you mean 'steps'?", "micro_batch")),
    ("steps=3", ("steps", "did you mean train.steps?")),
    ("train.dropout=0.1", ("did you mean model.dropout?",)),
    ("model.n_layer=3", ("model.n_layer", "did you mean 'n_layers'?")),
    ("trian.lr=1", ("trian", "did you mean 'train'?", "ckpt, data, device, dry_run")),
    ("train.lr.x=3", ("train.lr", "must be a number")),
    ("train=5", ("train=5", "a section", "micro_batch")),
    ("train=null", ("train=null", "a section")),
    ("+experiment=foo", ("experiment", "no such key")),
    ("hydra.run.dir=x", ("Hydra's own", "run_dir")),
    ("train/lr=3", ("did you mean train.lr?",)),
    ("train..lr=3", ("'train..lr' is not a key",)),
    ("ckpt.save[0]=mm", ("'ckpt.save[0]' is not a key",)),
    ("=3", ("not a key",)),
    # meshes
    ("engine.tp=2", ("engine.tp", MESHES)),
    ("engine.cp=2", ("engine.cp", MESHES)),
    ("engine.tensor_parallel=2", ("engine.tensor_parallel", MESHES)),
    ("engine.context-parallel=2", ("engine.context-parallel", MESHES)),
    ("engine.tensor_model_parallel_size=2", (MESHES,)),
    ("engine.mesh=[2,2]", ("engine.mesh", MESHES)),
    ("engine.mesh.tp=2", (MESHES,)),
    ("tp=2", (MESHES,)),
    ("engine=tp", (MESHES, "ddp, deepspeed, deepspeed_pipe, fsdp1, fsdp2")),
    # types
    ("train.micro_batch=2.5", ("train.micro_batch=2.5", "an integer")),
    ("train.steps=", ("train.steps", "an integer")),
    ("train.steps=true", ("train.steps=true", "an integer")),
    ("train.lr=fast", ("train.lr=fast", "a number")),
    ("train.lr=???", ("train.lr=???", "a number")),
    ("train.lr=nan", ("train.lr=nan", "finite")),
    ("train.clip=inf", ("finite, or null",)),
    ("train.clip=None", ("train.clip=None", "a number or null", "written null")),
    ("train.resume=None", ("train.resume=None", "written null")),
    ("run_dir=[a]", ("run_dir", "a string or null")),
    ("train.compile=1", ("train.compile=1", "true or false")),
    ("dry_run=yes", ("dry_run=yes", "true or false")),
    ("train.precision=fp16", ("train.precision=fp16", "Valid: bf16, fp32")),
    ("train.accum_sync=never", ("Valid: boundary, every, null",)),
    ("engine.stage=2", ("engine.stage: no such key", "did you mean 'stages'?")),
    ("engine=fsdp2 engine.stages=2", ("engine.stages=2", "engine=deepspeed_pipe, not of engine=fsdp2")),
    ("engine=deepspeed engine.stages=2", ("engine.stages=2", "engine=deepspeed_pipe, not of engine=deepspeed")),
    ("engine.config=zero.json", ("engine.config=zero.json", "engine=deepspeed and engine=deepspeed_pipe")),
    ("engine=deepspeed_pipe engine.stages=1", ("needs 2 or more",)),
    ("engine=deepspeed_pipe engine.partition=[2,x]", ("engine.partition", "a string or a list of integers")),
    ("engine=deepspeed engine.replicas=2", ("engine.replicas=2", "engine=fsdp2")),
    ("engine=deepspeed train.accum_sync=every", ("train.accum_sync=every", "leave it null")),
    ("engine.name=fsdp3", ("engine.name=fsdp3", "ddp, deepspeed, deepspeed_pipe, fsdp1, fsdp2")),
    ("model.attention=flash", ("model.attention=flash", "chunked, eager, sdpa")),
    ("world_size=four", ("world_size=four", "an integer or null")),
    # syntax
    ("", ("key=value",)),
    ("selective", ("did you mean ckpt=selective?", "key=value")),
    ("train.steps", ("train.steps", "key=value")),
    ("--steps", ("--steps", "key=value")),
    ("--ckpt=full", ("write ckpt=full",)),
    ("train.lr=1e-3,2e-3", ("train.lr=1e-3,2e-3", "one run takes one")),
    ("train.lr=range(1,3)", ("one run takes one",)),
    ("train.lr=abs(3)", ("train.lr=abs(3)", "cannot be read")),
    ("train.lr='1", ("cannot be read",)),
    (["train.steps = 5"], ("train.steps = 5", "cannot be read")),
    ("train.lr=${train.foo}", ("train.lr", "'train.foo' not found")),
    ("train.lr=${train.lr}", ("train.lr", "Recursive")),
    ("train.lr=${nope:3}", ("train.lr", "nope")),
    ("data=text data.glob=/a/{b,c}.txt", ("cannot be read", "quote it: 'data.glob=\"/a/{b,c}.txt\"'")),
    ("data=text data.glob=~/a.txt", ("cannot be read", "'data.glob=\"~/a.txt\"'")),
    ("data=text data.glob=a,b", ("several values", "'data.glob=\"a,b\"'")),
    # ranges
    ("train.micro_batch=0", ("train.micro_batch=0", "at least 1")),
    ("train.steps=-1", ("at least 1",)),
    ("train.seq_len=0", ("at least 1",)),
    ("train.grad_accum=0", ("at least 1",)),
    ("train.global_batch=0", ("at least 1",)),
    ("train.keep=0", ("at least 1",)),
    ("train.eval_batches=0", ("at least 1",)),
    ("train.save_every=-1", ("at least 0",)),
    ("train.eval_every=-1", ("at least 0",)),
    ("train.warmup_steps=-1", ("at least 0",)),
    ("train.weight_decay=-0.1", ("at least 0",)),
    ("train.seed=-1", ("at least 0",)),
    ("train.seed=99999999999999999999", ("below 4294967296",)),
    ("train.micro_batch=1000000000000", ("train.micro_batch=1000000000000", "below 2147483648")),
    ("train.steps=2147483648", ("below 2147483648",)),
    (f"train.lr=1{'0' * 400}", ("must be finite",)),
    ("model.d_model=3000000000", ("model.d_model=3000000000", "below 2147483648")),
    ("model.n_layers=1000000", ("model.n_layers=1000000", "at most 10000")),
    ("model.d_model=2147483640 model.d_ff=2147483640", ("model.d_model", "more than 2**60 elements")),
    ("data=synthetic data.documents=1000000000", ("data.documents", "at most 1000000")),
    ("data=synthetic data.document_tokens=1", ("data.document_tokens=1", "at least 2, or null")),
    ("train.lr=0", ("train.lr=0:", "above 0")),
    ("train.optimizer_eps=0", ("above 0",)),
    ("train.beta1=1", ("train.beta1", "below 1")),
    ("train.beta2=-0.5", ("train.beta2", "at least 0")),
    ("train.min_lr_ratio=2", ("train.min_lr_ratio=2:", "at most 1")),
    ("train.clip=0", ("above 0, or null",)),
    ("report.every=0", ("report.every=0", "at least 1")),
    ("world_size=0", ("world_size=0", "at least 1")),
    ("run_dir=", ("run_dir", "empty")),
    ("engine.replicas=0", ("engine.replicas=0", "at least 1")),
    # what has to fit together
    ("train.seq_len=4096", ("train.seq_len=4096", "model.max_seq_len=2048")),
    ("model.n_heads=3", ("model.d_model=64", "model.n_heads=3")),
    ("model.n_kv_heads=3", ("model.n_heads=4", "model.n_kv_heads=3")),
    ("model.vocab_size=100", ("model.vocab_size=100", "256", "data=synthetic")),
    ("engine=ddp engine.replicas=2", ("engine.replicas=2", "engine=ddp", "engine=fsdp2")),
    ("engine=fsdp1 engine.replicas=2", ("engine=fsdp1", "engine=fsdp2")),
    ("engine=fsdp1 train.precision=bf16 train.accum_sync=boundary", ("train.accum_sync=boundary", "bfloat16", "ddp")),
    ("model.d_model=60 model.n_heads=4", ("rotary embeddings need an even head size",)),
    ("train.resume=outo", ("train.resume=outo", "did you mean 'auto'?", "step_N")),
    ("train.resume=outputs/a", ("step_N", "outputs/mine/states/step_40")),
    ("train.resume=", ("train.resume", "auto, null")),
    ("train.resume=auto", ("train.resume=auto", "run_dir")),
    ("data=text", ("data.glob",)),
    ("data.glob=x", ("data.glob", "text", "stdlib")),
    ("data.dtype=uint16", ("data.dtype", "tokens")),
    ("data=tokens data.glob=x data.dtype=int8", ("data.dtype=int8", "uint16, uint32")),
    ("data.kind=txt", ("data.kind=txt", "did you mean 'text'?")),
]


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=lambda value: " ".join(value) if value else "empty")
def test_one_message(line: str | list[str], says: tuple[str, ...]) -> None:
    with pytest.raises(DistCkptError) as caught:
        load_config(line.split(" ") if isinstance(line, str) else line)
    message = str(caught.value)
    assert [part for part in says if part not in message] == [], message
    assert "\n" not in message
    assert "Hydra" not in message or "Hydra's own" in message or "cannot be read" in message


@pytest.mark.parametrize(
    ("line", "world_size", "says"),
    [
        (
            "train.global_batch=50",
            8,
            ("train.global_batch=50", "train.micro_batch=4 × 8 ranks = 32 sequences", "nearest: 32 or 64"),
        ),
        ("train.global_batch=3", 1, ("train.micro_batch=4 × 1 rank = 4 sequences", "nearest: 4")),
        (
            "train.global_batch=64 train.grad_accum=3",
            8,
            ("train.global_batch=64", "train.grad_accum=3", "needs train.grad_accum=2"),
        ),
        ("engine.replicas=3", 8, ("engine.replicas=3", "8 ranks", "1, 2, 4, 8")),
        ("engine.replicas=4 dry_run=true world_size=6", 1, ("6 ranks", "1, 2, 3, 6")),
        ("world_size=4", 8, ("world_size=4", "has 8 ranks", "--nproc_per_node 4", "dry_run=true")),
        ("world_size=4", 1, ("world_size=4", "has 1 rank;")),
    ],
)
def test_one_message_about_the_ranks(line: str, world_size: int, says: tuple[str, ...]) -> None:
    config = load_config(line.split())
    with pytest.raises(ConfigError) as caught:
        check(config, world_size)
    message = str(caught.value)
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize(
    ("line", "rows", "says"),
    [
        ("train.micro_batch=2000000000", 24_000, "train.micro_batch=2000000000: more than the 24,000 training rows"),
        ("train.grad_accum=7", 27, "train.micro_batch=4 × 7 micro-batches per update: more than the 27 training rows"),
        ("train.global_batch=64", 31, "train.micro_batch=4 × 8 micro-batches per update"),
        ("train.global_batch=64 dry_run=true world_size=4", 15, "train.micro_batch=4 × 4 micro-batches per update"),
    ],
)
def test_an_update_that_reads_more_than_an_epoch_is_refused(line: str, rows: int, says: str) -> None:
    config = load_config(line.split())
    with pytest.raises(ConfigError) as caught:
        check_batch(config, 2, rows)
    assert says in str(caught.value)
    if "global_batch" in line:
        check_batch(config, 2, rows + 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelConfig(attention="flash"), "model.attention=flash: Valid: chunked, eager, sdpa"),
        (lambda: ModelConfig(n_layers=0), "model.n_layers=0: must be at least 1"),
        (lambda: ModelConfig(d_model=64.0), "model.d_model=64.0: must be an integer"),
        (lambda: TrainConfig(precision="fp8"), "train.precision=fp8: "),
        (lambda: EngineConfig(name="ddp", replicas=2), "engine.replicas=2"),
        (lambda: Config(train=TrainConfig(seq_len=4096)), "train.seq_len=4096: is above"),
        (lambda: Config(train={"steps": 3}), "must be a TrainConfig"),
        (lambda: Config(world_size=0), "world_size=0: must be at least 1, or null"),
    ],
)
def test_sections_made_in_python_are_checked_too(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("# only a comment", "empty"),
        ("5", "not a configuration in YAML"),
        ("[1]", "must be a mapping"),
        ("a: [", "line 1"),
        ("train: {lr: 1}\ntrain: {lr: 2}", "duplicate key train"),
        ("!!python/object/apply:os.system [ls]", "constructor"),
        ("train: {lrr: 1}", "did you mean 'lr'?"),
        ("train: {micro_batch: 0}", "at least 1"),
        ("ckpt: {k: 2}", "no policy is chosen"),
        ("ckpt: {mode: full, k: 2}", "option of every_k"),
        ("1: 2", "1: no such key"),
    ],
)
def test_one_message_about_a_file(text: str, says: str) -> None:
    with pytest.raises(DistCkptError) as caught:
        config_from_yaml(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_package_without_its_files_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("dist_ckpt.trainer.overrides.CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"config\.yaml: not there"):
        load_config([])


def test_a_broken_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for file in CONFIGS.rglob("*.yaml"):
        copy = tmp_path / file.relative_to(CONFIGS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(file.read_text())
    (tmp_path / "engine" / "ddp.yaml").write_text("name: [")
    (tmp_path / "engine" / "mine.yaml").write_text("name: fsdp2\nreplica: 2")
    monkeypatch.setattr("dist_ckpt.trainer.overrides.CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"ddp\.yaml"):
        load_config(["engine=ddp"])
    with pytest.raises(ConfigError, match=r"engine\.replica: no such key; did you mean 'replicas'"):
        load_config(["engine=mine"])
