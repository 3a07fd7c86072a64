"""Every example in a docstring of the package does what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "dist_ckpt").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted, "the file has examples that doctest does not see"
    assert not results.failed
