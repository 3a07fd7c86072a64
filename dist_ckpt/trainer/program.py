"""What the programs share: from a command line to a checked configuration, and from an error to an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dist_ckpt.errors import StateWriteError
from dist_ckpt.trainer.checks import check
from dist_ckpt.trainer.config import Config, config_yaml, load_config
from dist_ckpt.trainer.exits import ExitCode, code_of, record_exit, recorded_exit, root_mistake
from dist_ckpt.trainer.process import Place, leave_with_rank_zero, without_launcher_flags
from dist_ckpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from dist_ckpt.trainer.data.corpus import Files

_log = logging.getLogger(__name__)


def begin(arguments: Sequence[str], about: str = "") -> Place:
    """This process's place in the job; ends the process after ``--help``.

    Args:
        about: what a program does that takes the options of ``launch/train.py``.
    """
    place = Place.of(os.environ)
    logging.getLogger().addHandler(logging.NullHandler())  # without it, Python sends warnings to the console
    if "--help" in arguments or "-h" in arguments:
        from dist_ckpt.trainer.help import help_text

        leave_with_rank_zero(place, ExitCode.DONE, lambda: print(about + help_text(), end=""))
    return place


def read(arguments: Sequence[str]) -> Config:
    """The configuration that a command line asks for.

    Raises:
        DistCkptError: a mistake in it.
    """
    return load_config([a for a in without_launcher_flags(arguments) if a != "--print-config"])


def accept(config: Config, arguments: Sequence[str], place: Place) -> None:
    """Checks a configuration against the number of ranks; ends the process after ``--print-config``.

    Raises:
        DistCkptError: it does not fit.
    """
    check(config, place.world_size)
    if "--print-config" in arguments:
        text = config_yaml(config)
        leave_with_rank_zero(place, ExitCode.DONE, lambda: print(text, end=""))


def find_data(config: Config) -> Files | None:
    """The files of the data, found before the slow imports; None if it has none."""
    if config.data.kind == "synthetic":
        return None
    from dist_ckpt.trainer.data.files import find_files

    return find_files(config.data)


def fail(error: BaseException, folder: RunFolder | None, place: Place) -> ExitCode:
    """Records and prints an error, unless it is only the consequence of another rank's.

    Args:
        folder: of a run that has one.
    """
    from dist_ckpt.engines.base import NonFiniteError
    from dist_ckpt.memory.out_of_memory.failure import out_of_memory_in, requested_bytes
    from dist_ckpt.memory.records import in_bytes
    from dist_ckpt.states.agreement import OtherRankFailed

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes twice: from the terminal, then from torchrun
    error = root_mistake(error)
    code = code_of(error)
    details = "".join(traceback.format_exception(error))
    _log.error("%s", details)
    short = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    if folder is not None:
        if isinstance(error, OtherRankFailed):  # the record of that rank says more
            recorded_exit(folder.path, patience_s=5.0)
        try:
            if not record_exit(folder.path, code, short, rank=place.rank):
                first = recorded_exit(folder.path, patience_s=1.0)  # it may be half written
                if first is not None:
                    return first[0]
        except OSError as problem:
            short += f" ({not_recorded(folder, problem)})"
    where = f" (rank {place.rank}; more in {folder.log(place.rank)})" if folder is not None else ""
    if code is ExitCode.MISTAKE:
        print_error(short)
    elif code is ExitCode.OUT_OF_MEMORY:
        asked = requested_bytes(out_of_memory_in(error) or error)  # allocators' own words are in the log
        what = f"{in_bytes(asked)} could not be allocated" if asked is not None else short
        print_error(f"out of memory: {what}{where}")
    elif isinstance(error, (NonFiniteError, StateWriteError, KeyboardInterrupt)):
        print_error(f"{short}{where}")
    else:
        print_error(f"rank {place.rank}: {details.rstrip()}")
    return code


def not_recorded(folder: RunFolder, problem: OSError) -> str:
    """That an exit was not written down."""
    return f"{folder.exit} could not be written: {problem.strerror}"


def print_error(text: str, kind: str = "error") -> None:
    """A line on stderr, from before there is a console and after it has gone."""
    with contextlib.suppress(OSError):  # nobody reads it any more; the exit code still counts
        print(f"{kind}: {text}", file=sys.stderr, flush=True)
