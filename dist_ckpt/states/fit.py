"""Whether a state's tensors match those of a model, and if not, in which respect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dist_ckpt.errors import StateError
from dist_ckpt.states.source import Entry, Inventory


def check_fit(
    folder: Path,
    what: str,
    prefix: str,
    tensors: Mapping[str, Entry],
    entries: Mapping[str, TensorStorageMetadata],
) -> None:
    """Compares names, global shapes and dtypes of the tensors that are here with those of a state.

    Args:
        folder: the state, for the message.
        what: what the run has: "model" or "optimizer".
        prefix: what the keys of its tensors begin with; a state's other keys are left out.
        tensors: of the run, by key.
        entries: of the state.

    Raises:
        StateError: lists a few of each kind of difference, and the numbers of layers where these differ.
    """
    here = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    saved = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    both = [name for name in here if name in saved]
    shapes = [
        f"{name}: state {tuple(saved[name].size)}, {what} {tuple(here[name].shape)}"
        for name in both
        if saved[name].size != here[name].shape
    ]
    dtypes = [
        f"{name}: state {saved[name].properties.dtype}, {what} {here[name].dtype}"
        for name in both
        if saved[name].properties.dtype != here[name].dtype
    ]
    missing, extra = ([name for name in one if name not in other] for one, other in ((here, saved), (saved, here)))
    parts = [f"{what} has {ours} {stem}, state has {theirs}" for stem, ours, theirs in _layer_counts(here, saved)]
    for names, problem in (
        (missing, "missing from the state"),
        (extra, f"not in the {what}"),
        (shapes, "of another shape"),
        (dtypes, "of another dtype"),
    ):
        if names:
            parts.append(f"{len(names)} {problem} ({listed(names)})")
    if parts:
        raise StateError(f"{folder}: does not fit the {what}: {'; '.join(parts)}")


def check_same(here: Inventory, saved: Mapping[str, Any], where: str) -> None:
    """Compares the optimizer's class and parameters with those that a state's record names.

    Args:
        where: the start of a message: the state.

    Raises:
        StateError: another class of optimizer, or other parameters.
    """
    if here.kind != saved["kind"]:
        raise StateError(f"{where}: was saved with optimizer {saved['kind']}, this run has {here.kind}")
    theirs = set(saved["parameters"])
    parts = [
        f"{whose}: {listed(sorted(names))}"
        for whose, names in (
            ("only in this run", here.parameters - theirs),
            ("only in the state", theirs - here.parameters),
        )
        if names
    ]
    if parts:
        raise StateError(f"{where}: the optimizer has other parameters ({'; '.join(parts)})")


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names, for a message.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _layer_counts(here: Iterable[str], saved: Iterable[str]) -> list[tuple[str, int, int]]:
    """(name, number here, number in the state) of each list of modules whose length differs."""
    counts: list[dict[str, set[str]]] = [{}, {}]
    for count, names in zip(counts, (here, saved), strict=True):
        for name in names:
            if match := re.match(r"(.*?)\.(\d+)\.", name):
                count.setdefault(match[1], set()).add(match[2])
    ours, theirs = counts
    differing = [stem for stem in ours if stem in theirs and len(ours[stem]) != len(theirs[stem])]
    return [(stem, len(ours[stem]), len(theirs[stem])) for stem in differing]
