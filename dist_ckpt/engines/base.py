"""What an engine is, and what all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dist_ckpt.batch import Batch
from dist_ckpt.blocks import find_blocks
from dist_ckpt.engines.optim import OptimizerOptions, learning_rate
from dist_ckpt.engines.support import engine_row, unsupported
from dist_ckpt.errors import DataError, EngineError, PlanError
from dist_ckpt.memory.ledger import Owner
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.memory.records import RankMemory
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.stages import LayerList, layers_of
from dist_ckpt.states.source import StateSource
from dist_ckpt.states.training_state import load_state, save_state

if TYPE_CHECKING:
    from dist_ckpt.deepspeed_config import DeepSpeedConfig


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
    layers: Callable[[nn.Module], LayerList] = layers_of
    """(model) → what a pipeline cuts it into."""
    deepspeed: DeepSpeedConfig | None = None
    """What DeepSpeed is told, for its engines; nothing else says how they shard, offload and communicate."""
    allow_untested: bool = False
    """Take a plan that no test has proven right under this engine with these options."""
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    check_gradients: bool = True
    """Whether the first update stops where a parameter has no gradient and would have one without the plan."""


class StepObserver(Protocol):
    """Looks on while an engine performs an update."""

    def forward_ended(self, root: Tensor) -> None:
        """Between the forward and the backward of a micro-batch.

        Args:
            root: what backward starts from: the loss, or what a pipeline stage hands on.
        """
        ...

    def backward_ended(self) -> None:
        """After the backward of a micro-batch."""
        ...

    def boundary(self) -> None:
        """After the last backward, before gradients are clipped."""
        ...


class Engine(ABC):
    """A way to shard a model and to perform its updates.

    Args:
        loss_sum: (model, batch) → summed token loss, an fp32 scalar.
        initialize: fills the parameters of a model that was built on the meta device, once it has memory.
    """

    name: ClassVar[str]
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
        self.meter: MemoryMeter
        self.memory: RankMemory | None = None
        """This rank's memory at the last boundary that was measured."""
        self.observer: StepObserver | None = None
        self.step = 0
        """Updates done."""

    @property
    def data_rank(self) -> int:
        """Which of the :attr:`data_ranks` shares of each update's rows this rank works on."""
        return dist.get_rank()

    @property
    def data_ranks(self) -> int:
        """Into how many shares the rows of an update are divided; stages of one pipeline work on the same share."""
        return dist.get_world_size()

    @abstractmethod
    def refuses(self, plan: Plan) -> list[str]:
        """Why this engine cannot run the plan with its options; pure, before any process group."""
        options = self.options
        row = engine_row(self.name, options.deepspeed.stage if options.deepspeed is not None else None)
        problems = list(unsupported(plan, row, options.precision, options.compile, options.allow_untested))
        if options.replicas > 1 and not self.takes_replicas:
            problems.append(f"engine.replicas={options.replicas} is an option of fsdp2, not of {self.name}")
        return problems

    @abstractmethod
    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """Applies the plan, then compiles, shards and builds the optimizer.

        Raises:
            PlanError: the engine refuses the plan, or the plan does not fit the model.
            EngineError: the model is distributed already, or has no blocks to compile.
        """

    @abstractmethod
    def train_step(self, micro_batches: Sequence[Batch], measure: bool = False) -> StepResult:
        """One update over this rank's micro-batches, weighted by tokens over micro-batches and ranks.

        Args:
            measure: whether to read this rank's memory at the boundary, into ``memory``.

        Raises:
            DataError: no token of the update has a target.
            PlanError: in the first update: the plan has lost the gradient of a parameter.
            NonFiniteError: the loss or the norm is not finite. Each on every rank, before the weights change.
        """

    @abstractmethod
    def eval_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over every rank's batches, in nats; nothing is recomputed or kept."""

    @abstractmethod
    def owners(self) -> Iterable[Owner]:
        """(kind, name, local tensor) of all lasting memory."""

    @abstractmethod
    def training_state(self) -> StateSource:
        """The weights and moments as a training state names them."""

    def save(self, path: str, extra: dict[str, Any]) -> None:
        """Writes the training state; all ranks call it."""
        save_state(path, self.training_state(), extra | {"step": self.step})

    def load(self, path: str) -> dict[str, Any]:
        """Reads a training state and returns its ``extra``; all ranks call it."""
        extra = load_state(path, self.training_state())
        self.step = int(extra["step"])
        return extra

    def accumulation_cost_bytes(self) -> int:
        """What this rank holds of unsharded fp32 gradients until the boundary, once prepared."""
        return 0

    def close(self) -> None:  # noqa: B027  (most have nothing to let go of)
        """Lets go of what outlives the engine object: hooks, process groups. It cannot be used any more."""

    def _refuse_plan(self, plan: Plan) -> None:
        if problems := self.refuses(plan):
            raise PlanError("; ".join(problems))

    def _refuse_non_finite(self, loss: float, norm: float) -> None:
        """Stops every rank before the weights change; both numbers are the same on all."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}")

    def _refuse_no_targets(self, tokens: int) -> None:
        """The loss is divided by ``tokens``, those of the whole update that have a target."""
        if tokens == 0:
            raise DataError(f"step {self.step + 1}: no token of the whole update has a target")

    def _set_learning_rate(self, optimizer: Optimizer) -> float:
        """That of this update, which is returned."""
        rate = learning_rate(self.step, self.options.optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _sum_over_ranks(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


def materialize(model: nn.Module, device: torch.device, initialize: Callable[[nn.Module], None] | None) -> None:
    """Moves a model to the device; one that is on meta gets memory there and is initialized.

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


def refuse_other_meshes(model: nn.Module) -> None:
    """Tensor and context parallelism are not proven right here, so a model that comes with them is refused."""
    for name, parameter in named_parameters(model):
        if isinstance(parameter, DTensor):
            dims = parameter.device_mesh.mesh_dim_names or ("unnamed",)
            raise EngineError(
                f"parameter {name!r} is distributed already, over mesh dimensions {', '.join(dims)}: tensor- and "
                "context-parallel models are not supported; pass the model before any sharding"
            )


def blocks_if_any(model: nn.Module) -> tuple[str, ...]:
    """Blocks to shard where no policy named them; a model without any is sharded as one."""
    try:
        return find_blocks(model)
    except PlanError:
        return ()
