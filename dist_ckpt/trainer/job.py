"""From a configuration to a run: model, plan, cost, engine and data first, which need no process group."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.cost import PlanCost, StageCost, plan_cost, stage_costs, stage_table
from dist_ckpt.engines import ENGINES, Engine, TrainingOptions
from dist_ckpt.engines.base import blocks_if_any
from dist_ckpt.engines.optim import OptimizerOptions
from dist_ckpt.errors import ConfigError, DataError, PlanError
from dist_ckpt.memory.records import in_bytes
from dist_ckpt.plan import Plan
from dist_ckpt.planning import make_plan
from dist_ckpt.report.advice import advice
from dist_ckpt.report.console import Console
from dist_ckpt.report.predicted import Predicted
from dist_ckpt.stages import partition
from dist_ckpt.trainer.checks import check_batch, check_model_sizes
from dist_ckpt.trainer.config import Config, DeviceType
from dist_ckpt.trainer.data import RowDataset, build_data
from dist_ckpt.trainer.deepspeed import asked_policy, deepspeed_config
from dist_ckpt.trainer.loop import Loop, differences
from dist_ckpt.trainer.models.source import ModelSource, model_source
from dist_ckpt.trainer.process import Place, Termination
from dist_ckpt.trainer.reporting import RunSinks, facts_of, wants_prediction, write_start
from dist_ckpt.trainer.run_folder import RunFolder

if TYPE_CHECKING:
    from dist_ckpt.memory.out_of_memory.limits import MemoryLimit
    from dist_ckpt.trainer.data.corpus import Files


@dataclass(frozen=True)
class Job:
    """What a run needs, built and checked without a process group, the same on every rank."""

    config: Config
    place: Place
    device: torch.device
    source: ModelSource
    plan: Plan
    engine: Engine
    """Not yet prepared."""
    train_rows: RowDataset
    validation_rows: RowDataset

    @property
    def model(self) -> nn.Module:
        """On the meta device, until the engine has prepared it."""
        return self.source.model

    @staticmethod
    def build(config: Config, place: Place, files: Files | None = None) -> Job:
        """Builds all parts.

        Args:
            files: those of the data, if they have been found before.

        Raises:
            DistCkptError: a part that cannot be built from this configuration, on this machine.
        """
        device = run_device(config, place)
        source = model_source(config.model, config.train.seed)
        check_model_sizes(config, source.vocab_size, source.max_seq_len)
        sample = Sample.of(config, source)
        policy = asked_policy(config, len(blocks_if_any(source.model)))
        plan = make_plan(sample.model, policy, sample.batch, sample.loss, stages_of(config, source))
        engine = build_engine(config, place, device, source)
        if problems := engine.refuses(plan):
            raise PlanError("; ".join(problems))
        vocab_size, train = source.vocab_size, config.train
        train_rows, validation_rows = build_data(
            config.data, vocab_size=vocab_size, seq_len=train.seq_len, seed=train.seed, files=files
        )
        check_batch(config, place.world_size, train_rows.num_rows)
        if config.train.eval_every:
            validation_rows.require_rows()
        return Job(config, place, device, source, plan, engine, train_rows, validation_rows)

    def forecast(self) -> str:
        """The output of a dry run: the run in one line, the plan and its cost."""
        config = self.config
        ranks = config.ranks(self.place.world_size)
        rows = config.resolved_global_batch(ranks)
        parameters = sum(p.numel() for p in self.model.parameters())
        return "\n".join(
            (
                f"run: {parameters:,} parameters, {config.engine.name} on {ranks} rank{'s'[: ranks != 1]}, "
                f"{rows:,} rows of {config.train.seq_len:,} tokens an update",
                str(self.plan),
                f"cost: {self._cost()}",
                f"data: {self.train_rows.description}",
                *self.notes,
            )
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What DeepSpeed's configuration asks for and the run does in another way."""
        told = self.engine.options.deepspeed
        return tuple(f"{told.path or 'DeepSpeed'}: {note}" for note in told.notes) if told is not None else ()

    def costs(self) -> tuple[StageCost, ...]:
        """What the plan costs in each stage, in the only one without a pipeline; before the engine is prepared."""
        sample = Sample.of(self.config, self.source)
        if not self.plan.stages:
            parameters = sum(p.numel() for p in self.model.parameters())
            return (StageCost(0, sample.cost(self.plan), in_flight=1, parameters=parameters),)
        accum = self.config.resolved_grad_accum(self.config.ranks(self.place.world_size))
        return stage_costs(sample.model, self.source.layers(sample.model), self.plan, sample.batch, accum)

    def predicted(self) -> tuple[Predicted, ...]:
        """The same as a run's folder has it."""
        return tuple(Predicted.of(cost, in_pipeline=bool(self.plan.stages)) for cost in self.costs())

    def _cost(self) -> str:
        """Of a micro-batch, and in a pipeline of each stage."""
        costs = self.costs()
        return f"of each stage\n{stage_table(costs)}" if self.plan.stages else str(costs[0].micro_batch)


