"""Training states in one process: what is saved, what is put back, and how a mistake is told."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from dist_ckpt.errors import StateError
from dist_ckpt.states.training_state import load_training_state, rng_states, save_training_state
from tests.state_toys import Toy, adamw, assert_same, train, whole


def _trained(steps: int = 2, **options: Any) -> tuple[Toy, AdamW]:
    model = Toy(**options)
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def _fresh(**options: Any) -> tuple[Toy, AdamW]:
    model = Toy(seed=9, **options)
    return model, adamw(model)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state of the toy after two steps."""
    path = tmp_path / "state"
    save_training_state(path, *_trained(), {"step": 2, "position": 7})
    return path


def test_round_trip(state: Path) -> None:
    model, optimizer = _fresh()
    extra = load_training_state(state, model, optimizer)
    assert extra == {"step": 2, "position": 7, "rng": True}
    assert_same(whole(model, optimizer), whole(*_trained()))
    assert model.head.weight is model.embedding.weight


def _compile_block(model: Toy, index: int) -> None:
    model.layers[index] = cast(nn.Module, torch.compile(model.layers[index]))


def test_names_are_the_plain_models(tmp_path: Path, state: Path) -> None:
    """Under torch.compile too, of the whole model and of a block."""
    model, optimizer = _trained()
    expected = whole(model, optimizer)
    _compile_block(model, 0)
    save_training_state(tmp_path / "compiled", cast(nn.Module, torch.compile(model)), optimizer, {})
    records = [json.loads((folder / "state.json").read_text()) for folder in (state, tmp_path / "compiled")]
    assert records[0]["optimizer"] == records[1]["optimizer"]
    fresh, fresh_optimizer = _fresh()
    load_training_state(tmp_path / "compiled", fresh, fresh_optimizer)
    assert_same(whole(fresh, fresh_optimizer), expected)
    other, other_optimizer = _fresh()
    _compile_block(other, 1)
    compiled = cast(nn.Module, torch.compile(other))
    load_training_state(state, compiled, other_optimizer)
    assert_same(whole(compiled, other_optimizer), expected)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    model, optimizer = _trained()
    before = rng_states()["cpu"]
    save_training_state(tmp_path / "state", model, optimizer, {})
    assert torch.equal(before, rng_states()["cpu"]), "saving draws none"
    expected = torch.rand(3)
    fresh = _fresh()
    load_training_state(tmp_path / "state", *fresh)
    assert torch.equal(torch.rand(3), expected)


def test_optimizer_that_never_stepped_stays_one(tmp_path: Path) -> None:
    model = Toy()
    optimizer = adamw(model)
    save_training_state(tmp_path / "state", model, optimizer, {})
    assert not optimizer.state, "saving counts no step"
    other, used = _trained()
    load_training_state(tmp_path / "state", other, used)
    assert not used.state
    torch.manual_seed(3)
    train(model, optimizer, 2)
    torch.manual_seed(3)
    train(other, used, 2)
    assert_same(whole(model, optimizer), whole(other, used))


def test_parameters_without_gradient_keep_no_moments(tmp_path: Path) -> None:
    def run(frozen: bool) -> tuple[Toy, AdamW]:
        model = Toy(tied=False)
        model.head.weight.requires_grad = not frozen
        optimizer = adamw(model)
        model.layers[1].requires_grad_(False)
        train(model, optimizer, 2)
        model.layers[1].requires_grad_(True)
        return model, optimizer

    model, optimizer = run(frozen=False)
    save_training_state(tmp_path / "state", model, optimizer, {})
    fresh, fresh_optimizer = _fresh(tied=False)
    load_training_state(tmp_path / "state", fresh, fresh_optimizer)
    assert len(fresh_optimizer.state) == len(optimizer.state) < len(list(model.parameters()))
    for m, o in ((model, optimizer), (fresh, fresh_optimizer)):
        torch.manual_seed(3)
        train(m, o, 2)
    assert_same(whole(model, optimizer), whole(fresh, fresh_optimizer))


def test_groups_keep_the_options_that_the_run_asks_for(tmp_path: Path) -> None:
    """In another order, with an empty one between, and with a learning rate that is a tensor."""

    def build(order: int, lr: float | torch.Tensor) -> tuple[Toy, AdamW]:
        model = Toy(seed=order)
        decay = [p for name, p in model.named_parameters() if "norm" not in name]
        rest = [p for name, p in model.named_parameters() if "norm" in name]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": [], "weight_decay": 0.5},
            {"params": rest, "weight_decay": 0.0},
        ]
        return model, AdamW(groups[::order], lr=lr, betas=(0.8, 0.9), capturable=False)

    model, optimizer = build(1, 0.25)
    optimizer.param_groups[2]["lr"] = 0.125
    train(model, optimizer, 2)
    save_training_state(tmp_path / "state", model, optimizer, {})
    other, loaded = build(-1, torch.tensor(7.0))
    for group in loaded.param_groups:
        group.update(betas=(0.1, 0.2), weight_decay=9.0, foreach=False)
    loaded.param_groups[0]["lr"] = 3.0
    groups = [dict(group) for group in loaded.param_groups]
    load_training_state(tmp_path / "state", other, loaded)
    assert [dict(group) for group in loaded.param_groups] == groups
    assert [group["lr"] for group in groups] == [3.0, 7.0, 7.0]
    assert [len(g["params"]) for g in loaded.param_groups] == [len(g["params"]) for g in optimizer.param_groups][::-1]
    for name, parameter in model.named_parameters():
        twin = other.get_parameter(name)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], loaded.state[twin]["exp_avg"])


