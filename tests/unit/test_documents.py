"""Every command and every snippet in a document runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "deepspeed": ["-m", "deepspeed.launcher.runner"],
    "python": [],
}
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/deepspeed.md", "docs/memory.md", "docs/sweeps.md", "docs/wandb.md")


def fenced(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block of a language."""
    return [
        (name, block)
        for name in DOCUMENTS
        for block in re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    ]


def commands_of(block: str) -> list[str]:
    return [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]


SESSIONS = [commands for _, block in fenced("bash") if (commands := commands_of(block))]
"""The commands of a block may need what those before have left."""
COMMANDS = [command for session in SESSIONS for command in session]
SNIPPETS = [text for name, text in fenced("python") if name != "CONTRIBUTING.md"]


def run(arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
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
@pytest.mark.parametrize("session", [s for s in SESSIONS if s[0].startswith(tuple(LAUNCHERS))], ids="; ".join)
def test_launch_commands_run(session: list[str], tmp_path: Path) -> None:
    for command in session:
        program, *rest = shlex.split(command)
        here = [re.sub(r"^(engine\.config=)?((launch|examples|configs)/)", rf"\1{ROOT}/\2", a) for a in rest]
        run([sys.executable, *LAUNCHERS[program], *here], tmp_path)


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
