"""Every command and every snippet in a document runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "deepspeed": ["-m", "deepspeed.launcher.runner"],
    "python": [],
}
GENERATED = ("config.md", "support.md")
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED),
)


def fenced(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block of a language."""
    return [
        (name, block)
        for name in DOCUMENTS
        for block in re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    ]


ENDS_WITH = "ends with "
"""A comment behind a command that is to fail, and the exit code that its workers have."""


@dataclass(frozen=True)
class Command:
    text: str
    code: int

    @staticmethod
    def of(line: str) -> Command:
        text, _, comment = (part.strip() for part in line.partition("  #"))
        return Command(text, int(comment.removeprefix(ENDS_WITH)) if comment.startswith(ENDS_WITH) else 0)


BLOCKS = [[Command.of(line) for line in block.splitlines() if line.strip()] for _, block in fenced("bash")]
"""The commands of a block may need what those before have left."""
COMMANDS = [command.text for block in BLOCKS for command in block]
SNIPPETS = [text for name, text in fenced("python") if name != "CONTRIBUTING.md"]


def run(arguments: list[str], cwd: Path, code: int = 0) -> str:
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=900)
    said = f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    assert bool(done.returncode) == bool(code), said  # torchrun turns every code but 0 into 1
    if code:
        (end,) = cwd.glob("outputs/*/exit.json")
        assert json.loads(end.read_text(encoding="utf-8"))["code"] == code, said
    return done.stdout


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int, tmp_path: Path) -> None:
    printed = run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SNIPPETS[number]}"], tmp_path
    )
    if number == 0:
        shown = dict(enumerate(text for _, text in fenced("text")))[1]
        assert printed.strip() == shown.strip()


@pytest.mark.full
@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block[0].text.startswith(tuple(LAUNCHERS))],
    ids=lambda block: "; ".join(command.text for command in block),
)
def test_launch_commands_run(block: list[Command], tmp_path: Path) -> None:
    for command in block:
        program, *rest = shlex.split(command.text)
        here = [re.sub(r"^(engine\.config=)?((launch|examples|configs)/)", rf"\1{ROOT}/\2", a) for a in rest]
        run([sys.executable, *LAUNCHERS[program], *here], tmp_path, command.code)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_targets_exist(command: str) -> None:
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_no_command_is_left_out() -> None:
    known = (*LAUNCHERS, "make", ".venv/bin/pre-commit install")
    assert COMMANDS and all(command.startswith(known) for command in COMMANDS)
    for name in DOCUMENTS:
        for path in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            assert ((ROOT / name).parent / path).exists(), f"{name} links to {path}"
