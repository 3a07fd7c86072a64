"""Internals of DeepSpeed's pipeline (tested with 0.19.8): a stage that is cut from a whole model, and the engine's
instructions as they are executed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.compat import deepspeed as compat

compat.load()  # without what it would print

from deepspeed.runtime.engine import DeepSpeedEngine  # noqa: E402
from deepspeed.runtime.pipe import p2p, schedule  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from deepspeed.runtime.pipe.module import PipelineModule  # noqa: E402


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several stages have."""

    name: str
    stages: tuple[int, ...]
    weight: nn.Parameter | None
    """This rank's copy, if its stage has one."""


class StageModule(PipelineModule):
    """DeepSpeed's pipeline module with the layers of one stage, which are functions over one model.

    :func:`~dist_ckpt.compat.deepspeed.start` comes before it.

    Args:
        model: this stage's part of the whole model.
        layers: for each stage what it runs, one after the other: (input) → output.
        loss: (the last stage's output, labels) → scalar.
        shared: weights of several stages, in the same order on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Sequence[Callable[[Tensor], Tensor]]],
        loss: Callable[[Tensor, Tensor], Tensor],
        shared: Sequence[SharedWeight],
    ) -> None:
        self._counts = [len(functions) for functions in layers]
        self._shared = tuple(shared)
        self._loss = loss
        self.labels: Tensor | None = None
        """On the last stage, of the micro-batch that is run next."""
        # activation_checkpoint_interval stays 0, whatever is recomputed: with one, DeepSpeed would choose by class
        # names (pipe/module.py, _is_checkpointable) and from a cache of the interval before
        # (_precompute_checkpointable_values; deepspeedai/DeepSpeed#6881, #4274), and skip layers without a word.
        with contextlib.redirect_stdout(io.StringIO()):  # how a model is cut (pipe/module.py)
            super().__init__(
                layers=[function for functions in layers for function in functions],
                num_stages=len(layers),
                activation_checkpoint_interval=0,
            )
        # The model is registered now, so that the base class has neither moved nor renamed it.
        self.model = model
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False
        for one in self._shared:  # for norms, the first stage's copy counts
            if one.weight is not None and self.stage_id != one.stages[0]:
                one.weight.ds_pipe_replicated = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Runs this stage's layers; the last stage returns the loss.

        Nothing is recomputed here: a plan has changed the model's own modules. The loss is a part of this, not a
        ``loss_fn`` outside: BF16_Optimizer clears gradients when the backward reaches the module's output, and with
        them those of a head that the loss function uses (runtime/engine.py, _backward_prologue).
        """
        assert self.activation_checkpoint_interval == 0
        for function in self.forward_funcs:
            x = function(x)
        if self.stage_id < self.num_stages - 1:
            return x
        assert self.labels is not None
        return self._loss(x, self.labels)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """What the engine adds up gradients of (pipe/engine.py, _exec_reduce_tied_grads)."""
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]

    def _partition_layers(self, method: str = "uniform") -> None:
        """The parts are given; the base class would find its own, and print them."""
        self.parts = [sum(self._counts[:stage]) for stage in range(len(self._counts) + 1)]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """The groups of ranks that share a weight; all ranks make all groups, in the same order."""
        found = {}
        for one in self._shared:
            for data in range(self._grid.data_parallel_size):
                ranks = [self._grid.stage_to_global(stage_id=stage, data=data) for stage in one.stages]
                group = dist.new_group(ranks=ranks)
                if self.global_rank in ranks:
                    holder = nn.Module()
                    holder.register_parameter("weight", one.weight)
                    found[one.name] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": holder}
        return found


@dataclass(frozen=True)
class Watcher:
    """What is called between the instructions of a pipeline engine."""

    weight: Callable[[], float]
    """() → factor of a micro-batch's loss for its backward; gradients are averaged over data ranks besides."""
    forward_ended: Callable[[Sequence[Tensor]], None]
    """After the forward of a micro-batch, with what the backward of every one in flight starts from."""
    backward_ended: Callable[[], None]
    """After the backward of a micro-batch."""
    boundary: Callable[[], None]
    """When all gradients are reduced; what it raises keeps the weights as they are."""


def build(
    model: StageModule, optimizer: Optimizer, config: dict[str, Any], device: torch.device, watcher: Watcher
) -> PipelineEngine:
    """DeepSpeed's engine for a stage.

    Args:
        optimizer: of the stage's parameters.
        config: complete, as ``deepspeed.initialize`` takes it, and changes it.
        watcher: of all updates.
    """
    engine: PipelineEngine = compat.build(model, optimizer, config, device)
    assert engine.module.activation_checkpoint_interval == 0
    _watch(engine, watcher)
    _norm_over_stages(engine.optimizer, engine.grid.get_pipe_parallel_group())
    return engine


