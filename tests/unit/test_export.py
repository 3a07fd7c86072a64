"""The weights of a training state as a plain safetensors file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from dist_ckpt.errors import StateError
from dist_ckpt.states.training_state import save_training_state
from dist_ckpt.trainer.export import export_weights, main
from tests.state_toys import Toy, adamw, train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Toy, Path]:
    """A trained toy and its state."""
    model = Toy()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    save_training_state(tmp_path / "step_2", model, optimizer, {})
    return model, tmp_path / "step_2"


def test_weights_and_buffers_under_plain_names(saved: tuple[Toy, Path], tmp_path: Path) -> None:
    model, state = saved
    out = tmp_path / "weights.safetensors"
    out.write_bytes(b"an earlier one")
    written = export_weights(state, out)
    loaded = load_file(out)
    assert set(loaded) == set(written) == set(model.state_dict()) - {"head.weight"}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.items())
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    other = Toy(seed=4)
    missing, unexpected = load_model(other, out)
    assert not missing and not unexpected
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "weights.safetensors"]


def test_program(saved: tuple[Toy, Path], tmp_path: Path) -> None:
    out = tmp_path / "weights.safetensors"
    run = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "export.py"), str(saved[1]), str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"{out}: 14 tensors, ") and run.stdout.count("\n") == 1
    assert len(load_file(out)) == 14


def test_mistakes_are_one_message(saved: tuple[Toy, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, out = str(saved[1]), str(tmp_path / "out.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    mistakes = {
        (str(tmp_path / "none"), out): f"{tmp_path / 'none'}: no such folder",
        (str(tmp_path), out): f"{tmp_path}: is not a complete training state",
        (state, str(tmp_path / "out.pt")): "must end in .safetensors",
        (state, str(tmp_path / "none" / "out.safetensors")): f"{tmp_path / 'none'}: no such folder to write",
        (state, str(tmp_path / "folder.safetensors")): "folder.safetensors: cannot be written",
    }
    for arguments, message in mistakes.items():
        assert main(arguments) == 2
        written = capsys.readouterr()
        assert message in written.err and written.err.count("\n") == 1 and not written.out
    assert main([state]) == 2
    assert "the following arguments are required: out" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.safetensors", "step_2"]


def test_damaged_state_writes_nothing(saved: tuple[Toy, Path], tmp_path: Path) -> None:
    shard = saved[1] / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(StateError, match=r"__0_0.distcp: is damaged"):
        export_weights(saved[1], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
