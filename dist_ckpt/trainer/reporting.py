"""What a run leaves behind for people: its record files, and what else was asked for. Rank 0 alone writes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import DistCkptError
from dist_ckpt.report.advice import RunFacts
from dist_ckpt.report.html.sink import HtmlSink
from dist_ckpt.report.jsonl import RunFiles
from dist_ckpt.report.predicted import Predicted, to_json
from dist_ckpt.report.sinks import Sink
from dist_ckpt.report.wandb import WandbSink
from dist_ckpt.trainer.config import Config, Wandb, config_yaml
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.overrides import parse_yaml
from dist_ckpt.trainer.process import Place
from dist_ckpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from dist_ckpt.plan import Plan

_log = logging.getLogger(__name__)


class RunSinks:
    """Where the records of a run go; nowhere on other ranks than 0."""

    def __init__(self) -> None:
        self.opened: Sequence[Sink] = ()

    def open(
        self, config: Config, folder: RunFolder, place: Place, after_step: int, say: Callable[[str], None]
    ) -> None:
        """Opens every sink that the run asks for.

        Args:
            after_step: on resuming, the last step that counts.
            say: shows a line to the user.
        """
        if place.rank == 0:
            self.opened = _sinks(config, folder, place, after_step, say)

    def finish(self, code: ExitCode) -> None:
        """Tells every sink how the run has ended, once that is recorded and all files are there."""
        for sink in self.opened:
            sink.finish(code)


def _sinks(
    config: Config, folder: RunFolder, place: Place, after_step: int, say: Callable[[str], None]
) -> Sequence[Sink]:
    """In the order in which they finish: the page is made of the files, and uploaded with the rest."""
    sinks: list[Sink] = [RunFiles(folder, after_step)]
    if config.report.html:
        sinks.append(HtmlSink(folder.path, folder.report, say))
    if config.report.wandb is not Wandb.disabled:
        sinks.append(_wandb(config, folder, place, after_step, say))
    return sinks


def _wandb(config: Config, folder: RunFolder, place: Place, after_step: int, say: Callable[[str], None]) -> Sink:
    return WandbSink(
        folder.path,
        mode=config.report.wandb.value,
        project=config.report.wandb_project,
        max_ranks=config.report.wandb_max_ranks,
        world_size=place.world_size,
        config=parse_yaml(config_yaml(config)),
        after_step=after_step,
        same_run=place.restarts > 0 or config.train.resume in (None, "auto"),
        say=say,
    )


def wants_prediction(config: Config) -> bool:
    """Whether somebody will compare what the plan should cost with what it did."""
    return config.report.html or config.report.wandb is not Wandb.disabled


def write_start(config: Config, folder: RunFolder, plan: Plan, costs: Sequence[Predicted], after_step: int = 0) -> None:
    """Writes down what is run, and what it should cost if that was asked for.

    The deep step of an earlier start that used memory otherwise is set aside, as it says nothing about this one.

    Args:
        after_step: on resuming, the last step that counts.
    """
    if folder.profiles.exists() and _memory_use(folder) != _memory_use_of(config_yaml(config), plan.to_json()):
        before = folder.profiles / f"until_step_{after_step}"
        before.mkdir(exist_ok=True)
        for path in folder.profiles.glob("rank_*"):
            path.replace(before / path.name)
    folder.config.write_text(config_yaml(config), encoding="utf-8")
    folder.plan.write_text(plan.to_json(), encoding="utf-8")
    if costs:
        folder.cost.write_text(to_json(costs), encoding="utf-8")
    else:
        folder.cost.unlink(missing_ok=True)


_OF_MEMORY = ("micro_batch", "grad_accum", "global_batch", "seq_len", "precision", "accum_sync")
"""Options of ``train`` that change what fills memory."""


def _memory_use(folder: RunFolder) -> tuple[Any, ...] | None:
    """What decides how an earlier start of a run has used memory; None if that cannot be told."""
    try:
        return _memory_use_of(folder.config.read_text(encoding="utf-8"), folder.plan.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, DistCkptError):
        return None


def _memory_use_of(config: str, plan: str) -> tuple[Any, ...]:
    options = parse_yaml(config)
    train = {name: options["train"][name] for name in _OF_MEMORY}
    return plan, options["model"], options["engine"], train


def facts_of(config: Config, plan: Plan, costs: Sequence[Predicted]) -> RunFacts:
    """What advice has to know of the run; the same as what its folder tells."""
    return RunFacts(parse_yaml(config_yaml(config)), plan, costs)