def is_copy(parameter: nn.Parameter) -> bool:
    """Whether an earlier stage has this weight as well, whose copy is the one that counts."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def norm_of_last_step(engine: PipelineEngine) -> float | None:
    """The gradient norm that the optimizer has found, over all stages; NaN for DeepSpeed's marks of an invalid one, and
    None if it computes none."""
    found = getattr(engine.optimizer, "_global_grad_norm", None)
    return None if found is None else float(found) if float(found) >= 0 else float("nan")


def train(engine: PipelineEngine, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One update over micro-batches of (input, labels)."""
    _take_turn(engine)
    engine.train_batch(iter(micro_batches))


def evaluate(engine: PipelineEngine, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Runs micro-batches of (input, labels) forward, in eval mode; the loss function sees what comes out."""
    _take_turn(engine)
    try:
        engine.eval_batch(
            iter(micro_batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches)
        )
    finally:
        engine.module.train()  # eval_batch leaves it in eval mode
        release_buffers(engine)


def release_buffers(engine: PipelineEngine) -> None:
    """Drops the last micro-batches: the engine keeps them until the next ones take their places."""
    for slots in engine.pipe_buffers.values():
        slots[:] = [None] * len(slots)
    engine.fwd_outputs = []
    engine.loss = torch.zeros((), device=engine.device)


def _take_turn(engine: PipelineEngine) -> None:
    """Has sends go to this engine's neighbors: they go to those of the newest engine (pipe/p2p.py, _grid)."""
    if engine.is_pipe_parallel:
        p2p.init_process_groups(engine.grid)


def _watch(engine: PipelineEngine, watcher: Watcher) -> None:
    """Puts the watcher between the instructions of an engine.

    By a map of its own: PipelineEngine._INSTRUCTION_MAP holds functions, so that overridden methods are passed by
    (pipe/engine.py, _exec_schedule).
    """
    original = dict(engine._INSTRUCTION_MAP)

    def forward(self: PipelineEngine, buffer_id: int) -> None:
        self.module.labels = self.pipe_buffers["labels"][buffer_id]
        original[schedule.ForwardPass](self, buffer_id)
        self.module.labels = None
        if self.module.training:
            outputs = [self.loss] if self.is_last_stage() else self.pipe_buffers["outputs"]
            watcher.forward_ended([output for output in outputs if output is not None])

    def backward(self: PipelineEngine, buffer_id: int) -> None:
        if self.is_last_stage():
            # What PipelineEngine does, but for the division by the number of micro-batches, which would only have to be
            # undone. And it frees what only stages before the last one free.
            DeepSpeedEngine.backward(self, self.loss * watcher.weight(), scale_wrt_gas=False)
            self.loss = self.loss.detach()
            self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["labels"][buffer_id] = None
            self.fwd_outputs.clear()
        else:
            original[schedule.BackwardPass](self, buffer_id)
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = None
        watcher.backward_ended()

    def step(self: PipelineEngine, **options: Any) -> None:
        watcher.boundary()
        original[schedule.OptimizerStep](self, **options)

    engine._INSTRUCTION_MAP = original | {
        schedule.ForwardPass: forward,
        schedule.BackwardPass: backward,
        schedule.OptimizerStep: step,
    }


def _norm_over_stages(optimizer: Any, stages: Any) -> None:
    """Has ZeRO's optimizer add up its norm over the stages once, instead of once for each of its parameter groups.

    Stages may have unlike numbers of groups (one without a norm layer has no parameters without weight decay), and then
    their all-reduces meet those of other groups (zero/stage_1_and_2.py, scaled_global_norm and get_grad_norm_direct).
    """
    if not hasattr(optimizer, "scaled_global_norm"):
        return
    of_stage = optimizer.scaled_global_norm

    def scaled_global_norm(self: Any, norm_type: int = 2) -> Tensor:
        group, self.model_parallel_group = self.model_parallel_group, None
        try:
            norm = of_stage(norm_type)
        finally:
            self.model_parallel_group = group
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self.device)
        square = torch.where(norm >= 0, norm.square(), torch.full_like(norm, torch.inf))  # -1 marks an invalid one
        dist.all_reduce(square, group=stages)
        return square.sqrt()

    optimizer.scaled_global_norm = MethodType(scaled_global_norm, optimizer)
