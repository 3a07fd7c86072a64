"""What a plan costs on a batch: saved bytes and recomputed FLOPs, exact, on fake tensors.

The model's real code runs, forward and backward, with the plan applied to a copy whose tensors have shapes but no
memory. Nothing is modelled, so nothing can be modelled wrongly; a 70B model on the meta device costs no more than its
Python objects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map

from dist_ckpt.batch import Batch
from dist_ckpt.compat.pipeline_module import is_pipeline_module, refuse_a_step
from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.memory.records import byte_unit, format_bytes
from dist_ckpt.names import is_plain, unwrap
from dist_ckpt.plan import Plan
from dist_ckpt.schedule import in_flight
from dist_ckpt.stages import Layer, LayerList, layers_by_stage
from dist_ckpt.wrap.apply import apply_plan, remove_plan

ModelInput = Mapping[str, Any] | Sequence[Any] | Tensor
LossFn = Callable[[nn.Module, Any], Tensor]
"""(model, batch) → scalar loss."""
_Measured = tuple[SavedBytes, int]
"""What a step keeps, and its FLOPs."""


@dataclass(frozen=True)
class PlanCost:
    """Cost of one micro-batch, forward and backward, on one rank that holds the whole model."""

    saved_bytes: int
    """Activation bytes alive between forward and backward."""
    input_bytes: int
    """Of these: inputs of recomputed regions."""
    cached_bytes: int
    """Of these: results that op rules keep."""
    flops: int
    """Forward, recompute and backward."""
    baseline_saved_bytes: int
    """Saved bytes without a policy."""
    baseline_flops: int
    """FLOPs without a policy."""
    offloaded_bytes: int = 0
    """Of the saved bytes, inputs and results among them: what waits in host memory instead of on an accelerator."""
    weight_copy_bytes: int = 0
    """Low-precision copies of parameters that autocast makes and backward keeps; not part of ``saved_bytes``."""
    opaque: tuple[str, ...] = ()
    """Graph nodes that may keep more than ``saved_bytes`` says; see :class:`SavedBytes`."""
    unseen: tuple[str, ...] = ()
    """Custom autograd Functions into which no op rule sees, so that they are recomputed; see :class:`SavedBytes`."""

    @property
    def recomputed_flops(self) -> int:
        return self.flops - self.baseline_flops

    def __str__(self) -> str:
        share = self.saved_bytes / self.baseline_saved_bytes if self.baseline_saved_bytes else 1.0
        extra = self.recomputed_flops / self.baseline_flops if self.baseline_flops else 0.0
        mib = {
            name: f"{count / 2**20:.2f}"
            for name, count in (
                ("saved", self.saved_bytes),
                ("none", self.baseline_saved_bytes),
                ("inputs", self.input_bytes),
                ("ops", self.cached_bytes),
            )
        }
        return (
            f"saved {mib['saved']} MiB a micro-batch ({share:.1%} of {mib['none']} MiB without a policy; "
            f"inputs {mib['inputs']}, op results {mib['ops']}"
            + (f", in host memory {self.offloaded_bytes / 2**20:.2f}" if self.offloaded_bytes else "")
            + "); "
            f"recomputes {self.recomputed_flops:,} FLOPs (+{extra:.1%} of forward and backward)"
            + (
                f"; autocast keeps {self.weight_copy_bytes / 2**20:.2f} MiB of weight copies"
                * bool(self.weight_copy_bytes)
            )
            + (f"; may keep more in {', '.join(self.opaque)}" if self.opaque else "")
            + (f"; recomputes {', '.join(self.unseen)}, into which no op rule sees" if self.unseen else "")
        )


def plan_cost(model: nn.Module, plan: Plan, batch: ModelInput, loss_fn: LossFn | None = None) -> PlanCost:
    """Saved bytes and FLOPs of a plan on a batch; the model and the batch are not touched.

    Args:
        model: the whole model, on any device including meta, with or without a plan applied.
        batch: a micro-batch as the model takes it: a mapping (keyword arguments), a sequence (positional ones) or a
            tensor. Only shapes and dtypes matter.
        loss_fn: the loss to differentiate, by default :func:`default_loss`.

    Raises:
        PlanError: the plan does not fit, an op rule matches nothing, the model is sharded, or its forward depends on
            values and so cannot run on fake tensors.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan_cost takes a plan, not a {type(plan).__name__}: make_plan(model, policy) makes one")
    loss_fn = loss_fn or default_loss
    with_plan = _measure(model, plan, batch, loss_fn)
    return _plan_cost(with_plan, _measure(model, Plan(), batch, loss_fn) if plan.regions else with_plan)


