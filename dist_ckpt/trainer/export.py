"""Exports a training state's weights as one plain safetensors file, in one process without a process group."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dist_ckpt.errors import DistCkptError, StateError
from dist_ckpt.states.files import open_folder
from dist_ckpt.states.source import MODEL_PREFIX
from dist_ckpt.states.training_state import read_tensors
from dist_ckpt.trainer.exits import ExitCode

SUFFIX = ".safetensors"
DESCRIPTION = "Writes the weights of a training state as plain safetensors, under the model's own names."


def export_weights(state: str | Path, out: str | Path) -> dict[str, Tensor]:
    """Writes the parameters and persistent buffers of a training state to ``out``, replacing an existing file.

    A tied weight is written once, under its first name; the file's metadata maps its other names to that one, as
    ``safetensors.torch.save_model`` does, so that ``safetensors.torch.load_model`` takes the file.

    Returns:
        What was written, by name.

    Raises:
        StateError: the state is damaged or not trusted, or ``out`` cannot be written.
    """
    folder, file = Path(state), Path(out)
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise StateError(f"{error}: pip install 'dist_ckpt[train]'") from error
    if file.suffix != SUFFIX:
        raise StateError(f"{file}: the output's name must end in {SUFFIX}")
    if not file.parent.is_dir():
        raise StateError(f"{file.parent}: no such folder to write {file.name} into")
    opened = open_folder(folder)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in opened.entries.items()
        if key.startswith(MODEL_PREFIX)
    }
    read_tensors(opened, tensors)
    weights = {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in tensors.items()}
    unfinished = file.with_name(f".tmp-{file.name}")
    try:
        save_file(weights, unfinished, metadata={**opened.record["tied"], "format": "pt"})
        os.replace(unfinished, file)
    except OSError as error:
        raise StateError(f"{file}: cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return weights


def main(arguments: Sequence[str]) -> ExitCode:
    """The program; returns its exit code: ``DONE``, or ``MISTAKE`` after one message."""
    parser = argparse.ArgumentParser(prog="export.py", description=DESCRIPTION)
    parser.add_argument("state", help="a folder such as outputs/RUN/states/step_200")
    parser.add_argument("out", help=f"the file to write; its name ends in {SUFFIX}")
    try:
        options = parser.parse_args(arguments)
        weights = export_weights(options.state, options.out)
    except SystemExit as stop:  # argparse has written its message, or the help
        return ExitCode.MISTAKE if stop.code else ExitCode.DONE
    except DistCkptError as mistake:
        sys.stderr.write(f"error: {mistake}\n")
        return ExitCode.MISTAKE
    size_mib = sum(tensor.nbytes for tensor in weights.values()) / 2**20
    sys.stdout.write(f"{options.out}: {len(weights)} tensors, {size_mib:.1f} MiB\n")
    return ExitCode.DONE
