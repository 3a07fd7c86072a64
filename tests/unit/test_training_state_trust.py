"""Nothing is executed from a training state, not even from one whose checksums are right."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from dist_ckpt.compat import dcp
from dist_ckpt.errors import StateError
from dist_ckpt.states.training_state import load_training_state, save_training_state
from tests.state_toys import Toy, adamw, train


class _Touch:
    """Pickles as a call that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state of the toy after one step."""
    model = Toy()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    save_training_state(tmp_path / "state", model, optimizer, {})
    return tmp_path / "state"


def _plant(state: Path, name: str, content: bytes) -> None:
    """Replaces a file of a state, checksum and all."""
    (state / name).write_bytes(content)
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (state / "manifest.json").write_text(json.dumps(manifest))


def _message(state: Path) -> str:
    model = Toy(seed=3)
    with pytest.raises(StateError) as caught:
        load_training_state(state, model, adamw(model))
    return str(caught.value)


def _metadata(state: Path) -> metadata.Metadata:
    loaded: metadata.Metadata = pickle.loads((state / ".metadata").read_bytes())
    return loaded


def test_stock_reader_would_execute_what_ours_refuses(state: Path, tmp_path: Path) -> None:
    planted = _metadata(state)
    planted.planner_data = _Touch(tmp_path / "executed")
    _plant(state, ".metadata", pickle.dumps(planted))
    message = _message(state)
    assert f"{state / '.metadata'}: names posix.mkdir" in message
    assert not (tmp_path / "executed").exists()
    filesystem.FileSystemReader(state).read_metadata()
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"cbuiltins\neval\n",
        b"cos\nsystem\n",
        b"ctorch\nload\n",
        b"ctorch.distributed.checkpoint.metadata\nos\n",
        b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n",
        b"ctorch.distributed.checkpoint.filesystem\nFileSystem\n",
        b"ctorch.serialization\nload\n",
        b"cpathlib\nPosixPath\n",
        b"ctorch\nSize.__class__\n",
    ],
)
def test_every_other_name_is_refused(state: Path, line: bytes) -> None:
    _plant(state, ".metadata", line + b".")
    module, name = line[1:].decode().split()
    assert f"names {module}.{name}, which no training state needs" in _message(state)


def test_dotted_names_of_newer_protocols_are_refused(state: Path) -> None:
    names = ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__")
    pushed = b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in names)
    _plant(state, ".metadata", b"\x80\x04" + pushed + b"\x93.")
    assert "Metadata.__init__.__globals__, which no training state needs" in _message(state)


def test_allowed_classes_cannot_be_changed(state: Path) -> None:
    """A BUILD on a class sets attributes of it for the whole process."""
    planted = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN(dVversion\nVx\ns\x86b."
    _plant(state, ".metadata", planted)
    assert f"{state / '.metadata'}: is damaged" in _message(state)
    assert metadata.Metadata.version is None and not hasattr(dcp._Record, "version")
    try:
        pickle.loads(planted)
        assert metadata.Metadata.version == "x", "what stock pickle does"
    finally:
        metadata.Metadata.version = None


def _changed(state: Path, **fields: Any) -> bytes:
    changed = _metadata(state)
    for name, value in fields.items():
        setattr(changed, name, value)
    return pickle.dumps(changed)


def test_metadata_of_the_wrong_form(state: Path) -> None:
    good = _metadata(state)
    key = "model.embedding.weight"
    index = next(i for i in good.storage_data if i.fqn == key)
    place = good.storage_data[index]

    def with_place(**fields: Any) -> dict[Any, Any]:
        values = {"relative_path": place.relative_path, "offset": place.offset, "length": place.length} | fields
        return {**good.storage_data, index: filesystem._StorageInfo(**values)}

    def with_entry(entry: Any) -> dict[str, Any]:
        return {**good.state_dict_metadata, key: entry}

    entry = good.state_dict_metadata[key]
    assert isinstance(entry, metadata.TensorStorageMetadata)
    cases: dict[str, dict[str, Any]] = {
        "refers to '../outside', which is no file of the state": {
            "storage_data": with_place(relative_path="../outside")
        },
        "refers to 'state.json', which": {"storage_data": with_place(relative_path="state.json")},
        "offset: int expected, found str": {"storage_data": with_place(offset="0")},
        "negative offset or length": {"storage_data": with_place(length=-1)},
        "transformation of the file's bytes": {"storage_data": with_place(transform_descriptors=["zstd"])},
        "storage_data: dict expected, found NoneType": {"storage_data": None},
        "parts have not as many elements": {
            "state_dict_metadata": with_entry(metadata.TensorStorageMetadata(entry.properties, entry.size, []))
        },
        "size: int expected, found str": {
            "state_dict_metadata": with_entry(metadata.TensorStorageMetadata(entry.properties, ("x",), entry.chunks))  # type: ignore[arg-type]
        },
        "TensorStorageMetadata expected, found StorageMeta": {
            "state_dict_metadata": with_entry(metadata.StorageMeta())
        },
        "TensorStorageMetadata expected, found dict": {"state_dict_metadata": with_entry({})},
    }
    for message, fields in cases.items():
        _plant(state, ".metadata", _changed(state, **fields) if fields else b"")
        found = _message(state)
        assert f"{state / '.metadata'}: is damaged or not" in found and message in found
        _plant(state, ".metadata", pickle.dumps(good))
    for content in (b"", b"N.", b"\x80\x04]", pickle.dumps({}), pickle.dumps([1] * 3)[:-2], b"Px\n."):
        _plant(state, ".metadata", content)
        assert f"{state / '.metadata'}: is damaged or not" in _message(state)
    _plant(state, ".metadata", pickle.dumps(good))
    model = Toy(seed=3)
    load_training_state(state, model, adamw(model))


def test_every_opcode_of_real_metadata_is_read_alike(state: Path) -> None:
    """What is built equals what pickle builds, but for the fields that are left out."""
    shards = [file.name for file in state.glob("*.distcp")]
    ours, stock = dcp.read_metadata(state / ".metadata", shards), _metadata(state)
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.storage_data == stock.storage_data
    named = {
        argument
        for opcode, argument, _ in pickletools.genops((state / ".metadata").read_bytes())
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE") and isinstance(argument, str)
    }
    assert not [text for text in named if str(state.parent) in text], "no path of this machine is stored"


def test_pickle_in_a_shard_is_not_executed(state: Path, tmp_path: Path) -> None:
    """As a bare pickle, and inside of a file such as torch.save writes."""
    stock = _metadata(state)
    index = next(i for i in stock.storage_data if i.fqn == "model.embedding.weight")
    place = stock.storage_data[index]
    shard = state / place.relative_path
    good = shard.read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(_Touch(tmp_path / "executed"), protocol=2))
        file.writestr("archive/version", "3\n")
    saved = io.BytesIO()
    torch.save(_Touch(tmp_path / "executed"), saved)
    for planted in (pickle.dumps(_Touch(tmp_path / "executed")), archive.getvalue(), saved.getvalue()):
        info = filesystem._StorageInfo(place.relative_path, len(good), len(planted))
        _plant(state, ".metadata", _changed(state, storage_data={**stock.storage_data, index: info}))
        _plant(state, shard.name, good + planted)
        assert f"{shard}: cannot be read as tensors" in _message(state)
        assert not (tmp_path / "executed").exists()
        _plant(state, ".metadata", pickle.dumps(stock))


def test_wrong_tensor_in_a_shard(state: Path) -> None:
    stock = _metadata(state)
    keys = ("model.embedding.weight", "model.layers.0.norm.bias")
    first, second = (next(i for i in stock.storage_data if i.fqn == key) for key in keys)
    swapped = {**stock.storage_data, first: stock.storage_data[second], second: stock.storage_data[first]}
    _plant(state, ".metadata", _changed(state, storage_data=swapped))
    assert "__0_0.distcp: cannot be read as tensors" in _message(state)


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": "2"},
        {"tied": []},
        {"extra": None},
        {"optimizer": []},
        {"optimizer": {"kind": "AdamW", "stepped": 1, "parameters": []}},
        {"optimizer": {"kind": "AdamW", "stepped": True, "parameters": {}}},
    ],
)
def test_record_of_the_wrong_form(state: Path, change: dict[str, Any]) -> None:
    record = json.loads((state / "state.json").read_text()) | change
    _plant(state, "state.json", json.dumps(record).encode())
    assert f"{state / 'state.json'}: is damaged" in _message(state)


def test_generator_states_of_the_wrong_form(state: Path) -> None:
    stock = _metadata(state)
    entries = {**stock.state_dict_metadata}
    entries["rng.0.cpu"] = entries["model.layers.0.norm.bias"]
    storage = {i: p for i, p in stock.storage_data.items() if i.fqn != "rng.0.cpu"}
    place = next(p for i, p in stock.storage_data.items() if i.fqn == "model.layers.0.norm.bias")
    storage[metadata.MetadataIndex("rng.0.cpu", [0])] = place
    _plant(state, ".metadata", _changed(state, state_dict_metadata=entries, storage_data=storage))
    assert "generator" in _message(state)
