"""Reading the file, what it asks to be recomputed, and that no key of DeepSpeed's is unknown here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.deepspeed_config import policy_of, read_config, resolve
from dist_ckpt.deepspeed_config.keys import ANYTHING, Key
from dist_ckpt.deepspeed_config.schema import SCHEMA
from dist_ckpt.errors import ConfigError
from dist_ckpt.policy import policy_from
from tests.unit.deepspeed_runs import RUN

# --- the file ---------------------------------------------------------------------------------------------------------

UNREADABLE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b" \n ", "is empty"),
    "only a byte order mark": (b"\xef\xbb\xbf", "is empty"),
    "cut off": (b'{"bf16": {"enabled": true', "line 1, column 26: not JSON"),
    "trailing comma": (b'{\n  "bf16": {},\n}', "line 3, column 1: not JSON"),
    "comment": (b"{\n  // mine\n}", "line 2, column 3: not JSON"),
    "two objects": (b"{} {}", "line 1, column 4: not JSON"),
    "given twice": (b'{"bf16": {}, "bf16": {}}', "bf16: given twice"),
    "given twice, inside": (b'{"a": [{"stage": 1, "stage": 2}]}', "stage: given twice"),
    "a list": (b"[]", "must be an object"),
    "a number": (b"3", "must be an object"),
    "NaN": (b'{"gradient_clipping": NaN}', "NaN is not JSON"),
    "Infinity": (b'{"gradient_clipping": -Infinity}', "-Infinity is not JSON"),
    "too many digits": (b'{"x": ' + b"9" * 5000 + b"}", "digits"),
    "too deep": (b'{"x": ' * 100_000, "nested too deeply"),
    "binary": (b"\x80\x04\x95", "not UTF-8 text (byte 0)"),
    "UTF-16": ('{"bf16": {}}'.encode("utf-16"), "not UTF-8"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files(name: str, tmp_path: Path) -> None:
    content, words = UNREADABLE[name]
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"zero3\.json: no such file; there are .*zero2\.json"):
        read_config(tmp_path / "zero3.json")
    with pytest.raises(ConfigError, match=r"no such file$"):
        read_config(tmp_path / "nowhere" / "zero3.json")
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config("a\0b")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        read_config(tmp_path / "zero2.json" / "x.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_config(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(b'\xef\xbb\xbf{"bf16": {"enabled": "auto"}}')
    assert read_config(str(path)) == {"bf16": {"enabled": "auto"}}


def test_reading_needs_neither_torch_nor_deepspeed() -> None:
    code = "import sys, dist_ckpt.deepspeed_config as c; print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nonsense_is_refused_and_never_breaks() -> None:
    """Random values at random keys give a configuration or a message, and nothing else."""
    chance = random.Random(0)
    values = [None, True, False, 0, 1, -1, 10**400, 1e308, 0.5, float("nan"), float("inf"), "", "auto", "none", "2"]
    values += [[], [1, 2], ["a"], {}, {"enabled": True}, {"enabled": False}, {"stage": 3}, {"device": "cpu"}]
    outcomes = set()
    for _ in range(3000):
        data: dict[Any, Any] = {}
        for _ in range(chance.randint(1, 3)):
            table: Mapping[str, Key] = SCHEMA
            place = data
            while True:
                name = chance.choice([*table, "stge", ""])
                inner = table[name].inner if name in table else {}
                if not inner or chance.random() < 0.3:
                    place[name] = chance.choice(values)
                    break
                below = place.get(name)
                place[name] = below if isinstance(below, dict) else {}
                table, place = inner, place[name]
        try:
            json.dumps(resolve(json.loads(json.dumps(data)), RUN).as_dict())
            outcomes.add("taken")
        except ConfigError as error:
            assert all(len(line) < 2000 for line in str(error).splitlines())
            outcomes.add("refused")
    assert outcomes == {"taken", "refused"}


# --- what is recomputed -----------------------------------------------------------------------------------------------


def asked(number: int | None = None, offload: bool = False, interval: int = 0) -> dict[str, Any]:
    section = {"number_checkpoints": number, "cpu_checkpointing": offload}
    return ({"activation_checkpointing": section} if number or offload else {}) | (
        {"pipeline": {"activation_checkpoint_interval": interval}} if interval else {}
    )


@pytest.mark.parametrize(
    ("data", "policy"),
    [
        ({}, None),
        ({"pipeline": {"stages": "auto", "activation_checkpoint_interval": 0}}, None),
        (asked(number=4), {"mode": "segments", "k": 6}),
        (asked(number=5), {"mode": "segments", "k": 5}),
        (asked(number=1), {"mode": "segments", "k": 24}),
        (asked(number=24), {"mode": "full"}),
        (asked(number=100), {"mode": "full"}),
        (asked(offload=True), {"mode": "full", "inputs": "offload"}),
        (asked(number=12, offload=True), {"mode": "segments", "k": 2, "inputs": "offload"}),
        (asked(interval=1), {"mode": "full"}),
        (asked(interval=3), {"mode": "segments", "k": 3}),
        (asked(interval=3, offload=True), {"mode": "segments", "k": 3, "inputs": "offload"}),
    ],
)
def test_sections_are_policies(data: dict[str, Any], policy: dict[str, Any] | None) -> None:
    assert policy_of(data, 24) == policy
    if policy is not None:
        assert policy_from(policy).to_dict().items() >= policy.items()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("full", {"mode": "nested", "k": 2, "inner": "block"}),
        ({"mode": "full", "blocks": "Block", "early_stop": False}, {"blocks": "Block", "early_stop": False}),
        ("selective_attention", {"inner": "attention"}),
        ({"mode": "selective_attention", "modules": ["attention", "mlp"]}, {"inner": ["attention", "mlp"]}),
        ({"mode": "selective", "save": ["matmul"]}, {"inner": "block", "save": ["matmul"]}),
        ("none", {"mode": "segments", "k": 2}),
        (None, {"mode": "segments", "k": 2}),
    ],
)
def test_an_interval_holds_the_runs_own_policy(own: Any, expected: dict[str, Any]) -> None:
    policy = policy_of(asked(interval=2), 8, policy_from(own).to_dict())
    assert policy is not None
    assert policy.items() >= expected.items()
    policy_from(policy)


def test_chunks_of_one_block_are_the_blocks() -> None:
    own = policy_from("full").to_dict()
    assert policy_of(asked(interval=1), 8, own) == own


@pytest.mark.parametrize(
    ("data", "own", "words"),
    [
        (asked(number=2), "full", "activation_checkpointing and ckpt.mode=full both say"),
        (asked(offload=True), "selective", "ckpt.mode=selective both say"),
        (asked(offload=True, interval=2), "full", "both say"),
        (asked(interval=2), "segments", "and not +ckpt=segments"),
        (asked(interval=2), "offload", "and not +ckpt=offload"),
        (asked(interval=2), "selective", "ckpt.save=[matmul,attention]"),
        (asked(interval=2), {"mode": "selective", "save": "mm", "every_nth_matmul": 2}, "and not +ckpt=selective"),
    ],
)
def test_two_answers_to_one_question(data: dict[str, Any], own: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_of(data, 8, policy_from(own).to_dict(), "mine.json")
    assert str(caught.value).startswith("mine.json: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"activation_checkpointing": {"number_checkpoints": "2"}}, "a whole number of at least 1, not a string"),
        ({"activation_checkpointing": {"number_checkpoint": 2}}, "did you mean 'number_checkpoints'?"),
        ({"activation_checkpointing": {"cpu_checkpointing": "true"}}, "must be true or false"),
        ({"activation_checkpointing": {}}, "asks for nothing"),
        ({"activation_checkpointing": 2}, "must be an object"),
        ({"pipeline": {"activation_checkpoint_interval": -1}}, "activation_checkpoint_interval=-1"),
        ({"pipeline": {"interval": 1}}, "pipeline.interval: no such key"),
        (asked(number=2, interval=2), "both say how many blocks"),
    ],
)
def test_a_raw_file_has_its_mistakes_told(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"^mine\.json: ") as caught:
        policy_of(data | {"train_batch_sise": 1}, 8, path="mine.json")
    assert words in str(caught.value)
    assert "sise" not in str(caught.value), "other sections are for resolve"


# --- every key that DeepSpeed knows -----------------------------------------------------------------------------------

# Run in a process of its own: DeepSpeed takes seconds to import and talks. Sections that are no pydantic models are
# dicts that write down which keys DeepSpeed asks them for.
_KEYS_OF_DEEPSPEED = """
import json, re, sys
from pathlib import Path
import deepspeed
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as c, precision_config as p
from deepspeed.runtime.zero import config as z, leaf_module_config as l, offload_config as o
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

