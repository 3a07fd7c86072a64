"""Writes docs/support.md from the outcomes of the tests that docs/verification.json records.

python -m tests.support_page > docs/support.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from dist_ckpt.engines.support import ENGINES, MODES, PRECISIONS, Combination, standing

ROOT = Path(__file__).resolve().parents[1]
TOP = """# Support

What is proven right, per mode, engine, precision, and with each block compiled (`train.compile=true`). Written by
`python -m tests.support_page > docs/support.md` from the outcomes in [verification.json](verification.json).

- **proven**: on 2 ranks, with dropout and gradient accumulation, losses, gradient norms and every gradient equal those
  of the same engine without a policy bit for bit, and parameter names are the same; in fp32 and not compiled, saved
  bytes and FLOPs are exactly those that `plan_cost` says as well. (ZeRO 3 has a linear of its own, before which no
  recompute can stop early: a few FLOPs more, exactly those of that linear. A pipeline has two stages.)
- **refused**: an error before the start says why.
- **untested**: refused by default; `engine.allow_untested=true` takes it as it is.

`plan` is a written plan that mixes segments, regions nested in them and op rules.
"""


def identifier(combination: Combination) -> str:
    """The id of a combination's test."""
    compiled = "compiled" if combination.compiled else "eager"
    return f"{combination.mode}-{combination.engine}-{combination.precision}-{compiled}"


def outcomes() -> Mapping[str, str]:
    """Identifier of a combination → outcome of its test."""
    tests = json.loads((ROOT / "docs" / "verification.json").read_text(encoding="utf-8"))["tests"]
    prefix = "tests/distributed/test_support.py::test_support"
    return {
        name.partition("[")[2].removesuffix("]"): found["outcome"]
        for name, found in tests.items()
        if name.startswith(prefix) and "[" in name
    }


def verdict(combination: Combination, passed: Mapping[str, str]) -> str:
    """What the page says of a combination: nothing is proven or refused that no test has shown to be."""
    return standing(combination).verdict if passed.get(identifier(combination)) == "passed" else "untested"


def page(passed: Mapping[str, str]) -> str:
    """The page."""
    lines = [TOP]
    for engine in ENGINES:
        columns = [(precision, compiled) for precision in PRECISIONS for compiled in (False, True)]
        heads = [precision + ", compiled" * compiled for precision, compiled in columns]
        lines += [f"## engine={engine}", "", f"| mode | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
        for mode in MODES:
            cells = [verdict(Combination(mode, engine, *column), passed) for column in columns]
            lines.append(f"| `{mode}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page(outcomes()))
