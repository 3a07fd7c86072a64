"""Every key of ``zero_optimization``: deepspeed/runtime/zero/config.py and offload_config.py, and the stages at which
engine.py, stage_1_and_2.py and stage3.py of DeepSpeed 0.19.8 read it."""

from __future__ import annotations

from dist_ckpt.deepspeed_config.keys import ANYTHING, BOOL, TEXTS, Auto, Key, elements, number, one_of, whole

_NVME = 'nvme needs DeepSpeed\'s asynchronous I/O library, which is compiled and not tested here; use "cpu", or "none"'
_ON_NVME = 'acts on "device": "nvme" alone, which is not supported here; remove it'
_ROUNDED = (
    "ZeRO++ sends weights or gradients as rounded integers, so that a run differs from the one without it (and on CPU "
    "DeepSpeed cannot do it); remove it, zero_hpz_partition_size saves traffic without rounding"
)
_OWN_FILES = (
    "is about checkpoint files of DeepSpeed's own; training states here resume under any stage and number of "
    "ranks; remove it"
)
_NO_DEVICE = 'DeepSpeed would take "none"; write "cpu", or remove the section'
_LEAF = "no test has proven a policy inside ZeRO-3 leaf modules right; remove it"
_CPU_ADAM = "needs DeepSpeed's own CPU Adam, and the optimizer here is torch's AdamW; remove it"

OFFLOAD_OPTIMIZER = {
    "device": Key(one_of("none", "cpu", "nvme"), refused=_NVME, fine=("none", "cpu"), required=_NO_DEVICE),
    "pin_memory": Key(BOOL),
    "ratio": Key(
        number(0, below=1.001),
        refused="leaves a part to a second optimizer of DeepSpeed's own; 1.0 offloads all of it",
        fine=(1,),
    ),
    "super_offload": Key(BOOL, refused=_CPU_ADAM),
    "cpuadam_cores_perc": Key(
        ANYTHING, refused="acts with super_offload alone, which is not supported here; remove it"
    ),
    "nvme_path": Key(ANYTHING, refused=_ON_NVME),
    "buffer_count": Key(ANYTHING, refused=_ON_NVME),
    "pipeline_read": Key(BOOL, refused=_ON_NVME),
    "pipeline_write": Key(BOOL, refused=_ON_NVME),
    "fast_init": Key(BOOL, refused=_ON_NVME),
}

OFFLOAD_PARAM = {
    "device": Key(one_of("none", "cpu", "nvme"), refused=_NVME, fine=("none", "cpu"), required=_NO_DEVICE),
    "pin_memory": Key(BOOL),
    "nvme_path": Key(ANYTHING, refused=_ON_NVME),
    "buffer_count": Key(ANYTHING, refused=_ON_NVME),
    "buffer_size": Key(ANYTHING, refused=_ON_NVME),
    "max_in_cpu": Key(ANYTHING, refused=_ON_NVME),
}

_ONLY_3 = {
    "stage3_prefetch_bucket_size": Key(elements(), auto=Auto.run, stages=(3,)),
    "stage3_param_persistence_threshold": Key(elements(), auto=Auto.run, stages=(3,)),
    "stage3_model_persistence_threshold": Key(elements(), auto=Auto.default, stages=(3,)),
    "stage3_max_live_parameters": Key(elements(), auto=Auto.default, stages=(3,)),
    "stage3_max_reuse_distance": Key(elements(), auto=Auto.default, stages=(3,)),
    "stage3_gather_16bit_weights_on_model_save": Key(
        BOOL, stages=(3,), moot="training states hold whole weights; launch/export.py writes them"
    ),
    "stage3_module_granularity_threshold": Key(elements(), stages=(3,), refused=_LEAF, fine=(0,)),
    "stage3_use_all_reduce_for_fetch_params": Key(BOOL, stages=(3,)),
    "stage3_allgather_sequential": Key(BOOL, stages=(3,)),
}

_UNPREFIXED = {name.removeprefix("stage3_"): Key(renamed=f"zero_optimization.{name}") for name in _ONLY_3}
"""DeepSpeed takes both spellings; one is enough to read."""

