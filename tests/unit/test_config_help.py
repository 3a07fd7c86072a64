"""``--help`` and ``docs/config.md`` tell everything, and nothing that is out of date."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections import Counter

import pytest

from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import Config, load_config
from dist_ckpt.trainer.help import WIDTH, config_page, help_text, sections
from dist_ckpt.trainer.keys import leaves
from dist_ckpt.trainer.overrides import CONFIGS, GROUPS, group_choices


def test_help_names_every_key_and_choice_once() -> None:
    text = help_text()
    meanings = Counter(key.name for section in sections() for key in section.keys)
    for key in leaves(Config):
        assert len(re.findall(rf"^ +{re.escape(key)}: ", text, re.MULTILINE)) == meanings[key] >= 1, key
    for group in GROUPS:
        assert f"{group}=NAME" in text
        for name in group_choices(group):
            assert re.search(rf"^ +{name}  +\S", text, re.MULTILINE), name


def test_help_fits_a_terminal() -> None:
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "``" not in help_text()
    assert all(line == line.rstrip() for line in lines)


def test_defaults_and_types_are_those_of_the_code() -> None:
    keys = {key.name: key for section in reversed(list(sections())) for key in reversed(section.keys)}
    assert (keys["train.steps"].type, keys["train.steps"].default) == ("int", "60")
    assert (keys["train.clip"].type, keys["train.clip"].default) == ("float | null", "1.0")
    assert (keys["train.precision"].type, keys["train.precision"].default) == ("fp32 | bf16", "fp32")
    assert (keys["ckpt.save"].type, keys["ckpt.save"].default) == ("str | list of str | null", "null")
    assert keys["ckpt.k"].doc.startswith("every_k: Blocks 0, k, 2k")
    assert keys["ckpt.blocks"].doc.startswith("Which modules are the blocks")
    assert [k.doc.partition(":")[0] for s in sections() for k in s.keys if k.name == "ckpt.k"] == [
        "every_k",
        "segments, nested",
    ]
    assert keys["data.kind"].type == "stdlib | text | tokens | synthetic"
    assert "``sdpa``: torch's fused kernel." in keys["model.attention"].doc


@pytest.mark.parametrize("section", ["", "train", "ckpt", "engine", "model", "data", "device", "report"])
def test_every_key_is_described(section: str) -> None:
    keys = next(found.keys for found in sections() if found.title == section)
    assert [key.name for key in keys if not key.doc] == []


def test_the_examples_work() -> None:
    examples = [
        line.split("launch/train.py")[1]
        for line in help_text().splitlines()
        if re.match("  (torchrun|python) .*(ckpt|data|resume)=", line)
    ]
    assert len(examples) == 5
    for example in examples:
        check(load_config(shlex.split(example)), 8 if "world_size" not in example else 1)


def test_the_page_is_current() -> None:
    page = CONFIGS.parent / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == config_page(), "python -m dist_ckpt.trainer.help > docs/config.md"


def test_the_command_writes_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "dist_ckpt.trainer.help")
    runpy.run_module("dist_ckpt.trainer.help", run_name="__main__")
    assert capsys.readouterr().out == config_page()