def _plan_cost(with_plan: _Measured, without: _Measured) -> PlanCost:
    saved, flops = with_plan
    baseline_saved, baseline_flops = without
    return PlanCost(
        saved_bytes=saved.total,
        input_bytes=saved.inputs,
        cached_bytes=saved.cached,
        flops=flops,
        baseline_saved_bytes=baseline_saved.total,
        baseline_flops=baseline_flops,
        offloaded_bytes=saved.offloaded,
        weight_copy_bytes=saved.weight_copies,
        opaque=saved.opaque,
        unseen=saved.unseen,
    )


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage of a pipeline."""

    stage: int
    micro_batch: PlanCost
    """Of one micro-batch, forward and backward, of this stage's layers."""
    in_flight: int
    """Micro-batches whose activations the stage holds at the peak."""
    parameters: int
    """How many the stage has; a weight that stages share counts in each."""

    @property
    def saved_bytes(self) -> int:
        """At the peak."""
        return self.in_flight * self.micro_batch.saved_bytes


def stage_costs(
    model: nn.Module, layers: LayerList, plan: Plan, batch: Batch, micro_batches: int
) -> tuple[StageCost, ...]:
    """What each stage of a pipeline saves and computes, measured as :func:`plan_cost` does it.

    Each stage runs its layers on what the stage before returned, as it would receive it: without that stage's graph,
    and needing a gradient. What it receives counts as saved where the graph or a region keeps it.

    Args:
        model: whole, as for :func:`plan_cost`.
        layers: of the model; see :func:`~dist_ckpt.stages.layers_of`.
        plan: with stages.
        batch: a micro-batch.
        micro_batches: per update, of one pipeline.

    Raises:
        PlanError: as :func:`plan_cost`, or a plan without stages.
        EngineError: its stages are not made of these layers.
    """
    if not plan.stages:
        raise PlanError("stage_costs takes a plan with stages: make_plan(…, stages=…) or plan.cut(stages)")
    by_stage = layers_by_stage(layers, plan.stages)
    with_plan = _measure_stages(model, layers, by_stage, plan, batch)
    without = _measure_stages(model, layers, by_stage, Plan(), batch) if plan.regions else with_plan
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    return tuple(
        StageCost(
            stage=stage,
            micro_batch=_plan_cost(*both),
            in_flight=in_flight(len(by_stage), stage, micro_batches),
            parameters=sum(p.numel() for p in {p for name in plan.stages[stage] for p in modules[name].parameters()}),
        )
        for stage, both in enumerate(zip(with_plan, without, strict=True))
    )


