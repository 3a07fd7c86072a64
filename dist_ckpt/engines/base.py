"""What an engine is, and what the data-parallel ones share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dist_ckpt.batch import Batch, count_targets
from dist_ckpt.blocks import find_blocks
from dist_ckpt.engines.gradients import LostGradients
from dist_ckpt.engines.optim import (
    OptimizerOptions,
    build_optimizer,
    learning_rate,
)
from dist_ckpt.engines.support import unsupported
from dist_ckpt.errors import DataError, EngineError, PlanError
from dist_ckpt.memory.ledger import Owner, owners_of
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.states.training_state import load_training_state, save_training_state
from dist_ckpt.wrap.apply import apply_plan
from dist_ckpt.wrap.module import why_uncompiled


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not finite. Raised on every rank."""


@dataclass(frozen=True)
class StepResult:
    """One whole update, the same on every rank."""

    loss: float
    """Mean over the update's tokens, in nats."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Targets in the update, over micro-batches and ranks."""
    lr: float


@dataclass(frozen=True)
class TrainingOptions:
    """What every engine needs to know about the training."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` computes in bfloat16 and keeps weights, moments and gradient reduction in fp32."""
    clip: float | None = 1.0
    """Largest gradient norm; ``None`` clips nothing."""
    accum_sync: Literal["every", "boundary"] | None = None
    """When gradients are reduced under accumulation; ``None`` is the engine's own choice."""
    compile: bool = False
    """Compile each block by itself."""
    replicas: int = 1
    """Groups of ranks that each hold the whole model, sharded inside (HSDP)."""
    allow_untested: bool = False
    """Take a plan that no test has proven right under this engine with these options."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    check_gradients: bool = True
    """Whether the first update stops where a parameter has no gradient and would have one without the plan."""


class StepObserver(Protocol):
    """Looks on while an engine performs an update."""

    def forward_ended(self, loss: Tensor) -> None:
        """Between the forward and the backward of a micro-batch."""
        ...

    def backward_ended(self) -> None:
        """After the backward of a micro-batch."""
        ...

    def boundary(self) -> None:
        """After the last backward, before gradients are clipped."""
        ...


class Engine(Protocol):
    """The contract between engines and everything above."""

    model: nn.Module
    memory: RankMemory | None
    """This rank's memory at the last boundary that was measured."""

    def refuses(self, plan: Plan) -> list[str]:
        """Why this engine cannot run the plan; pure, before any process group."""
        ...

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """Applies the plan, then compiles, shards and builds the optimizer."""
        ...

    def train_step(self, micro_batches: Sequence[Batch], measure: bool = False) -> StepResult:
        """One update over this rank's micro-batches; with ``measure`` also reads ``memory`` at its boundary."""
        ...

    def eval_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over every rank's batches, in nats."""
        ...

    def owners(self) -> Iterable[Owner]:
        """(category, name, local tensor) of all lasting memory."""
        ...

    def save(self, path: str, extra: dict[str, Any]) -> None:
        """Writes the training state; all ranks call it."""
        ...

    def load(self, path: str) -> dict[str, Any]:
        """Reads a training state and returns its ``extra``; all ranks call it."""
        ...


