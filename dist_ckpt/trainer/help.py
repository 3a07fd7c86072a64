"""The reference of the configuration: ``--help`` and ``docs/config.md``.

Both are generated from the docstring under each field and enum member and the comment at the top of each file in
``configs/``. ``python -m dist_ckpt.trainer.help > docs/config.md`` rewrites the page.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from dist_ckpt.policy import POLICIES, Policy
from dist_ckpt.trainer.config import Config
from dist_ckpt.trainer.overrides import CONFIGS, GROUPS, group_choices
from dist_ckpt.typed import alternatives, field_types, shown

WIDTH = 110

_USAGE = (
    ("torchrun --nproc_per_node N launch/train.py [GROUP=NAME ...] [KEY=VALUE ...]", "N ranks"),
    ("python launch/train.py [GROUP=NAME ...] [KEY=VALUE ...]", "one rank"),
)
_FLAGS = (
    ("--help", "This text."),
    ("--print-config", "The whole configuration as YAML; starts nothing."),
)
_EXAMPLES = (
    ("torchrun --nproc_per_node 8 launch/train.py +ckpt=selective", "the default model, fsdp2"),
    ("torchrun --nproc_per_node 4 launch/train.py +ckpt=every_k ckpt.k=4 engine=ddp", "an option of a policy"),
    ("python launch/train.py model=llama_7b +ckpt=full train.seq_len=4096 dry_run=true world_size=64", "plan only"),
    ("python launch/train.py data=text 'data.glob=\"corpus/**/*.txt\"' run_dir=outputs/mine", "your own text"),
    ("torchrun --nproc_per_node 2 launch/train.py run_dir=outputs/mine train.resume=auto", "continue"),
)
_NOTES = (
    "``ckpt=NAME`` and ``+ckpt=NAME`` are the same; without either, or with ``ckpt=none``, nothing is recomputed. "
    "If a key is given twice, the last value counts. A list is written ``[a, b]``, no value ``null``. Text that "
    "contains any of ``,=:{}[]()~`` needs quotes inside the shell's own: ``'data.glob=\"a,b.txt\"'``. A value may "
    "refer to other keys: ``'run_dir=outputs/${train.seed}'``."
)


@dataclass(frozen=True)
class Key:
    """The description of one key."""

    name: str
    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class Section:
    """A group of keys; the one without a title holds the top-level keys."""

    title: str
    doc: str
    keys: tuple[Key, ...]


def help_text() -> str:
    """Usage, groups with their choices, every key, and examples; at most 110 columns."""
    lines = ["Train a Llama-style decoder on real text and see the memory of each rank.", "", "Usage:"]
    lines += [f"  {command:<80}  {what}" for command, what in _USAGE]
    lines += _table(_FLAGS)
    lines += ["", "Groups (GROUP=NAME; files in configs/):"]
    for group in GROUPS:
        lines += ["", f"  {group}=NAME, default {_group_defaults()[group]}"]
        lines += _table([(name, _plain_text(_choice_doc(group, name))) for name in group_choices(group)], indent=4)
    lines += ["", "Keys (KEY=VALUE):"]
    for section in sections():
        lines += ["", *_wrapped(f"{section.title}: {_plain_text(section.doc)}", 2)] if section.title else [""]
        lines += _key_lines(section.keys)
    lines += ["", "How arguments are written:", *_wrapped(_plain_text(_NOTES), 2)]
    lines += ["", "Examples:"]
    for command, what in _EXAMPLES:
        lines += [f"  # {what}", f"  {command}"]
    return "\n".join(lines) + "\n"


def key_lines(cls: type, prefix: str = "") -> list[str]:
    """The keys of a dataclass that hold values, as :func:`help_text` has them; for programs with keys of their own."""
    return _key_lines(tuple(_keys(cls, prefix)))


def config_page() -> str:
    """``docs/config.md``: the same as :func:`help_text`, as Markdown."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made from docstrings and configs/ by `python -m dist_ckpt.trainer.help > docs/config.md`. -->",
        "",
        *textwrap.wrap(_NOTES.replace("``", "`"), WIDTH, break_on_hyphens=False),
        "",
        "```sh",
        *[f"{command}  # {what}" for command, what in _EXAMPLES],
        "```",
        "",
        *_markdown(("flag", ""), [(f"`{flag}`", doc) for flag, doc in _FLAGS]),
        "",
        "## Groups",
    ]
    for group in GROUPS:
        rows = [(f"`{group}={name}`", _choice_doc(group, name)) for name in group_choices(group)]
        lines += ["", f"### {group}", "", f"Default: {_group_defaults()[group]}.", ""]
        lines += _markdown(("choice", ""), rows)
    lines += ["", "## Keys"]
    for section in sections():
        keys = [(f"`{k.name}`", k.type, f"`{k.default}`", k.doc) for k in section.keys]
        title = [f"### {section.title}", "", section.doc] if section.title else ["### Run"]
        lines += ["", *title, "", *_markdown(("key", "type", "default", ""), keys)]
    return "\n".join(lines) + "\n"