def stage_table(costs: Sequence[StageCost]) -> str:
    """A line a stage, for a terminal."""
    unit = byte_unit([cost.saved_bytes for cost in costs])
    head = ("stage", "parameters", "saved a micro-batch", "without a policy", "in flight", "saved", "recomputed")
    rows = [
        (
            str(cost.stage),
            f"{cost.parameters:,}",
            format_bytes(cost.micro_batch.saved_bytes, unit),
            format_bytes(cost.micro_batch.baseline_saved_bytes, unit),
            f"× {cost.in_flight}",
            format_bytes(cost.saved_bytes, unit),
            f"+{cost.micro_batch.recomputed_flops / max(cost.micro_batch.baseline_flops, 1):.1%}",
        )
        for cost in costs
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join((f"activations per stage, {unit}, and recomputed FLOPs", *(f"  {line}" for line in lines)))


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Calls the model and takes its scalar output, the output's ``loss``, or else the sum of what it returns."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, Tensor):
        output = model(batch)
    else:
        output = model(*batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = found if isinstance(found, Tensor) else output
    if not isinstance(loss, Tensor):
        raise PlanError(
            f"the model returns a {type(output).__name__}: pass loss_fn(model, batch) → scalar loss, or put labels "
            "into the batch"
        )
    return loss if loss.dim() == 0 else loss.sum()


def _measure(model: nn.Module, plan: Plan, batch: ModelInput, loss_fn: LossFn) -> _Measured:
    saved: list[SavedBytes] = []
    with fake_training(model, plan, batch) as (fake, fake_batch):

        def step() -> None:
            loss = loss_fn(fake, fake_batch)
            saved.append(saved_bytes([loss], [*fake.parameters(), *fake.buffers()]))
            loss.backward()

        flops = count_flops(step)
    return saved[0], flops


def _measure_stages(
    model: nn.Module, layers: LayerList, by_stage: Sequence[Sequence[Layer]], plan: Plan, batch: Batch
) -> list[_Measured]:
    measured: list[_Measured] = []
    with fake_training(model, plan, batch) as (fake, fake_batch):
        resident = [*fake.parameters(), *fake.buffers()]
        passed: list[Tensor] = [fake_batch["input_ids"]]
        saved: list[SavedBytes] = []

        def step(stage: int) -> None:
            # As DeepSpeed runs a stage: on a clone of the receive buffer (pipe/engine.py, _exec_forward_pass).
            x = passed[-1].detach().requires_grad_(passed[-1].is_floating_point()).clone()
            for layer in by_stage[stage]:
                x = layer.run(fake, x)
            is_last = stage + 1 == len(by_stage)
            out = layers.loss(fake, x, fake_batch["labels"]) if is_last else x.contiguous()
            saved.append(saved_bytes([out], resident))
            passed.append(out)
            out.backward(torch.ones_like(out))

        for stage in range(len(by_stage)):
            flops = count_flops(lambda number=stage: step(number))  # type: ignore[misc]
            measured.append((saved[-1], flops))
    return measured


@contextmanager
def fake_training(model: nn.Module, plan: Plan, batch: ModelInput) -> Iterator[tuple[nn.Module, Any]]:
    """A copy of the model in training mode with the plan applied, and the batch, all on tensors without memory.

    Raises:
        PlanError: the plan does not fit, the model is sharded, or what runs inside depends on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _device_of(model)
    fake = _copy_with(model, lambda tensor: _fake(tensor, mode, device))
    remove_plan(fake)
    apply_plan(fake, plan)
    fake.train()
    # Dropout draws nothing on fake tensors, but restoring the states that checkpoints stash would move the real RNG.
    with torch.random.fork_rng(devices=[]), mode:
        try:
            yield fake, _fake_batch(batch, mode, device)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise PlanError(
                f"the step cannot run on tensors without values: its forward depends on them ({error})"
            ) from error


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device, for :func:`fake_training` once the model itself is sharded.

    Raises:
        PlanError: it is sharded already.
    """
    return _copy_with(
        model, lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    )


def _device_of(model: nn.Module) -> torch.device:
    """Where to pretend to run: the model's device, or the CPU for meta (fake CUDA aborts where there is no GPU)."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def _fake(leaf: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    with mode:
        fake = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
    return fake.requires_grad_(leaf.requires_grad)


def _fake_batch(batch: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """The batch on fake tensors that share storages as the real ones do: labels are often a view of the inputs."""
    bases: dict[tuple[int, torch.dtype], Tensor] = {}

    def fake(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.requires_grad:
            return _fake(leaf, mode, device)
        storage = leaf.untyped_storage()
        key = (storage._cdata, leaf.dtype)
        if key not in bases:
            with mode:
                bases[key] = torch.empty(storage.nbytes() // leaf.element_size(), dtype=leaf.dtype, device=device)
        return bases[key].as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())

    return tree_map(fake, batch)


def _copy_with(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy in which every tensor is replaced by one without memory."""
    if is_pipeline_module(model):
        refuse_a_step(model)
    if not is_plain(model):
        raise PlanError("to run on tensors without memory, the model must be as it is before sharding and compiling")
    replaced: dict[int, Any] = {}
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and id(tensor) not in replaced:
                other = replace(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
    return copy.deepcopy(model, replaced)