found = set()

class Asked(dict):
    at = ""
    def note(self, key):
        found.add(self.at + key)
        return key
    def __contains__(self, key): return super().__contains__(self.note(key))
    def __getitem__(self, key): return super().__getitem__(self.note(key))
    def get(self, key, default=None): return super().get(self.note(key), default)
    def keys(self): return self

def section(at, **values):
    made = Asked(values)
    made.at = at
    return made

plain = ("activation_checkpointing", "flops_profiler", "data_types", "torch_autocast", "checkpoint", "optimizer")
data = section("", train_batch_size=1, **{name: section(name + ".") for name in plain})
c.DeepSpeedConfig(data)
found |= set(c._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {"zero_optimization." + k for k in c._REMOVED_ZERO_CONFIG_KEYS}
for at, model in {
    "zero_optimization.": z.DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer.": o.DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param.": o.DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module.": l.DeepSpeedZeroLeafModuleConfig,
    "bf16.": p.DeepSpeedBF16Config, "fp16.": p.DeepSpeedFP16Config, "hybrid_engine.": c.HybridEngineConfig,
    "comms_logger.": CommsLoggerConfig, "tensorboard.": TensorBoardConfig, "wandb.": WandbConfig,
    "csv_monitor.": CSVConfig, "comet.": CometConfig, "timers.throughput.": DeepSpeedThroughputTimerConfig,
}.items():
    for name, field in model.model_fields.items():
        found |= {at + name, at + (field.alias or name)}
found |= {"pipeline." + name for name in c.get_pipeline_config({})}
root = Path(deepspeed.__file__).parent
engine = (root / "runtime" / "pipe" / "engine.py").read_text()
found |= {"pipeline." + name for name in re.findall(r"_config\\.pipeline(?:\\.get\\(|\\[)'(\\w+)'", engine)}
start = (root / "__init__.py").read_text()
found |= set(re.findall(r'config(?:\\.get\\(|\\[)"(\\w+)"', start)) | set(re.findall(r'"(\\w+)" in config\\b', start))
print("KEYS", json.dumps(sorted(found)), flush=True)
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_every_key_of_deepspeed_is_known() -> None:
    done = subprocess.run([sys.executable, "-c", _KEYS_OF_DEEPSPEED], capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("KEYS ")]
    assert lines, done.stdout + done.stderr
    keys = json.loads(lines[0].removeprefix("KEYS "))
    assert len(keys) > 150, "the introspection found them"
    assert [key for key in keys if not is_known(key)] == []


def is_known(dotted: str) -> bool:
    """Whether a key is in our tables, or in a section that is refused as a whole."""
    table: Mapping[str, Key] = SCHEMA
    for name in dotted.split("."):
        key = table.get(name)
        if key is None:
            return False
        if key.kind is ANYTHING:
            return True
        table = key.inner
    return True


def test_every_key_is_taken_or_has_a_reason() -> None:
    def check(table: Mapping[str, Key], at: str) -> None:
        for name, key in table.items():
            reasons = [key.refused, key.renamed]
            assert key.kind is not ANYTHING or any(reasons) or at in _SWITCHED_OFF, f"{at}{name}"
            assert not (key.refused and key.renamed)
            check(key.inner, f"{at}{name}.")

    check(SCHEMA, "")


_SWITCHED_OFF = {f"{name}." for name, key in SCHEMA.items() if key.refused and "enabled" in key.inner}
