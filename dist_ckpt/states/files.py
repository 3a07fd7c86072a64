"""The files in a training state's folder, and the checks they must pass before anything is used.

========================  ===========================================================================
``__0_0.distcp`` …        tensors, written by torch.distributed.checkpoint, one file a rank
``.metadata``             where each tensor lies
``state.json``            everything except tensors
``manifest.json``         size and checksum of each file above; written last: if it exists, the state is complete
========================  ===========================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dist_ckpt.compat.dcp import METADATA_FILE, read_metadata
from dist_ckpt.errors import StateError
from dist_ckpt.states.agreement import agreed, on_rank_zero, rank_and_world_size, together

RECORD_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
SHARD_SUFFIX = ".distcp"

FORMAT = "dist_ckpt training state"
SCHEMA = 1

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class StateFolder:
    """A complete training state whose every file has been checked."""

    path: Path
    record: Mapping[str, Any]
    """What ``state.json`` holds."""
    metadata: Metadata
    """DCP's directory of the tensors."""
    entries: Mapping[str, TensorStorageMetadata]
    """Shape and dtype of each tensor by its key."""


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a finished training state; its files may still turn out to be damaged."""
    return (folder / MANIFEST_FILE).is_file()


def prepare_folder(folder: Path) -> None:
    """Creates an empty folder on rank 0. Every rank must call it.

    Raises:
        StateError: the folder is not empty, or cannot be created.
    """

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StateError(f"{folder}: is not empty; a training state needs its own folder")

    on_rank_zero(make)


def seal_folder(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes everything except tensors, then the manifest. Every rank must call it, once DCP has written all tensors.

    Args:
        record: what goes into ``state.json``; rank 0's is written.

    Raises:
        StateError: a file cannot be read back or written.
    """
    rank, _ = rank_and_world_size()
    own = together(lambda: _sums(sorted(folder.glob(f"__{rank}_*{SHARD_SUFFIX}"))))

    def write() -> None:
        _write_json(folder / RECORD_FILE, {"format": FORMAT, "schema": SCHEMA, **record})
        files = {name: entry for entries in own for name, entry in entries.items()}
        files |= _sums([folder / METADATA_FILE, folder / RECORD_FILE])
        _write_json(folder / MANIFEST_FILE, {"format": FORMAT, "schema": SCHEMA, "files": files})
        sync_folder(folder)

    on_rank_zero(write)


def open_folder(folder: Path) -> StateFolder:
    """Verifies every file of a state, sharing the work between ranks, and reads everything except the tensors.

    Every rank must call it.

    Raises:
        StateError: the same on every rank, naming the file that is missing, foreign, damaged or not trusted.
    """
    rank, world_size = rank_and_world_size()

    def check() -> dict[str, Any]:
        files = _read_manifest(folder)
        for name, entry in files.items():
            _check_size(folder / name, entry["bytes"])
        for name in sorted(files)[rank::world_size]:
            if _sha256(folder / name) != files[name]["sha256"]:
                raise StateError(f"{folder / name}: is damaged: its content is not what was written")
        return files

    files = agreed(check)

    def read() -> StateFolder:
        record = read_record(folder)
        shards = [name for name in files if name.endswith(SHARD_SUFFIX)]
        metadata = read_metadata(folder / METADATA_FILE, shards)
        entries = metadata.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        return StateFolder(folder, record, metadata, tensors)

    return agreed(read)


def read_record(folder: Path) -> dict[str, Any]:
    """What ``state.json`` holds; its checksum is not verified.

    Raises:
        StateError: the file is missing, damaged or not from this program.
    """
    record = _read_json(folder / RECORD_FILE)
    if not _is_record(record):
        raise StateError(f"{folder / RECORD_FILE}: is damaged: required entries are missing")
    return record


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise StateError(f"{folder}: no such folder; a training state is a folder such as states/step_20")
    if not is_complete(folder):
        raise StateError(
            f"{folder}: is not a complete training state: it has no {MANIFEST_FILE}, which is written last"
        )
    files: Any = _read_json(folder / MANIFEST_FILE).get("files")
    good = isinstance(files, dict) and {METADATA_FILE, RECORD_FILE} <= set(files)
    if not good or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise StateError(f"{folder / MANIFEST_FILE}: is damaged: its list of files is not valid")
    return dict(files)


def _is_entry(name: str, entry: Any) -> bool:
    plain = bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}
    return plain and isinstance(entry, dict) and _has(entry, {"bytes": int, "sha256": str})


def _is_record(record: Mapping[str, Any]) -> bool:
    kinds = {"world_size": int, "tied": dict, "optimizer": dict, "extra": dict}
    return _has(record, kinds) and _has(record["optimizer"], {"kind": str, "stepped": bool, "parameters": list})


def _has(value: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(value.get(key), kind) for key, kind in kinds.items())


def _check_size(file: Path, expected_bytes: int) -> None:
    if not file.is_file():
        raise StateError(f"{file}: is missing from the training state")
    actual_bytes = file.stat().st_size
    if actual_bytes != expected_bytes:
        raise StateError(f"{file}: is damaged: it has {actual_bytes} bytes of {expected_bytes}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{file}: is damaged: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StateError(f"{file}: was not written by dist_ckpt")
    if value.get("schema") != SCHEMA:
        raise StateError(f"{file}: has schema {value.get('schema')!r}; this version reads {SCHEMA}")
    return value


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _sums(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flushes the folder's entries to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
