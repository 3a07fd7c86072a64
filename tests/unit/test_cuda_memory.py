"""What is read of CUDA's allocator, on a double: there is no device here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt.compat.cuda_memory import allocated_blocks, history_written

CUDA = torch.device("cuda", 1)


def test_blocks_lie_one_after_the_other_in_their_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(*states: str) -> list[dict[str, Any]]:
        return [{"state": state, "size": 512 * (place + 1)} for place, state in enumerate(states)]

    segments = [
        {"device": 0, "address": 0, "blocks": blocks("active_allocated")},
        {"device": 1, "address": 4096, "blocks": blocks("active_allocated", "inactive", "active_allocated")},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    assert allocated_blocks(CUDA) == [(4096, 512), (4096 + 512 + 1024, 1536)]
    assert allocated_blocks(torch.device("cpu")) == []


@pytest.mark.parametrize("fails", [False, True])
def test_history_is_written_whatever_happens(fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **options: calls.append(enabled)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    path = tmp_path / "new" / "history.pickle"
    try:
        with history_written(CUDA, path):
            if fails:
                raise RuntimeError("in the step")
    except RuntimeError:
        assert fails
    assert calls == ["all", str(path), None]


def test_nothing_is_written_where_there_is_no_history(tmp_path: Path) -> None:
    with history_written(torch.device("cpu"), tmp_path / "new" / "history.pickle"), history_written(CUDA, None):
        pass
    assert not list(tmp_path.iterdir())