ZERO = {
    "stage": Key(whole(0, 3), required="DeepSpeed would take 0, which ignores the rest; write 0, 1, 2 or 3"),
    # stages 1, 2 and 3
    "contiguous_gradients": Key(BOOL, stages=(1, 2, 3)),
    "reduce_scatter": Key(BOOL, stages=(1, 2, 3)),
    "reduce_bucket_size": Key(elements(1), auto=Auto.run, stages=(1, 2, 3)),
    "overlap_comm": Key(BOOL, auto=Auto.default, stages=(1, 2, 3)),
    "offload_optimizer": Key(inner=OFFLOAD_OPTIMIZER, stages=(1, 2, 3)),
    # stages 1 and 2
    "allgather_partitions": Key(
        BOOL,
        stages=(1, 2),
        refused="DeepSpeed gathers updated parameters with all-gather, whatever this says; remove it",
        fine=(True,),
    ),
    "allgather_bucket_size": Key(elements(2, multiple=2), auto=Auto.default, stages=(1, 2)),
    "use_multi_rank_bucket_allreduce": Key(BOOL, stages=(1, 2)),
    "round_robin_gradients": Key(
        BOOL,
        stages=(1, 2),
        refused="DeepSpeed then takes one parameter's optimizer states for another's when asked for them by name, "
        "as training states do; write false, or remove it",
    ),
    "parameter_alignment": Key(BOOL, stages=(1, 2)),
    "ignore_unused_parameters": Key(BOOL, stages=(1, 2), fine=(True,)),
    "compute_grad_norm": Key(
        BOOL, refused="every update reports the gradient norm and stops where it is not finite; remove it", fine=(True,)
    ),
    # stage 3
    **_ONLY_3,
    "offload_param": Key(inner=OFFLOAD_PARAM, stages=(3,)),
    "sub_group_size": Key(elements(1), auto=Auto.default, stages=(3,)),
    "zero_hpz_partition_size": Key(whole(1), stages=(3,), fine=(1,)),
    "memory_efficient_linear": Key(BOOL, stages=(3,)),
    "log_trace_cache_warnings": Key(BOOL, stages=(3,)),
    "enable_sanity_checks": Key(BOOL, stages=(3,)),
    "leaf_module": Key(
        inner={"classes": Key(TEXTS), "names": Key(TEXTS), "name_suffixes": Key(TEXTS)}, stages=(3,), refused=_LEAF
    ),
    "override_module_apply": Key(
        BOOL, refused="acts in deepspeed.zero.Init alone, under which no model is built here; remove it", fine=(True,)
    ),
    # refused at any stage
    "zero_quantized_weights": Key(BOOL, refused=_ROUNDED),
    "zero_quantized_nontrainable_weights": Key(BOOL, refused=_ROUNDED),
    "zero_quantized_gradients": Key(BOOL, refused=_ROUNDED),
    "zenflow": Key(ANYTHING, refused="delays a part of each update, with an optimizer of DeepSpeed's own; remove it"),
    "save_muon_momentum_buffer_in_memory": Key(BOOL, refused="is an option of the optimizer Muon; remove it"),
    "load_from_fp32_weights": Key(BOOL, refused=_OWN_FILES, fine=(True,)),
    "pipeline_loading_checkpoint": Key(BOOL, refused=_OWN_FILES),
    "elastic_checkpoint": Key(BOOL, refused=_OWN_FILES),
    "legacy_stage1": Key(BOOL, refused='DeepSpeed has removed it; "stage": 1 is what there is'),
    "mics_shard_size": Key(ANYTHING, refused="DeepSpeed has removed MiCS; zero_hpz_partition_size is the nearest"),
    "mics_hierarchical_params_gather": Key(ANYTHING, refused="DeepSpeed has removed MiCS; remove it"),
    "zeropp_loco_param": Key(ANYTHING, refused="DeepSpeed has removed LoCo; remove it"),
    # deprecated
    "cpu_offload": Key(renamed='zero_optimization.offload_optimizer: {"device": "cpu"}'),
    "cpu_offload_param": Key(renamed='zero_optimization.offload_param: {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": Key(renamed="pin_memory in zero_optimization.offload_optimizer or offload_param"),
    "stage3_gather_fp16_weights_on_model_save": Key(
        renamed="zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **_UNPREFIXED,
}
