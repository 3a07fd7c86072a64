"""What W&B has written to disk: the ``.wandb`` file in which it keeps every record of a run, online or offline."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER, _BLOCK, _HEADER = 7, 32 * 1024, struct.Struct("<IHB")  # checksum, length, which part of a record
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read_log(path: Path) -> Iterator[Any]:
    """The records of a file; those at its end that were cut short by a kill are left out.

    The format is LevelDB's log, in wandb 0.31 with records of ``wandb.proto.wandb_internal_pb2``.
    """
    from wandb.proto import wandb_internal_pb2 as messages  # made at import: its classes are unknown to mypy

    make_record: Any = messages.__dict__["Record"]
    data, position, parts = path.read_bytes(), _FILE_HEADER, b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:  # too little of the block for another part
            position += left
            continue
        _, length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        parts = (b"" if kind in (_WHOLE, _FIRST) else parts) + data[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST) and position <= len(data):
            record = make_record()
            record.ParseFromString(parts)
            yield record


def logs(folder: Path, run_id: str) -> list[Path]:
    """The files of a W&B run in a run folder, one a start, oldest first."""
    return sorted(folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"), key=lambda path: path.stat().st_mtime)


def last_step(folder: Path, run_id: str) -> int:
    """The last step of which W&B has a row; 0 without any."""
    records = (record for path in logs(folder, run_id) for record in read_log(path))
    return max((record.history.step.num for record in records if record.HasField("history")), default=0)
