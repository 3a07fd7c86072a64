"""What no key can tell alone: pairs that contradict each other, the run, or the machine.

Each rule yields problems as ``dotted.key=value: what is wrong and what to do``. Keys that are missing, or of a wrong
type, are none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dist_ckpt.deepspeed_config.activations import recompute_is_asked_once
from dist_ckpt.deepspeed_config.run import AGREEMENTS, RunSettings
from dist_ckpt.deepspeed_config.walk import at, shown

Rule = Callable[[Mapping[str, Any], RunSettings], Iterator[str]]

_ZERO = "zero_optimization"


def _stage_fits_pipeline(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    stage = at(data, f"{_ZERO}.stage")
    if run.stages > 1 and stage in (2, 3):
        yield (
            f"{_ZERO}.stage={stage}: a pipeline accumulates whole gradients over the micro-batches in flight, so "
            "DeepSpeed takes ZeRO stages 0 and 1 with it; write 0 or 1, or take engine=deepspeed"
        )


def _run_agrees(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    for agreement in AGREEMENTS:
        value, wanted = at(data, agreement.key), agreement.value(run)
        if value not in (None, "auto", wanted):
            yield (
                f'{shown(agreement.key, value)} and {agreement.option(wanted)} disagree; write "auto" in the file, '
                f"or set {agreement.option(value)}"
            )


def _batch_multiplies(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    def given(key: str, otherwise: int) -> int:
        value = data.get(key)
        return value if type(value) is int else otherwise

    micro = given("train_micro_batch_size_per_gpu", run.micro_batch)
    accum = given("gradient_accumulation_steps", run.grad_accum)
    product = micro * accum * run.data_ranks
    total = given("train_batch_size", product)
    if total != product:
        ranks = f"{run.world_size} ranks / {run.stages} stages = " * (run.stages > 1)
        yield (
            f"train_batch_size={total}: is micro-batch × accumulation × data-parallel ranks, here {micro} × {accum} × "
            f'{ranks}{run.data_ranks} = {product}; write "auto", or change train.micro_batch, train.grad_accum or the '
            "number of ranks"
        )


def _hpz_divides_ranks(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    size = at(data, f"{_ZERO}.zero_hpz_partition_size")
    if size is None or size == 1:
        return
    if run.world_size % size:
        sizes = [n for n in range(1, min(run.world_size, 4096) + 1) if run.world_size % n == 0]
        yield (
            f"{_ZERO}.zero_hpz_partition_size={size}: the ranks that share a copy of the weights must divide the "
            f"{run.world_size} of the run; valid: {', '.join(map(str, sizes))}"
        )
    if at(data, f"{_ZERO}.offload_param"):
        yield (
            f"{_ZERO}.zero_hpz_partition_size={size}: keeps a second copy of the weights on the device, which "
            "offload_param is there to avoid; remove one of the two"
        )


def _offload_overrules(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    """stage_1_and_2.py: contiguous gradients are forced, and unused parameters looked for, under offload alone."""
    stage, offloads = at(data, f"{_ZERO}.stage"), at(data, f"{_ZERO}.offload_optimizer")
    if stage not in (1, 2):
        return
    if offloads and at(data, f"{_ZERO}.contiguous_gradients") is False:
        yield f"{_ZERO}.contiguous_gradients=false: offload_optimizer needs them, so DeepSpeed ignores it; remove it"
    if not offloads and at(data, f"{_ZERO}.ignore_unused_parameters") is False:
        yield (
            f"{_ZERO}.ignore_unused_parameters=false: DeepSpeed looks for unused parameters under offload alone; "
            "remove it, train.check_gradients=true finds parameters whose gradient a policy has lost"
        )


def _overlap_fits_pipeline(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    if run.stages > 1 and at(data, f"{_ZERO}.overlap_comm") is True:
        yield f"{_ZERO}.overlap_comm=true: DeepSpeed switches it off in a pipeline; remove it"


def _timers_fit_pipeline(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    """PipelineEngine._exec_backward_pass and DeepSpeedEngine._backward_prologue both start them in 0.19.8."""
    if run.stages > 1 and data.get("wall_clock_breakdown") is True:
        yield (
            "wall_clock_breakdown=true: DeepSpeed's pipeline starts its timers of a backward twice, and stops there; "
            "remove it"
        )


def _dtypes_fit_precision(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    where = f"under train.precision={run.precision}"
    param = at(data, "data_types.param_dtype")
    if param not in (None, run.precision):
        yield f'data_types.param_dtype="{param}": {where} weights are {run.precision}; remove it'
    for key, what in (
        ("data_types.grad_accum_dtype", "gradients are accumulated"),
        ("communication_data_type", "gradients are reduced"),
    ):
        dtype = at(data, key)
        if dtype not in (None, "fp32", run.precision):
            yield f'{key}="{dtype}": {where} {what} in {" or ".join({"fp32": None, run.precision: None})}'
    stage = at(data, f"{_ZERO}.stage") or 0
    if at(data, "data_types.grad_accum_dtype") == "fp32" and run.precision == "bf16" and stage == 0:
        yield (
            'data_types.grad_accum_dtype="fp32": DeepSpeed has no fp32 accumulation for bf16 at ZeRO stage 0; take '
            "stage 1, 2 or 3, or remove it"
        )


def _pipeline_exists(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    interval = at(data, "pipeline.activation_checkpoint_interval")
    if run.stages == 1 and interval:
        yield (
            f"pipeline.activation_checkpoint_interval={interval}: the run has no pipeline, so DeepSpeed ignores it; "
            "take engine=deepspeed_pipe engine.stages=2, or +ckpt=segments"
        )


def _host_is_device(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    offloads = [name for name in ("offload_optimizer", "offload_param") if at(data, f"{_ZERO}.{name}")]
    if run.device == "cpu" and offloads:
        yield f"{_ZERO}: {' and '.join(offloads)}: the ranks compute on the CPU, so nothing is freed"


def _nothing_overlaps(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    """stage_1_and_2.py: two buckets instead of one; the CPU has no streams (resolves_data_dependency)."""
    if run.device == "cpu" and at(data, f"{_ZERO}.overlap_comm") is True and at(data, f"{_ZERO}.stage") in (1, 2):
        yield f"{_ZERO}.overlap_comm=true: on the CPU nothing overlaps, and there are two buckets instead of one"


REMARKS: tuple[Rule, ...] = (_host_is_device, _nothing_overlaps)
"""What is no mistake, and yet not what one would expect."""

RULES: tuple[Rule, ...] = (
    _stage_fits_pipeline,
    _run_agrees,
    _batch_multiplies,
    _hpz_divides_ranks,
    _offload_overrules,
    _overlap_fits_pipeline,
    _timers_fit_pipeline,
    _dtypes_fit_precision,
    _pipeline_exists,
    recompute_is_asked_once,
)
