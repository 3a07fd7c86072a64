"""A model cut into stages, each on ranks of its own: DeepSpeed's pipeline engine, with ZeRO 0 or 1 inside a stage."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.batch import Batch
from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.compat import deepspeed_pipe as pipe
from dist_ckpt.engines.base import (
    NonFiniteError,
    StepResult,
    blocks_if_any,
    materialize,
    refuse_other_meshes,
)
from dist_ckpt.engines.data_parallel import compile_blocks
from dist_ckpt.engines.feed import Feed, agree
from dist_ckpt.engines.gradients import LostGradients
from dist_ckpt.engines.optim import build_optimizer
from dist_ckpt.engines.reached import Reached
from dist_ckpt.engines.stage import keep_stage, refuse_untrained, shared_parameters
from dist_ckpt.engines.told import ToldEngine
from dist_ckpt.errors import DataError, EngineError
from dist_ckpt.memory.ledger import Owner, owners_of
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.schedule import data_rank_of, stage_of
from dist_ckpt.stages import Layer, LayerList, layers_by_stage
from dist_ckpt.states.deepspeed import DeepSpeedSource
from dist_ckpt.states.source import StateSource
from dist_ckpt.wrap.apply import apply_plan


class PipelineEngine(ToldEngine):
    """Every rank holds one stage; rank = stage · data ranks + data rank."""

    name = "deepspeed_pipe"
    stages = 1
    stage = 0
    optimizer: Optimizer
    """Of this stage, as DeepSpeed was given it."""
    deepspeed: Any
    """DeepSpeed's own engine."""
    _layers: LayerList
    _update: _Update
    _lost_gradients: LostGradients | None = None
    _reached: Reached | None = None
    _shape: tuple[int, ...] | None = None
    _output: tuple[tuple[int, ...], torch.dtype] | None = None

    @property
    def data_rank(self) -> int:
        return data_rank_of(dist.get_rank(), dist.get_world_size(), self.stages)

    @property
    def data_ranks(self) -> int:
        return dist.get_world_size() // self.stages

    def refuses(self, plan: Plan) -> list[str]:
        problems = super().refuses(plan)
        if not plan.stages:
            problems.append("deepspeed_pipe runs a model that is cut into stages, and the plan has none: engine.stages")
        return problems

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """As every engine.

        Raises:
            EngineError: also if the ranks cannot be divided into pipelines, or a stage would have nothing to train.
        """
        self._refuse_plan(plan)
        refuse_other_meshes(model)
        rank, world = dist.get_rank(), dist.get_world_size()
        self._update = _Update()
        self.stages = len(plan.stages)
        if world % self.stages:
            raise EngineError(f"engine.stages={self.stages} does not divide the {world} ranks")
        self.stage = stage_of(rank, world, self.stages)
        blocks = blocks_if_any(model) or plan.blocks
        self._layers = self.options.layers(model)
        by_stage = layers_by_stage(self._layers, plan.stages)
        refuse_untrained(model, plan.stages)
        shared = shared_parameters(model, plan.stages)
        if self.options.check_gradients and plan.regions:
            self._lost_gradients = LostGradients(model, self._loss_sum)
        apply_plan(model, plan)  # to the whole model, which has no memory yet, so that all of the plan is checked
        keep_stage(model, plan.stages, self.stage)
        if self.options.compile and (mine := [name for name in blocks if name in dict(model.named_modules())]):
            compile_blocks(model, mine)
        materialize(model, self.device, self._initialize)
        model.train()
        self.model = model
        compat.start(self.device)
        named = dict(named_parameters(model))
        self.optimizer = build_optimizer(named.items(), self.options.optimizer)
        module = pipe.StageModule(
            model,
            [[self._run(layer, model, is_last=layer is layers[-1]) for layer in layers] for layers in by_stage],
            self._loss,
            [pipe.SharedWeight(name, holders, named.get(name)) for name, holders in shared.items()],
        )
        watcher = pipe.Watcher(
            lambda: self._update.weight, self._forward_ended, self._backward_ended, self._at_boundary
        )
        self.deepspeed = pipe.build(module, self.optimizer, self._options_of_deepspeed(), self.device, watcher)
        # Now that DeepSpeed has cast and broadcast the weights: in bf16, a tied one loses hooks from before.
        self._reached = Reached(model) if self._lost_gradients is not None else None
        self.optimizer.register_step_pre_hook(lambda *_: self._refuse_non_finite(self._update.loss, self._norm()))
        self.meter = MemoryMeter(model, owners=self.owners, stage=self.stage)

    def train_step(self, micro_batches: Sequence[Batch], measure: bool = False) -> StepResult:
        micro_batches = list(micro_batches)
        feed = agree(micro_batches, self.stages, self.device)
        if len(feed.shapes) != self.deepspeed.micro_batches:
            raise DataError(
                f"step {self.step + 1}: {len(feed.shapes)} micro-batches, and the pipeline was built for "
                f"{self.deepspeed.micro_batches} (gradient_accumulation_steps)"
            )
        if len(set(feed.shapes)) > 1:
            raise DataError(
                f"step {self.step + 1}: the micro-batches of an update must have one shape (rows, tokens) in a "
                f"pipeline, and have {', '.join(map(str, dict.fromkeys(feed.shapes)))}; drop what is left over, or "
                "fill it up with rows without targets"
            )
        self._refuse_no_targets(feed.tokens)
        self._expect(feed.shapes[0])
        # DeepSpeed averages over data ranks; the loss is weighted by the tokens of the whole update.
        self._update = _Update(feed, self.data_ranks / feed.tokens, measure, micro_batches)
        rate = self._set_learning_rate(self.optimizer)
        pipe.train(self.deepspeed, _pairs(micro_batches))
        norm = self._norm()
        self._refuse_non_finite(self._update.loss, norm)
        pipe.release_buffers(self.deepspeed)
        result = StepResult(self._update.loss, norm, feed.tokens, rate)
        self._update = _Update()
        self.step += 1
        return result

    def eval_loss(self, batches: Iterable[Batch]) -> float:
        """As every engine. Micro-batches may be of any number, and of unlike shapes.

        Raises:
            DataError: on every rank: the ranks were given unlike numbers or shapes of them.
        """
        batches = list(batches)
        feed = agree(batches, self.stages, self.device)
        self._update = _Update(feed)
        for shape, run in itertools.groupby(zip(feed.shapes, batches, strict=True), key=lambda pair: pair[0]):
            self._expect(shape)
            pipe.evaluate(self.deepspeed, _pairs([batch for _, batch in run]))
        total = self._sum_over_ranks(float(self._update.total))
        self._update = _Update()
        return total / max(feed.tokens, 1)

    def owners(self) -> Iterator[Owner]:
        for kind, name, tensor in owners_of(self.deepspeed, None):
            yield kind, name.removeprefix("model."), tensor

    def close(self) -> None:
        compat.close(self.deepspeed)

    def training_state(self) -> StateSource:
        # A shared weight has its first name on every stage; the first of them saves it.
        elsewhere = {name for name, p in named_parameters(self.model) if pipe.is_copy(p)}
        return DeepSpeedSource(self.deepspeed, self.model, elsewhere)

    def _forward_ended(self, roots: Sequence[Tensor]) -> None:
        self.meter.after_forward(*roots)
        if self.observer is not None:
            self.observer.forward_ended(roots[-1])

    def _backward_ended(self) -> None:
        if self.observer is not None:
            self.observer.backward_ended()

    def _at_boundary(self) -> None:
        update = self._update
        if update.measure:
            self.memory = self.meter.boundary(self.step + 1)
        else:
            self.meter.reset()
        if self.observer is not None:
            self.observer.boundary()
        if self._lost_gradients is not None and self._reached is not None:
            self._lost_gradients.refuse(self.model, update.micro_batches, self.device, self._reached.names)
            self._reached.close()
            self._lost_gradients = self._reached = None
        assert update.feed is not None
        update.loss = self._sum_over_ranks(float(update.total)) / update.feed.tokens
        if not math.isfinite(update.loss):
            raise NonFiniteError(f"step {self.step + 1}: loss {update.loss}")
        if self._clips_itself:
            update.norm = self._clip()

    @property
    def _clips_itself(self) -> bool:
        """Without ZeRO and in fp32 DeepSpeed has no norm to show, and of a pipeline it takes that of the first stage
        (runtime/utils.py, clip_grad_norm_: only where get_model_parallel_rank() is 0)."""
        return bool(self._config.stage == 0 and self._config.precision == "fp32")

    def _options_of_deepspeed(self) -> dict[str, Any]:
        own = {"gradient_clipping": 0.0} if self._clips_itself else {}
        return {**self._config.as_dict(), **own}

    def _clip(self) -> float:
        """Clips to the norm over all stages; a weight that stages share counts once."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        counted = [p.grad for p in parameters if not pipe.is_copy(p) and p.grad is not None]
        square = torch.zeros((), device=self.device)
        if counted:
            square += torch.nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square, group=self.deepspeed.grid.get_pipe_parallel_group())
        norm = square.sqrt()
        self._refuse_non_finite(self._update.loss, float(norm))
        if self.options.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip, norm)
        return float(norm)

    def _norm(self) -> float:
        """The gradient norm of this update, before clipping."""
        found = self._update.norm if self._clips_itself else pipe.norm_of_last_step(self.deepspeed)
        return math.nan if found is None else found

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = self._layers.loss(self.model, output, labels)
        self._update.total = self._update.total + loss.detach().double()
        return loss

    def _expect(self, shape: tuple[int, ...]) -> None:
        """Has the stages size their receive buffers anew if micro-batches have another shape than those before."""
        if shape != self._shape:
            self.deepspeed.reset_activation_shape()
            self._shape, self._output = shape, None

    def _run(self, layer: Layer, model: nn.Module, is_last: bool) -> Callable[[Tensor], Tensor]:
        function = partial(layer.run, model)
        return partial(self._checked, layer, function) if is_last else function

    def _checked(self, layer: Layer, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What a stage sends on, or gives to the loss."""
        output = function(x)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise EngineError(
                f"layer {layer.modules[0]!r} ends stage {self.stage} and returned "
                f"{_described(output)}; what stages pass on is one tensor of floating-point numbers"
            )
        found = tuple(output.shape), output.dtype
        if self._output is not None and found != self._output:
            raise EngineError(
                f"layer {layer.modules[0]!r} ends stage {self.stage} and returned {_described(output)}, where it "
                f"returned {self._output[0]} of {self._output[1]} before: micro-batches of one shape must give outputs "
                "of one shape"
            )
        self._output = found
        return output.contiguous()  # it is sent as it lies


@dataclasses.dataclass
class _Update:
    """What one update, or one evaluation, is about and has found."""

    feed: Feed | None = None
    weight: float = 1.0
    """Of each token's loss."""
    measure: bool = False
    micro_batches: Sequence[Batch] = ()
    total: Tensor | float = 0.0
    """Sum over the tokens of this pipeline, on its last stage."""
    loss: float = math.nan
    norm: float = math.nan


def _pairs(micro_batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
    return [(batch["input_ids"], batch["labels"]) for batch in micro_batches]


def _described(value: object) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