def sections() -> Iterator[Section]:
    """Every key of the configuration, in the order of the dataclasses, top-level keys first."""
    yield Section("", "", tuple(_keys(Config, "")))
    for name, hint in field_types(Config).items():
        if name == "ckpt":
            doc = "What is recomputed. The options depend on the mode; one of another mode is an error."
            yield Section(name, doc, _policy_keys())
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield Section(name, _summary(hint), tuple(_keys(hint, f"{name}.")))


def _key_lines(keys: typing.Sequence[Key]) -> list[str]:
    return _table([(f"{k.name}: {k.type} = {k.default}", _plain_text(k.doc)) for k in keys], indent=4)


def _keys(cls: type, prefix: str) -> Iterator[Key]:
    """The keys of one dataclass that hold values, not sections."""
    docs = _docs(cls)
    hints = field_types(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        kinds = alternatives(hints[field.name])
        doc = docs.get(field.name, "")
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Enum):
                members = _docs(kind)
                doc = doc or _summary(kind)
                doc += "".join(f" ``{name}``: {members[name]}" for name in kind.__members__ if name in members)
        yield Key(prefix + field.name, " | ".join(map(_type_name, kinds)), shown(field.default), doc.strip())


def _policy_keys() -> tuple[Key, ...]:
    """The mode, the options that every mode but ``none`` and ``plan`` has, then those of single modes."""
    mode_key = Key("ckpt.mode", "str", "none", f"Set by the group: ``ckpt=full``. One of {', '.join(POLICIES)}.")
    modes: dict[Key, list[str]] = {}
    for mode, policy in POLICIES.items():
        for key in _keys(policy, "ckpt."):
            modes.setdefault(key, []).append(mode)
    everyone = max(modes.values(), key=len)

    def whose(of: list[str]) -> str:
        others = [mode for mode in everyone if mode not in of]
        return "" if not others else f"all but {', '.join(others)}: " if len(others) < 3 else f"{', '.join(of)}: "

    described = (
        dataclasses.replace(key, doc=whose(of) + key.doc)
        for key, of in sorted(modes.items(), key=lambda item: -len(item[1]) if len(item[1]) > 3 else 0)
    )
    return (mode_key, *described)


def _summary(cls: type) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def _docs(cls: type) -> dict[str, str]:
    """The docstring under each field or enum member, inherited ones included, on one line each."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not (dataclasses.is_dataclass(base) or issubclass(base, Enum)) or base is Enum:
            continue
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for statement, following in itertools.pairwise(body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            target = targets[0]
            if isinstance(target, ast.Name) and isinstance(following, ast.Expr):
                found[target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return found


def _type_name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(kind.__members__)
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    if issubclass(kind, Policy):
        return "policy"
    return {int: "int", float: "float", bool: "true | false", str: "str"}[kind]


def _group_defaults() -> dict[str, str]:
    listed = OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml"))
    assert isinstance(listed, dict)
    chosen: dict[str, str] = {"ckpt": "none"}
    for entry in listed["defaults"]:
        chosen |= entry if isinstance(entry, dict) else {}
    return chosen


def _choice_doc(group: str, name: str) -> str:
    """The comment at the top of a group's file."""
    lines = (CONFIGS / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    top = lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    return " ".join(line.lstrip("# ") for line in top)


def _table(rows: typing.Sequence[tuple[str, str]], indent: int = 2) -> list[str]:
    """Two columns; a long first cell has its text on the next line."""
    column = indent + 2 + min(max(len(left) for left, _ in rows), 44)
    lines = []
    for left, right in rows:
        wrapped = _wrapped(right, column)
        head = " " * indent + left
        if len(head) + 2 <= column and wrapped:
            head, wrapped = head.ljust(column) + wrapped[0].lstrip(), wrapped[1:]
        lines += [head, *wrapped]
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False)


def _plain_text(text: str) -> str:
    return text.replace("``", "")


def _markdown(header: tuple[str, ...], rows: typing.Sequence[tuple[str, ...]]) -> list[str]:
    escaped = [tuple(cell.replace("``", "`").replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *escaped)]


if __name__ == "__main__":
    sys.stdout.write(config_page())
