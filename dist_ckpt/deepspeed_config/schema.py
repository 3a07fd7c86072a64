"""Every key that DeepSpeed 0.19.8 knows outside ``zero_optimization``, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping

from dist_ckpt.deepspeed_config.keys import (
    ANYTHING,
    BOOL,
    TEXT,
    TEXTS,
    Auto,
    Key,
    Kind,
    number,
    one_of,
    pair,
    whole,
)
from dist_ckpt.deepspeed_config.zero_keys import ZERO

_SCHEDULE = (
    "the schedule is the run's own: train.lr, train.warmup_steps and train.min_lr_ratio (linear warm-up, then a "
    "cosine); remove the section"
)
_FP16 = (
    "fp16 needs loss scaling, which would skip updates; use bf16 (train.precision=bf16), which has the range of fp32"
)
_SMALL_MASTER = "needs DeepSpeed's own CPU Adam, and the optimizer here is torch's AdamW with fp32 states; remove it"
_LOGGED = "what a run reports is in its run folder (metrics.jsonl, memory.jsonl); remove the section"
_STATES = "training states are written by the run itself: train.save_every, train.resume, launch/export.py; remove it"
_MESHES = "tensor, sequence and expert parallelism are not supported; remove it"
_REMOVED = "DeepSpeed has removed it; remove it here too"
_TENSOR_PARALLEL = "splits what stages send over tensor-parallel ranks, which are not supported here; remove it"
_IN_CODE = "is an argument of deepspeed.pipe.PipelineModule, which DeepSpeed ignores in the file; "


def _off(reason: str, *names: str) -> Key:
    """A section of these keys that is refused unless ``enabled`` is false."""
    return Key(inner={name: Key(ANYTHING) for name in ("enabled", *names)}, refused=reason)


def _default(kind: Kind, value: float | str | bool, reason: str) -> Key:
    """Refused but for the one value that changes nothing."""
    return Key(kind, refused=reason, fine=(value,))


OPTIMIZER = {
    "type": Key(
        TEXT,
        refused='the optimizer is torch\'s AdamW, fused, under every engine; write "AdamW", or remove the section',
        fine=("AdamW", "Adam"),  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
        required='DeepSpeed would ignore the section; write "AdamW", or remove the section',
    ),
    "params": Key(
        fine=(),
        inner={
            "lr": Key(number(0), auto=Auto.run),
            "betas": Key(pair(number(0, below=1)), auto=Auto.run),
            "eps": Key(number(0), auto=Auto.run),
            "weight_decay": Key(number(0), auto=Auto.run),
            "adam_w_mode": _default(BOOL, True, "weight decay is decoupled here (AdamW); write true, or remove it"),
            "bias_correction": _default(BOOL, True, "AdamW corrects the bias of its means; remove it"),
            "torch_adam": _default(BOOL, True, "the optimizer is torch's AdamW in any case; write true, or remove it"),
            "fp32_optimizer_states": _default(BOOL, True, "optimizer states are fp32; write true, or remove it"),
            "amsgrad": Key(BOOL, refused="AMSGrad is not offered; remove it"),
            "fused": _default(BOOL, True, "the optimizer is fused where torch can; remove it"),
            "foreach": Key(BOOL, refused="the fused optimizer needs no such copies; remove it"),
            "set_grad_none": _default(BOOL, True, "gradients are freed after each update; remove it"),
            "max_grad_norm": Key(renamed="gradient_clipping"),
        },
    ),
    "legacy_fusion": Key(BOOL, refused="is an option of DeepSpeed's fp16 optimizer; remove it"),
}

FP16 = {
    "enabled": Key(BOOL, auto=Auto.off),
    "auto_cast": Key(BOOL),
    "loss_scale": Key(number(0)),
    "initial_scale_power": Key(whole()),
    "loss_scale_window": Key(whole(1)),
    "hysteresis": Key(whole()),
    "consecutive_hysteresis": Key(BOOL),
    "min_loss_scale": Key(number(0)),
    "fp16_master_weights_and_grads": Key(BOOL),
}

BF16 = {
    "enabled": Key(BOOL, auto=Auto.run),
    "check_grad_overflow": _default(
        BOOL, True, "a gradient that is not finite would reach the weights before the run stops; remove it"
    ),
    "immediate_grad_update": Key(BOOL, refused="no test has proven it right; remove it"),
    "bf16_master_weights_and_grads": Key(BOOL, refused=_SMALL_MASTER),
    "bf16_optimizer_states": Key(BOOL, refused=_SMALL_MASTER),
}

_DTYPE = one_of(None, "fp32", "bf16", "fp16")

DATA_TYPES = {
    "grad_accum_dtype": Key(_DTYPE),
    "param_dtype": Key(_DTYPE),
    "buffer_dtype": Key(_DTYPE, refused="buffers stay as the model has them (rotary tables, counters); remove it"),
    "keep_in_fp32_modules": Key(
        TEXTS, auto=Auto.default, refused='buffers stay as the model has them; write "auto", or remove it', fine=()
    ),
}

PIPELINE = {
    "stages": Key(whole(1), auto=Auto.run),
    "activation_checkpoint_interval": Key(whole()),
    "use_reentrant": Key(BOOL, refused="checkpointing is non-reentrant here: write false, or remove it"),
    "partition": Key(
        TEXT,
        auto=Auto.default,
        refused="DeepSpeed ignores it; engine.partition=uniform|parameters|type:CLASS|[6,6,7,5] cuts the model",
    ),
    "seed_layers": Key(BOOL, refused="weights follow from train.seed, the same for any number of stages; remove it"),
    "pipe_partitioned": Key(BOOL, refused=_TENSOR_PARALLEL),
    "grad_partitioned": Key(BOOL, refused=_TENSOR_PARALLEL),
    "checkpointable_layers": Key(ANYTHING, refused=_IN_CODE + "ckpt.blocks names what is recomputed"),
    "activation_checkpoint_func": Key(ANYTHING, refused=_IN_CODE + "+ckpt=MODE says how blocks are recomputed"),
    "partition_method": Key(ANYTHING, refused=_IN_CODE + "use engine.partition"),
    "num_stages": Key(ANYTHING, refused=_IN_CODE + "use engine.stages"),
}

ACTIVATION_CHECKPOINTING = {
    "number_checkpoints": Key(whole(1), fine=(None,)),
    "cpu_checkpointing": Key(BOOL),
    "partition_activations": Key(
        BOOL,
        refused="splits what is kept over tensor-parallel ranks, which are not supported here; cpu_checkpointing or "
        "number_checkpoints keep less on each rank",
    ),
    "contiguous_memory_optimization": Key(
        BOOL,
        refused="copies what is kept into buffers of a fixed size, which in DeepSpeed works with its reentrant "
        "function alone; remove it, +ckpt=nested keeps less",
    ),
    "synchronize_checkpoint_boundary": Key(
        BOOL, refused="only waits for the device at each region and saves nothing; remove it"
    ),
    "profile": Key(BOOL, refused="times DeepSpeed's own checkpoint function, which is not used; remove it"),
}

_BATCH = {
    "train_batch_size": Key(whole(1), auto=Auto.run),
    "train_micro_batch_size_per_gpu": Key(whole(1), auto=Auto.run),
    "gradient_accumulation_steps": Key(whole(1), auto=Auto.run),
    "gradient_clipping": Key(number(0), auto=Auto.run),
    "managed_gradient_accumulation": _default(
        BOOL, True, "an update ends where DeepSpeed counts its last micro-batch; remove it"
    ),
    "prescale_gradients": Key(BOOL, refused="keeps fp16 from overflowing; bf16 and fp32 need no such thing; remove it"),
    "gradient_predivide_factor": _default(
        number(0), 1, "keeps fp16 from overflowing; bf16 and fp32 need no such thing; remove it"
    ),
    "gradient_allreduce_op": _default(
        TEXT, "mean", 'gradients are weighted by tokens, which counts on the mean; write "mean", or remove it'
    ),
}

_PRECISION = {
    "bf16": Key(inner=BF16, fine=()),
    "fp16": Key(inner=FP16, refused=_FP16),
    "torch_autocast": _off(
        "bf16 weights with fp32 master weights are what train.precision=bf16 gives; remove the section",
        "dtype",
        "lower_precision_safe_modules",
    ),
    "data_types": Key(inner=DATA_TYPES),
    "communication_data_type": Key(_DTYPE),
}

_LOGGING = {
    "steps_per_print": Key(whole(1), fine=(None,)),
    "wall_clock_breakdown": Key(BOOL),
    "memory_breakdown": Key(BOOL),
    "dump_state": Key(BOOL),
    "log_level": Key(one_of("debug", "info", "warning", "error", "critical")),
    "timers": Key(inner={"throughput": Key(inner={"enabled": Key(BOOL), "synchronized": Key(BOOL)}, fine=())}, fine=()),
    "comms_logger": _off(_LOGGED, "verbose", "prof_all", "prof_ops", "debug"),
    "tensorboard": _off(_LOGGED, "output_path", "job_name"),
    "csv_monitor": _off(_LOGGED, "output_path", "job_name"),
    "wandb": _off(_LOGGED, "group", "team", "project"),
    "comet": _off(
        _LOGGED,
        "samples_log_interval",
        "project",
        "workspace",
        "api_key",
        "experiment_name",
        "experiment_key",
        "online",
        "mode",
    ),
    "flops_profiler": _off(
        "takes a guess for what is recomputed; dry_run=true says it to the FLOP; remove the section",
        "recompute_fwd_factor",
        "profile_step",
        "module_depth",
        "top_modules",
        "detailed",
        "output_file",
    ),
}

_ELSEWHERE = {
    "scheduler": Key(ANYTHING, refused=_SCHEDULE),
    "checkpoint": Key(ANYTHING, refused=_STATES),
    "datastates_ckpt": Key(ANYTHING, refused=_STATES),
    "aio": Key(ANYTHING, refused="is for offloading to NVMe, which is not supported here; remove the section"),
    "dataloader_drop_last": Key(
        BOOL, refused="is about DeepSpeed's data loader; the run's own gives whole batches; remove it"
    ),
    "data_efficiency": _off(
        "which tokens are trained on is up to data=…; remove the section", "seed", "data_sampling", "data_routing"
    ),
    "curriculum_learning": Key(ANYTHING, refused=f"{_REMOVED}; which tokens are trained on is up to data=…"),
    "autotuning": Key(
        ANYTHING,
        refused="starts runs of its own; dry_run=true says what a policy costs without any; remove the section",
    ),
    "compile": Key(
        ANYTHING, refused="rewrites graphs and what they keep; train.compile=true compiles block by block; remove it"
    ),
    "hybrid_engine": _off(
        "generates text between updates (RLHF), which is not supported; remove the section",
        "max_out_tokens",
        "inference_tp_size",
        "release_inference_cache",
        "pin_parameters",
        "tp_gather_partition_size",
        "enable_cuda_graph",
    ),
    "weight_quantization": Key(ANYTHING, refused="quantizes weights for inference; remove the section"),
    "tensor_parallel": Key(ANYTHING, refused=_MESHES),
    "expert_parallel": Key(ANYTHING, refused=_MESHES),
    "use_data_before_expert_parallelism": Key(BOOL, refused=_MESHES),
    "sequence_parallel_size": _default(whole(1), 1, _MESHES),
    "seq_parallel_communication_data_type": Key(ANYTHING, refused=_MESHES),
    "data_parallel_size": Key(ANYTHING, refused="follows from the number of ranks; remove it"),
    "zero_allow_untested_optimizer": Key(BOOL, moot="the optimizer is torch's AdamW, which DeepSpeed has tested"),
    "zero_force_ds_cpu_optimizer": Key(
        BOOL, refused="the optimizer is torch's AdamW, offloaded or not; write false, or remove it"
    ),
    "disable_allgather": Key(BOOL, refused="DeepSpeed ignores it; remove it"),
    "disable_python_gc": Key(
        BOOL, refused="would keep tensors in reference cycles alive, in the whole process; remove it"
    ),
    "vocabulary_size": Key(ANYTHING, refused="only warns about odd sizes; model.vocab_size is the model's; remove it"),
    "elasticity": Key(ANYTHING, refused=f"{_REMOVED}; train.resume=auto continues on another number of ranks"),
    "amp": Key(ANYTHING, refused=f"{_REMOVED}; train.precision=bf16 is mixed precision here"),
    "compression_training": Key(ANYTHING, refused=_REMOVED),
    "quantize_training": Key(ANYTHING, refused=_REMOVED),
    "eigenvalue": Key(ANYTHING, refused=_REMOVED),
    "sparse_attention": Key(ANYTHING, refused=f"{_REMOVED}; model.attention chooses attention here"),
    "sparse_gradients": Key(ANYTHING, refused=_REMOVED),
    "progressive_layer_drop": Key(ANYTHING, refused=_REMOVED),
    "graph_harvesting": Key(ANYTHING, refused=_REMOVED),
    "nebula": Key(ANYTHING, refused=f"{_REMOVED}; {_STATES}"),
    "bfloat16": Key(renamed="bf16"),
    "allgather_size": Key(renamed="zero_optimization.allgather_bucket_size"),
}

SCHEMA: Mapping[str, Key] = {
    **_BATCH,
    **_PRECISION,
    "zero_optimization": Key(inner=ZERO, fine=()),
    "optimizer": Key(inner=OPTIMIZER),
    "activation_checkpointing": Key(
        inner=ACTIVATION_CHECKPOINTING,
        fine=(),
        empty='write number_checkpoints or "cpu_checkpointing": true, or remove it and take a policy: +ckpt=selective',
    ),
    "pipeline": Key(inner=PIPELINE),
    **_LOGGING,
    **_ELSEWHERE,
}
"""The whole file."""
