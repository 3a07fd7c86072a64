"""Private parts of ``torch.distributed.checkpoint`` (tested with torch 2.13): metadata, read without trust.

Stock DCP reads ``.metadata`` with ``pickle.load``, which runs whatever the file says. Here the pickle may
name only the classes in :data:`METADATA_NAMES`, and for each of those it gets an inert stand-in that can hold
attributes and nothing else. What was read is then checked field by field while DCP's own objects are built
from it, so that a damaged file ends in one message instead of an exception from somewhere inside DCP.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dist_ckpt.errors import StateError

METADATA_FILE = ".metadata"

_DCP = "torch.distributed.checkpoint"
METADATA_NAMES = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 pickles a member of an Enum as getattr(class, name)
    }
)
"""Every class and function that the metadata of tensors needs, besides ``torch.Size`` and the dtypes below. Each is
replaced by an inert stand-in, ``getattr`` as well.

``BytesStorageMetadata`` is left out on purpose: DCP loads such entries with ``weights_only=False``.
"""

DTYPE_NAMES = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
        "bool",
    }
    | {"int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"}
)


class StateWriter(FileSystemWriter):
    """DCP's file writer, without the folder's absolute path in the metadata: states are renamed and moved."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class StateReader(FileSystemReader):
    """DCP's file reader, for what :func:`read_metadata` has returned; never opens ``.metadata`` itself."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:  # no **kwargs: DCP then has no second, per-rank file to fall back to
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, so that a message can name one, and each stored tensor once, whatever parts are needed.

        Raises:
            StateError: a shard that holds something else than the tensors it should.
        """
        by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(file, {}).setdefault(item.storage_index, []).append(item)
        for name, tensors in by_file.items():
            try:
                with (Path(self.path) / name).open("rb") as stream:
                    for index, items in tensors.items():
                        self._read_tensor(self._slice_file(stream, self.storage_data[index]), items, planner)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise StateError(f"{Path(self.path) / name}: cannot be read as tensors: {reason}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @staticmethod
    def _read_tensor(stream: IO[bytes], items: list[ReadItem], planner: LoadPlanner) -> None:
        stored = torch.load(stream, map_location="cpu", weights_only=True)
        for item in items:
            part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise ValueError(f"{item.storage_index.fqn}: {tuple(part.size())} for {tuple(target.size())}")
            target.copy_(part)
            planner.commit_tensor(item, target)


class _Record:
    """Stands in for one of DCP's classes while a pickle is read: holds constructor arguments and state.

    As it has a ``__setstate__``, a pickle that means to set attributes of the class itself ends in a TypeError.
    """

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


def read_metadata(file: Path, shards: Iterable[str]) -> Metadata:
    """The metadata of a state that holds nothing but tensors; executes nothing that the file says.

    Args:
        file: the ``.metadata`` file.
        shards: the names of the files that tensors may lie in.

    Raises:
        StateError: names the file and what is wrong with it, for an unexpected class also that class.
        OSError: the file cannot be read.
    """
    # Made anew for each file, so that nothing a pickle does to them lasts.
    names = {(module, name): type(name, (_Record,), {}) for module, name in METADATA_NAMES}

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in names:
                return names[module, name]
            if (module, name) == ("torch", "Size"):
                return tuple
            if module == "torch" and name in DTYPE_NAMES:
                return getattr(torch, name)
            raise StateError(
                f"{file}: names {module}.{name}, which no training state needs; nothing of the file was used"
            )

        def persistent_load(self, pid: Any) -> Any:
            raise pickle.UnpicklingError("refers to something outside itself")

    content = file.read_bytes()
    try:
        return _Builder(frozenset(shards)).metadata(Restricted(io.BytesIO(content)).load())
    except StateError:
        raise
    except Exception as error:  # whatever a damaged pickle may raise, it is the file that is wrong
        raise StateError(f"{file}: is damaged or not a training state's metadata: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Makes DCP's objects from the records of a pickle; raises ValueError for a field of another kind."""

    shards: frozenset[str]

    def metadata(self, record: object) -> Metadata:
        fields = _fields(record, "Metadata")
        entries = _typed(fields.get("state_dict_metadata"), dict, "state_dict_metadata")
        storage = _typed(fields.get("storage_data"), dict, "storage_data")
        return Metadata(
            state_dict_metadata={_typed(key, str, "key"): self.tensor(entry) for key, entry in entries.items()},
            storage_data={self.index(key): self.place(place) for key, place in storage.items()},
            storage_meta=StorageMeta(),
        )

    def tensor(self, record: object) -> TensorStorageMetadata:
        fields = _fields(record, "TensorStorageMetadata")
        state = _typed(_record(fields.get("properties"), "TensorProperties").state, tuple, "properties")
        size = _size(fields.get("size"))
        chunks = [self.chunk(chunk) for chunk in _typed(fields.get("chunks"), list, "chunks")]
        if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():  # DCP would leave the rest as it was
            raise ValueError(f"a tensor of {tuple(size)} whose parts have not as many elements")
        properties = TensorProperties(dtype=_typed(state[0], torch.dtype, "dtype"))
        return TensorStorageMetadata(properties=properties, size=size, chunks=chunks)

    def chunk(self, record: object) -> ChunkStorageMetadata:
        fields = _fields(record, "ChunkStorageMetadata")
        return ChunkStorageMetadata(offsets=_size(fields.get("offsets")), sizes=_size(fields.get("sizes")))

    def index(self, record: object) -> MetadataIndex:
        fields = _fields(record, "MetadataIndex")
        index = fields.get("index")
        return MetadataIndex(
            fqn=_typed(fields.get("fqn"), str, "fqn"),
            offset=_size(fields.get("offset")),
            index=None if index is None else _typed(index, int, "index"),
        )

    def place(self, record: object) -> _StorageInfo:
        fields = _fields(record, "_StorageInfo")
        name = _typed(fields.get("relative_path"), str, "relative_path")
        if name not in self.shards:
            raise ValueError(f"it refers to {name!r}, which is no file of the state")
        if fields.get("transform_descriptors") is not None:
            raise ValueError("it asks for a transformation of the file's bytes")
        offset, length = (_typed(fields.get(key), int, key) for key in ("offset", "length"))
        if offset < 0 or length < 0:
            raise ValueError(f"negative offset or length in {name}")
        return _StorageInfo(relative_path=name, offset=offset, length=length)


def _record(value: object, kind: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise ValueError(f"{kind} expected, found {re.sub('^_', '', type(value).__name__)}")
    return value


def _fields(value: object, kind: str) -> dict[str, Any]:
    return _typed(getattr(_record(value, kind), "state", None), dict, kind)


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what}: {kind.__name__} expected, found {type(value).__name__}")
    return value


def _size(value: object) -> torch.Size:
    sizes = _typed(value, tuple, "size")
    if any(_typed(size, int, "size") < 0 for size in sizes):
        raise ValueError(f"negative size {sizes}")
    return torch.Size(sizes)