def test_optimizers_without_moments(tmp_path: Path) -> None:
    model = Toy()
    save_training_state(tmp_path / "state", model, SGD(model.parameters(), lr=0.5), {})
    other = Toy(seed=4)
    optimizer = SGD(other.parameters(), lr=0.1)
    load_training_state(tmp_path / "state", other, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.embedding.weight, other.embedding.weight)


class _Extra(Toy):
    def get_extra_state(self) -> str:
        return "text"

    def set_extra_state(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("make", "extra", "message"),
    [
        (lambda: _trained(), {"when": object()}, "extra: is not JSON"),
        (lambda: _trained(), {"rng": 1}, "'rng' is taken"),
        (lambda: (_Extra(), SGD(nn.Linear(1, 1).parameters(), lr=1.0)), {}, "parameter 0 is not in the model"),
        (lambda: _with_sgd(_Extra()), {}, "_extra_state: is str; a training state holds only tensors"),
    ],
    ids=["extra", "reserved", "foreign-parameter", "extra-state"],
)
def test_what_cannot_be_saved(
    tmp_path: Path, make: Callable[[], tuple[nn.Module, Optimizer]], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(StateError, match=message):
        save_training_state(tmp_path / "state", *make(), extra)


def _with_sgd(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, SGD(model.parameters(), lr=1.0)


def test_folder_in_use_is_refused(state: Path) -> None:
    with pytest.raises(StateError, match="is not empty"):
        save_training_state(state, *_trained(), {})


def _refuse(state: Path, model: nn.Module, optimizer: Optimizer) -> str:
    """The message of a load that must fail and change nothing."""
    before = whole(model, optimizer) if optimizer.state else {k: v.clone() for k, v in model.state_dict().items()}
    values = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(StateError) as caught:
        load_training_state(state, model, optimizer)
    if optimizer.state:
        assert_same(before, whole(model, optimizer))
    else:
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [dict(group) for group in optimizer.param_groups] == values
    assert str(state) in str(caught.value)
    return str(caught.value)


class _Wider(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up = nn.Linear(6, 13)
        self.head.weight = nn.Parameter(torch.zeros(11, 6, dtype=torch.float64))


def test_state_of_another_model(state: Path) -> None:
    message = _refuse(state, *_trained(layers=4))
    assert "model has 4 layers, state has 2" in message
    assert "12 missing from the state (layers.2.norm.weight, " in message.replace("bias", "weight")
    assert "and 9 more" in message
    assert "model has 1 layers, state has 2" in _refuse(state, *_fresh(layers=1))
    assert "missing from the state (head.weight)" in _refuse(state, *_fresh(tied=False))
    wider = _Wider()
    message = _refuse(state, wider, adamw(wider))
    assert "layers.0.up.weight: state (12, 6), model (13, 6)" in message
    linear = nn.Linear(2, 2)
    assert "not in the model" in _refuse(state, linear, AdamW(linear.parameters()))


def test_state_of_another_dtype(tmp_path: Path) -> None:
    save_training_state(tmp_path / "state", *_with_sgd(nn.Linear(2, 2)), {})
    message = _refuse(tmp_path / "state", *_with_sgd(nn.Linear(2, 2).double()))
    assert "weight: state torch.float32, model torch.float64" in message


def test_state_of_another_optimizer(state: Path) -> None:
    model = Toy()
    assert "saved with optimizer AdamW, this run has SGD" in _refuse(state, model, SGD(model.parameters(), 0.1))
    fewer = AdamW(list(model.layers.parameters())[1:])
    assert "the optimizer has other parameters (only in the state: embedding.weight, layers.0.norm.weight)" in _refuse(
        state, model, fewer
    )
    with_amsgrad = adamw(model)
    for group in with_amsgrad.param_groups:
        group["amsgrad"] = True
    message = _refuse(state, model, with_amsgrad)
    assert "does not fit the optimizer" in message and "max_exp_avg_sq" in message
    assert not with_amsgrad.state


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_damaged_files_are_found_first(state: Path, name: str) -> None:
    file = state / name
    good = file.read_bytes()
    for position in (0, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        assert f"{file}: is damaged" in _refuse(state, *_trained(1))
    file.write_bytes(good[: len(good) // 2])
    assert f"{file}: is damaged: it has {len(good) // 2} bytes of {len(good)}" in _refuse(state, *_trained(1))
    file.write_bytes(good + b"x")
    assert f"{file}: is damaged" in _refuse(state, *_trained(1))
    file.unlink()
    assert f"{file}: is missing" in _refuse(state, *_fresh())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "was not written by dist_ckpt"),
        (b'{"format": "else"}', "was not written by dist_ckpt"),
        (b'{"format": "dist_ckpt training state", "schema": 2}', "has schema 2; this version reads 1"),
        (b'{"format": "dist_ckpt training state", "schema": 1}', "its list of files is not valid"),
    ],
)
def test_manifest_that_is_none(state: Path, content: bytes, message: str) -> None:
    (state / "manifest.json").write_bytes(content)
    assert message in _refuse(state, *_fresh())


def test_manifest_cannot_point_outside(state: Path) -> None:
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["files"]["../outside"] = {"bytes": 0, "sha256": ""}
    (state / "manifest.json").write_text(json.dumps(manifest))
    assert "its list of files is not valid" in _refuse(state, *_fresh())


def test_foreign_folders(state: Path, tmp_path: Path) -> None:
    assert "no such folder" in _refuse(tmp_path / "nowhere", *_fresh())
    (tmp_path / "empty").mkdir()
    assert "is not a complete training state" in _refuse(tmp_path / "empty", *_fresh())
    (state / "manifest.json").unlink()
    assert f"{state}: is not a complete training state" in _refuse(state, *_fresh())
    shutil.rmtree(state)
    state.write_bytes(pickle.dumps({}))
    assert "no such folder" in _refuse(state, *_fresh())