def train(job: Job, folder: RunFolder, limit: MemoryLimit, sinks: RunSinks) -> bool:
    """Trains as the configuration says; needs the process group.

    Args:
        limit: on this rank's memory, lifted before anything deals with an error.
        sinks: of the run, to be opened here and finished by the caller.

    Returns:
        Whether all steps were done; False after a SIGTERM.

    Raises:
        DataError: the ranks have found different data.
    """
    config, place = job.config, job.place
    _check_same_data(job)
    console = Console(config.train.steps, quiet=place.rank != 0)
    console.say(f"run folder: {folder.path}")
    console.say(str(job.plan))
    console.say(f"data: {job.train_rows.description}")
    for note in job.notes:
        console.say(note)
    predicted = job.predicted() if place.rank == 0 and wants_prediction(config) else ()
    seed_rank(config, place.rank)
    job.engine.prepare(job.model, job.plan)
    if config.train.accum_sync == "boundary" and (nbytes := job.engine.accumulation_cost_bytes()):
        console.say(
            f"train.accum_sync=boundary keeps {in_bytes(nbytes)} of unsharded gradients on each rank until the boundary"
        )
    loop = Loop(config, job.engine, job.train_rows, job.validation_rows, folder, console, Termination(), limit)
    loop.resume(restarted=place.restarts > 0)
    if place.rank == 0:  # only now: a state that is refused leaves the folder's earlier run as it was
        write_start(config, folder, job.plan, predicted, loop.step)
    sinks.open(config, folder, place, loop.step, console.say)
    done = loop.run(sinks.opened)
    _show_end(job, loop, console, predicted)
    console.say(loop.summary())
    return done


def _show_end(job: Job, loop: Loop, console: Console, predicted: Sequence[Predicted]) -> None:
    """What the run has found, on the console."""
    if loop.report is not None:
        console.table(loop.report)
        if loop.deep_report is not None:
            console.peaks(loop.deep_report)
        if opaque := job.engine.meter.opaque:
            console.say(f"activations may be higher than shown: what {', '.join(opaque)} may hold cannot be counted")
        if unseen := job.engine.meter.unseen:
            console.say(f"no op rule sees into {', '.join(unseen)}: recomputed as a whole")
        if job.place.rank == 0:  # which alone has every rank's profile
            report, facts = loop.deep_report or loop.report, facts_of(job.config, job.plan, predicted)
            console.advise(advice(report, loop.profiles, facts), report)


def seed_rank(config: Config, rank: int) -> None:
    """Seeds what draws random numbers in a step, dropout: each rank has its own stream."""
    torch.manual_seed((config.train.seed * 1_000_003 + rank) % 2**63)


def _check_same_data(job: Job) -> None:
    """Refuses ranks with different data, such as two machines with different Python versions and ``data=stdlib``."""
    mine = [dict(rows.fingerprint) for rows in (job.train_rows, job.validation_rows)]
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for which, one, other in zip(("training", "validation"), everyone[0], theirs, strict=True):
            if differing := differences(one, other):
                raise DataError(
                    f"data: ranks 0 and {rank} have different {which} data ({', '.join(differing)}); "
                    "every machine needs the same files"
                )


def agree_on_folder(folder: RunFolder | None) -> RunFolder:
    """Rank 0's run folder, on every rank."""
    shared = [folder]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None, "rank 0 has one"
    return shared[0]


def end_process_group() -> None:
    """Waits for all ranks and closes their connections."""
    dist.barrier()
    dist.destroy_process_group()


def run_device(config: Config, place: Place) -> torch.device:
    """This rank's device: a GPU of its own, or the CPU, the same kind on all ranks of a machine.

    Raises:
        ConfigError: CUDA is asked for and there are too few devices.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= place.local_world_size
    if config.device.type is DeviceType.cuda and not enough and not config.dry_run:
        raise ConfigError(
            f"device=cuda: {place.local_world_size} ranks on this machine, and torch finds {gpus} CUDA devices; "
            "start fewer ranks, or use device=cpu"
        )
    if enough and config.device.type is not DeviceType.cpu:
        return torch.device("cuda", place.local_rank)
    return torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    """A micro-batch of this run for measuring: shapes alone, in the run's precision."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, Batch], Tensor]

    @staticmethod
    def of(config: Config, source: ModelSource) -> Sample:
        model = source.model
        autocast = config.engine.name == "ddp" and config.train.precision == "bf16"
        if config.train.precision == "bf16" and not autocast:  # the others compute with low-precision parameters
            model = copy.deepcopy(model)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        shape = (config.train.micro_batch, config.train.seq_len)
        batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}

        def loss(module: nn.Module, inputs: Batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return source.loss_sum(module, inputs)

        return Sample(model, batch, loss)

    def cost(self, plan: Plan) -> PlanCost:
        """What the plan costs on it; the model is left as it is."""
        return plan_cost(self.model, plan, self.batch, self.loss)


def stages_of(config: Config, source: ModelSource) -> tuple[tuple[str, ...], ...]:
    """The names of the modules of each pipeline stage; none without a pipeline.

    Raises:
        EngineError: the model cannot be cut so.
    """
    if config.engine.stages == 1:
        return ()
    return partition(source.layers(source.model), source.model, config.engine.stages, config.engine.partition)


def build_engine(config: Config, place: Place, device: torch.device, source: ModelSource) -> Engine:
    """The run's engine, not yet prepared."""
    train, sync = config.train, config.train.accum_sync
    optimizer = OptimizerOptions(
        lr=train.lr,
        min_lr_ratio=train.min_lr_ratio,
        warmup_steps=train.warmup_steps,
        total_steps=train.steps,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.optimizer_eps,
    )
    options = TrainingOptions(
        precision="bf16" if train.precision == "bf16" else "fp32",
        clip=train.clip,
        accum_sync=None if sync is None else "every" if sync == "every" else "boundary",
        compile=train.compile,
        replicas=config.engine.replicas,
        allow_untested=config.engine.allow_untested,
        optimizer=optimizer,
        check_gradients=train.check_gradients,
    )
    if config.engine.is_deepspeed:
        kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        told = deepspeed_config(config, config.ranks(place.world_size), kind, source.hidden_size)
        options = dataclasses.replace(options, deepspeed=told, layers=source.layers)
    return ENGINES[config.engine.name](options, device, source.loss_sum, source.initialize)
