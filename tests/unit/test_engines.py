"""Engines by name, and what each is loaded with."""

from __future__ import annotations

import sys
import types

import pytest

from dist_ckpt.engines import ENGINES
from dist_ckpt.errors import EngineError


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_pipe"])
def test_a_missing_deepspeed_is_found_when_its_engine_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(EngineError, match=r"cannot be imported .*pip install 'dist_ckpt\[deepspeed\]', or choose"):
        ENGINES[name]


@pytest.mark.parametrize("version", ["0.18.9", "0.19.7", "0.20.0", "1.0", "main"])
@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_pipe"])
def test_an_unknown_deepspeed_is_found_when_its_engine_is_asked_for(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = types.ModuleType("deepspeed")
    other.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    with pytest.raises(EngineError, match=r"known for versions >=0\.19\.8,<0\.20 only; pip install"):
        ENGINES[name]


@pytest.mark.parametrize("version", ["0.19.8", "0.19.12+abc1234"])
def test_later_versions_of_the_known_series_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("deepspeed")
    other.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", other)
    assert ENGINES["deepspeed"].name == "deepspeed"


def test_other_engines_need_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert [ENGINES[name].name for name in ("ddp", "fsdp1", "fsdp2")] == ["ddp", "fsdp1", "fsdp2"]
    with pytest.raises(KeyError):
        ENGINES["deepspeed3"]