class DataParallelEngine(ABC):
    """Engines in which every rank runs the whole model on its own rows.

    Args:
        loss_sum: (model, batch) → summed token loss, an fp32 scalar.
        initialize: fills the parameters of a model that was built on the meta device, once it has memory.
    """

    name: ClassVar[str]
    default_accum_sync: ClassVar[Literal["every", "boundary"]]
    accumulates_unsharded: ClassVar[bool] = False
    """Whether gradients that wait for the boundary are whole on each rank, though parameters are sharded."""
    takes_replicas: ClassVar[bool] = False

    def __init__(
        self,
        options: TrainingOptions,
        device: torch.device,
        loss_sum: Callable[[nn.Module, Batch], Tensor],
        initialize: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.options = options
        self.device = device
        self._loss_sum = loss_sum
        self._initialize = initialize
        self.model: nn.Module
        self.optimizer: Optimizer
        self.meter: MemoryMeter
        self.memory: RankMemory | None = None
        self.observer: StepObserver | None = None
        self.step = 0
        self._trained_numel = 0
        self._lost_gradients: LostGradients | None = None

    @abstractmethod
    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        """The sharded model on the device, its parameters initialised if it came without memory."""

    @abstractmethod
    def reduction(self, reduce: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch whose backward does or does not reduce gradients over ranks."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Clips to a global norm and returns the norm before."""

    def accumulation_cost_bytes(self) -> int:
        """What this rank holds of unsharded fp32 gradients until the boundary, once prepared."""
        waits = self.options.accum_sync == "boundary" and self.accumulates_unsharded
        return 4 * self._trained_numel if waits else 0

    def refuses(self, plan: Plan) -> list[str]:
        """Why this engine cannot run the plan with its options; pure, before any process group."""
        problems = [f"{self.name} has no pipeline stages"] if plan.stages else []
        if self.options.replicas > 1 and not self.takes_replicas:
            problems.append(f"engine.replicas={self.options.replicas} is an option of fsdp2, not of {self.name}")
        options = self.options
        problems += unsupported(plan, self.name, options.precision, options.compile, options.allow_untested)
        return problems

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """Applies the plan, then compiles, shards and builds the optimizer.

        What is sharded and compiled are the model's own blocks, whatever blocks the policy names: a policy must not
        change how ranks communicate.

        Raises:
            PlanError: the engine refuses the plan, or the plan does not fit the model.
            EngineError: the model is distributed already, or has no blocks to compile.
        """
        if problems := self.refuses(plan):
            raise PlanError("; ".join(problems))
        _refuse_other_meshes(model)
        blocks = _blocks_if_any(model) or plan.blocks
        if self.options.check_gradients and plan.regions:
            self._lost_gradients = LostGradients(model, self._loss_sum)
        apply_plan(model, plan)
        modules = dict(model.named_modules())
        if self.options.compile:
            if not blocks:
                raise EngineError("train.compile: compiles block by block, and this model has no list of blocks")
            for name in blocks:
                if problem := why_uncompiled(modules[name]):
                    raise EngineError(f"train.compile: {name}: {problem}")
                modules[name].compile()
        self._trained_numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.model = self.shard(model, blocks)
        self.model.train()
        self.optimizer = build_optimizer(named_parameters(self.model), self.options.optimizer)
        self.meter = MemoryMeter(self.model, owners=self.owners)

    def train_step(self, micro_batches: Sequence[Batch], measure: bool = False) -> StepResult:
        """One update over this rank's micro-batches, weighted by tokens over micro-batches and ranks.

        Args:
            measure: whether to read this rank's memory at the boundary, into ``memory``.

        Raises:
            DataError: no token of the update has a target.
            PlanError: in the first update: the plan has lost the gradient of a parameter.
            NonFiniteError: the loss or the norm is not finite. Each on every rank, before the weights change.
        """
        world = dist.get_world_size()
        # The divisor has to be known before the first backward: dividing each micro-batch by its own tokens would
        # give the tokens of short ones more weight.
        tokens = int(self._sum_over_ranks(sum(count_targets(b) for b in micro_batches)))
        if tokens == 0:
            raise DataError(f"step {self.step + 1}: no token of the whole update has a target")
        every = (self.options.accum_sync or self.default_accum_sync) == "every"
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(micro_batches):
            with self.reduction(every or number == len(micro_batches) - 1):
                with self._autocast():
                    loss = self._loss_sum(self.model, {k: v.to(self.device) for k, v in batch.items()})
                self.meter.after_forward(loss)
                if self.observer is not None:
                    self.observer.forward_ended(loss)
                total += loss.detach()
                (loss * (world / tokens)).backward()  # engines average over ranks
                if self.observer is not None:
                    self.observer.backward_ended()
            del loss
        if measure:
            self.memory = self.meter.boundary(self.step + 1)
        else:
            self.meter.reset()
        if self.observer is not None:
            self.observer.boundary()
        if self._lost_gradients is not None:
            self._lost_gradients.refuse(self.model, micro_batches, self.device)
            self._lost_gradients = None
        mean = self._sum_over_ranks(float(total)) / tokens
        norm = self.clip_gradients(self.options.clip if self.options.clip is not None else float("inf"))
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise NonFiniteError(f"step {self.step + 1}: loss {mean}, gradient norm {norm}")
        rate = learning_rate(self.step, self.options.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepResult(mean, norm, tokens, rate)

    @torch.no_grad()
    def eval_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over every rank's batches, in nats; nothing is recomputed or kept."""
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in batches:
            with self._autocast():
                total += float(self._loss_sum(self.model, {k: v.to(self.device) for k, v in batch.items()}))
            tokens += count_targets(batch)
        self.model.train()
        return self._sum_over_ranks(total) / max(self._sum_over_ranks(tokens), 1)

    def owners(self) -> Iterator[Owner]:
        return owners_of(self.model, self.optimizer)

    def save(self, path: str, extra: dict[str, Any]) -> None:
        save_training_state(path, self.model, self.optimizer, extra | {"step": self.step})

    def load(self, path: str) -> dict[str, Any]:
        extra = load_training_state(path, self.model, self.optimizer)
        self.step = int(extra["step"])
        return extra

    def _autocast(self) -> AbstractContextManager[Any]:
        """For engines that keep fp32 weights in the model; the others cast what they gather."""
        return nullcontext()

    def _sum_over_ranks(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


def materialize(model: nn.Module, device: torch.device, initialize: Callable[[nn.Module], None] | None) -> None:
    """Moves a model to the device; one that is on meta gets memory there and is initialised.

    ``Module.to_empty`` gives each user of a tied parameter its own copy, so ties are restored.
    """
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
        return
    assert initialize is not None, "a model on meta needs initialize"
    places = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    ties = [(m, n, first.setdefault(p, (m, n))) for m, n, p in places]
    model.to_empty(device=device)
    for module, name, (owner, owner_name) in ties:
        if module is not owner or name != owner_name:
            setattr(module, name, getattr(owner, owner_name))
    initialize(model)


def _refuse_other_meshes(model: nn.Module) -> None:
    """Tensor and context parallelism are not proven right here, so a model that comes with them is refused."""
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            dims = parameter.device_mesh.mesh_dim_names or ("unnamed",)
            raise EngineError(
                f"parameter {name!r} is distributed already, over mesh dimensions {', '.join(dims)}: tensor- and "
                "context-parallel models are not supported; pass the model before any sharding"
            )


def _blocks_if_any(model: nn.Module) -> tuple[str, ...]:
    """Blocks to shard where no policy named them; a model without any is sharded as one."""
    try:
        return find_blocks(model)
    except PlanError:
        return ()
