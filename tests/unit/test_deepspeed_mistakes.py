"""A key of a DeepSpeed configuration that is not taken is refused: what is wrong, where, what would be valid."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dist_ckpt.deepspeed_config import RunSettings, resolve
from dist_ckpt.errors import ConfigError
from tests.unit.deepspeed_runs import BF16, PIPE, RUN, optimizer, zero

# A configuration, what its message has to say, and the run if it is not RUN.
MISTAKES: list[tuple[dict[str, Any], tuple[str, ...]] | tuple[dict[str, Any], tuple[str, ...], RunSettings]] = [
    # unknown keys, at every level
    ({"zero_optimisation": {"stage": 2}}, ("zero_optimisation: no such key", "did you mean 'zero_optimization'?")),
    ({"train_batchsize": 16}, ("did you mean 'train_batch_size'?", "Valid: activation_checkpointing, bf16")),
    ({"stage": 2}, ("stage: no such key", "belongs in zero_optimization")),
    ({"lr": 1e-3}, ("lr: no such key", "belongs in optimizer.params")),
    ({"cpu_checkpointing": True}, ("belongs in activation_checkpointing",)),
    (zero(2, overlap_com=True), ("zero_optimization.overlap_com", "did you mean 'overlap_comm'?")),
    (zero(1, gradient_clipping=1.0), ("zero_optimization.gradient_clipping", "belongs in the object around all")),
    (
        zero(2, offload_optimizer={"device": "cpu", "pin_memry": True}),
        ("zero_optimization.offload_optimizer.pin_memry", "did you mean 'pin_memory'?"),
    ),
    (
        zero(3, offload_param={"device": "cpu", "max_cpu": 1}),
        ("zero_optimization.offload_param.max_cpu: no such key", "Valid: device, pin_memory"),
    ),
    ({"bf16": {"enable": True}}, ("bf16.enable: no such key", "did you mean 'enabled'?"), BF16),
    ({"fp16": {"enabled": False, "loss_scal": 0}}, ("fp16.loss_scal: no such key", "did you mean 'loss_scale'?")),
    ({"pipeline": {"stage": 4}}, ("pipeline.stage: no such key", "did you mean 'stages'?"), PIPE),
    ({"pipeline": {"interval": 2}}, ("pipeline.interval: no such key", "Valid: activation_checkpoint"), PIPE),
    (
        {"activation_checkpointing": {"partitioned_activations": True, "number_checkpoints": 2}},
        ("activation_checkpointing.partitioned_activations: no such key", "Valid: cpu_checkpointing, number_ch"),
    ),
    ({"data_types": {"grad_accum_type": "fp32"}}, ("data_types.grad_accum_type", "did you mean 'grad_accum_dtype'?")),
    ({"optimizer": {"type": "AdamW", "parms": {}}}, ("optimizer.parms: no such key", "did you mean 'params'?")),
    (optimizer(beta=[0.9, 0.95]), ("optimizer.params.beta: no such key", "did you mean 'betas'?")),
    ({"timers": {"throughput": {"on": False}}}, ("timers.throughput.on", "Valid: enabled, synchronized")),
    ({"wandb": {"enabled": False, "projct": "x"}}, ("wandb.projct: no such key", "did you mean 'project'?")),
    # wrong types
    (zero("2"), ('zero_optimization.stage="2"', "a whole number from 0 to 3, not a string")),
    (zero(2.0), ("zero_optimization.stage=2.0", "without a point")),
    (zero(True), ("zero_optimization.stage=true", "from 0 to 3")),
    (zero(None), ("zero_optimization.stage=null", "from 0 to 3")),
    (zero(4), ("zero_optimization.stage=4", "from 0 to 3")),
    ({"zero_optimization": True}, ("zero_optimization=true", "must be an object")),
    ({"zero_optimization": {"overlap_comm": True}}, ("zero_optimization.stage: is missing", "write 0, 1, 2 or 3")),
    ({"train_batch_size": "16"}, ('train_batch_size="16"', "not a string")),
    ({"train_micro_batch_size_per_gpu": 4.0}, ("train_micro_batch_size_per_gpu=4.0", "without a point")),
    ({"gradient_accumulation_steps": True}, ("gradient_accumulation_steps=true", "a whole number of at least 1")),
    ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps=0", "at least 1")),
    ({"gradient_clipping": "1.0"}, ('gradient_clipping="1.0"', "a number of at least 0, not a string")),
    ({"gradient_clipping": -1}, ("gradient_clipping=-1", "a number of at least 0")),
    ({"gradient_clipping": math.inf}, ("gradient_clipping=Infinity", "a number of at least 0")),
    ({"gradient_clipping": math.nan}, ("gradient_clipping=NaN", "a number of at least 0")),
    (zero(2, reduce_bucket_size=1.5), ("reduce_bucket_size=1.5", "a whole number of at least 1")),
    (zero(2, reduce_bucket_size=10**400), ("reduce_bucket_size=1000", "a whole number of at least 1")),
    (zero(1, allgather_bucket_size=3), ("allgather_bucket_size=3", "a multiple of 2")),
    (zero(1, contiguous_gradients="true"), ('contiguous_gradients="true"', "must be true or false")),
    (zero(1, contiguous_gradients=1), ("contiguous_gradients=1", "must be true or false")),
    (zero(1, offload_optimizer="cpu"), ('offload_optimizer="cpu"', "must be an object")),
    (zero(1, offload_optimizer={"device": "gpu"}), ('device="gpu"', 'one of "none", "cpu", "nvme"')),
    (zero(1, offload_optimizer={"pin_memory": True}), ("offload_optimizer.device: is missing", 'write "cpu"')),
    (optimizer(lr="2e-5"), ('optimizer.params.lr="2e-5"', "not a string")),
    (optimizer(betas=0.9), ("optimizer.params.betas=0.9", "a list of two")),
    (optimizer(betas=[0.9, 1.0]), ("optimizer.params.betas=[0.9, 1.0]", "below 1")),
    ({"bf16": True}, ("bf16=true", "must be an object"), BF16),
    ({"communication_data_type": "float32"}, ('communication_data_type="float32"', 'one of null, "fp32", "bf16"')),
    ({"log_level": "loud"}, ('log_level="loud"', '"warning"')),
    # "auto" where it means nothing
    (zero("auto"), ('zero_optimization.stage="auto"', "means nothing here", "from 0 to 3")),
    (zero(1, contiguous_gradients="auto"), ('contiguous_gradients="auto"', "means nothing here")),
    ({"steps_per_print": "auto"}, ('steps_per_print="auto"', "means nothing here")),
    ({"optimizer": "auto"}, ('optimizer="auto"', "means nothing here", "an object")),
    ({"activation_checkpointing": {"number_checkpoints": "auto"}}, ("number_checkpoints", "means nothing here")),
    # the run says something else
    ({"train_micro_batch_size_per_gpu": 8}, ("train_micro_batch_size_per_gpu=8 and train.micro_batch=4 disagree",)),
    ({"gradient_accumulation_steps": 4}, ("gradient_accumulation_steps=4 and train.grad_accum=2", '"auto"')),
    ({"train_batch_size": 32}, ("micro-batch × accumulation × data-parallel ranks", "4 × 2 × 2 = 16")),
    ({"train_batch_size": 64}, ("here 4 × 2 × 8 ranks / 4 stages = 2 = 16",), PIPE),
    ({"gradient_clipping": 0.5}, ("gradient_clipping=0.5 and train.clip=1.0 disagree", "train.clip=0.5")),
    ({"gradient_clipping": 0}, ("gradient_clipping=0 and train.clip=1.0", "set train.clip=null")),
    ({"bf16": {"enabled": True}}, ("bf16.enabled=true and train.precision=fp32", "set train.precision=bf16")),
    ({"bf16": {"enabled": False}}, ("bf16.enabled=false and train.precision=bf16",), BF16),
    (optimizer(lr=1e-3), ("optimizer.params.lr=0.001 and train.lr=0.003", "set train.lr=0.001")),
    (optimizer(betas=[0.9, 0.999]), ("train.beta1=0.9 train.beta2=0.95", "set train.beta1=0.9 train.beta2=0.999")),
    (optimizer(eps=1e-6), ("optimizer.params.eps=1e-06 and train.optimizer_eps=1e-08",)),
    (optimizer(weight_decay=0), ("optimizer.params.weight_decay=0 and train.weight_decay=0.1",)),
    ({"pipeline": {"stages": 2}}, ("pipeline.stages=2 and engine.stages=4",), PIPE),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, ("train.warmup_steps", "train.min_lr_ratio", "remove")),
    # options that do nothing at the stage
    (zero(0, offload_optimizer={"device": "cpu"}), ("belongs to ZeRO stages 1, 2 and 3", "at stage 0")),
    (zero(0, overlap_comm=True), ("zero_optimization.overlap_comm=true", "at stage 0 DeepSpeed ignores it")),
    (zero(0, reduce_bucket_size=5e8), ("reduce_bucket_size=500000000.0", "at stage 0")),
    (zero(2, offload_param={"device": "cpu"}), ("offload_param", "belongs to ZeRO stage 3, and at stage 2")),
    (zero(2, stage3_max_live_parameters=1e9), ("stage3_max_live_parameters", "belongs to ZeRO stage 3")),
    (zero(2, stage3_prefetch_bucket_size="auto"), ("stage3_prefetch_bucket_size", "belongs to ZeRO stage 3")),
    (zero(2, zero_hpz_partition_size=2), ("zero_hpz_partition_size=2", "belongs to ZeRO stage 3")),
    (zero(3, round_robin_gradients=True), ("round_robin_gradients", "belongs to ZeRO stages 1 and 2")),
    (zero(3, allgather_bucket_size=2e8), ("allgather_bucket_size", "at stage 3 DeepSpeed ignores it")),
    (zero(1, allgather_partitions=False), ("allgather_partitions=false", "with all-gather, whatever this says")),
    (zero(2, ignore_unused_parameters=False), ("ignore_unused_parameters=false", "under offload alone")),
    (
        zero(2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}),
        ("contiguous_gradients=false", "offload_optimizer needs them"),
    ),
    (zero(3, override_module_apply=False), ("acts in deepspeed.zero.Init alone",)),
    ({"disable_allgather": True}, ("disable_allgather=true: DeepSpeed ignores it",)),
    ({"dataloader_drop_last": True}, ("DeepSpeed's data loader",)),
    ({"vocabulary_size": 50257}, ("model.vocab_size",)),
    ({"pipeline": {"activation_checkpoint_interval": 2}}, ("has no pipeline", "engine=deepspeed_pipe")),
    # pairs and sizes
    (zero(2), ("zero_optimization.stage=2", "pipeline", "write 0 or 1"), PIPE),
    (zero(3), ("zero_optimization.stage=3", "stages 0 and 1"), PIPE),
    (zero(1, overlap_comm=True), ("overlap_comm=true", "switches it off in a pipeline"), PIPE),
    ({"wall_clock_breakdown": True}, ("wall_clock_breakdown=true", "twice, and stops there; remove it"), PIPE),
    (zero(3, zero_hpz_partition_size=3), ("zero_hpz_partition_size=3", "divide the 2", "valid: 1, 2")),
    (
        zero(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
        ("zero_hpz_partition_size=2", "remove one of the two"),
    ),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, ("grad_accum_dtype", "train.precision=fp32", "accumulated in fp32")),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, ("at ZeRO stage 0", "take stage 1, 2 or 3"), BF16),
    ({"data_types": {"param_dtype": "fp32"}}, ('param_dtype="fp32"', "weights are bf16"), BF16),
    ({"communication_data_type": "bf16"}, ('communication_data_type="bf16"', "are reduced in fp32")),
    ({"communication_data_type": "fp16"}, ("are reduced in fp32 or bf16",), BF16),
    # what is not supported, with the reason
    ({"fp16": {"enabled": True}}, ("loss scaling", "train.precision=bf16")),
    ({"amp": {"enabled": True}}, ("amp", "has removed it", "train.precision=bf16")),
    ({"torch_autocast": {"enabled": True}}, ("torch_autocast", "train.precision=bf16")),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}}, ("would reach the weights",), BF16),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ("DeepSpeed's own CPU Adam",), BF16),
    ({"optimizer": {"type": "Lamb", "params": {}}}, ('optimizer.type="Lamb"', "torch's AdamW", 'write "AdamW"')),
    ({"optimizer": {"type": "OneBitAdam"}}, ('optimizer.type="OneBitAdam"', "torch's AdamW")),
    ({"optimizer": {"params": {"lr": "auto"}}}, ("optimizer.type: is missing",)),
    (optimizer(adam_w_mode=False), ("adam_w_mode=false", "decoupled")),
    (optimizer(amsgrad=True), ("AMSGrad is not offered",)),
    ({"zero_force_ds_cpu_optimizer": True}, ("offloaded or not",)),
    (zero(3, zero_quantized_weights=True), ("rounded integers", "zero_hpz_partition_size")),
    (zero(2, offload_optimizer={"device": "nvme"}), ('device="nvme"', "asynchronous I/O", '"cpu"')),
    (zero(3, offload_param={"device": "cpu", "max_in_cpu": 1e9}), ("max_in_cpu", '"nvme" alone')),
    (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.3}), ("ratio=0.3", "1.0 offloads all of it")),
    (zero(2, zenflow={"topk_ratio": 0.1}), ("zenflow", "delays a part of each update")),
    (zero(3, leaf_module={"classes": ["Moe"]}), ("leaf_module", "leaf modules")),
    (zero(2, compute_grad_norm=False), ("compute_grad_norm=false", "reports the gradient norm")),
    ({"gradient_allreduce_op": "sum"}, ('gradient_allreduce_op="sum"', "weighted by tokens")),
    ({"managed_gradient_accumulation": False}, ("counts its last micro-batch",)),
    ({"prescale_gradients": True}, ("fp16 from overflowing",)),
    ({"elasticity": {"enabled": True}}, ("elasticity", "has removed it", "train.resume=auto")),
    ({"curriculum_learning": {"enabled": True}}, ("curriculum_learning", "data=")),
    ({"compression_training": {}, "sparse_attention": {"mode": "fixed"}}, ("sparse_attention", "model.attention")),
    ({"flops_profiler": {"enabled": True}}, ("flops_profiler", "dry_run=true")),
    ({"autotuning": {"enabled": True}}, ("autotuning", "dry_run=true")),
    ({"tensorboard": {"enabled": True}}, ("tensorboard", "metrics.jsonl")),
    ({"comms_logger": {"enabled": True}}, ("comms_logger", "run folder")),
    ({"tensor_parallel": {"autotp_size": 2}}, ("tensor, sequence and expert parallelism are not supported",)),
    ({"sequence_parallel_size": 2}, ("sequence_parallel_size=2", "not supported")),
    ({"checkpoint": {"load_universal": True}}, ("checkpoint", "train.save_every")),
    ({"pipeline": {"use_reentrant": True}}, ("use_reentrant=true", "non-reentrant"), PIPE),
    ({"pipeline": {"partition": "uniform"}}, ('partition="uniform"', "engine.partition=uniform"), PIPE),
    ({"pipeline": {"checkpointable_layers": ["Block"]}}, ("PipelineModule", "ckpt.blocks"), PIPE),
    (zero(2, round_robin_gradients=True), ("round_robin_gradients=true", "one parameter's optimizer states")),
    # deprecated
    (zero(2, cpu_offload=True), ("cpu_offload=true: is deprecated", 'offload_optimizer: {"device": "cpu"}')),
    (zero(3, stage3_gather_fp16_weights_on_model_save=True), ("stage3_gather_16bit_weights_on_model_save",)),
    (zero(3, param_persistence_threshold=0), ("write zero_optimization.stage3_param_persistence_threshold",)),
    ({"bfloat16": {"enabled": True}}, ("is deprecated; write bf16",), BF16),
    (optimizer(max_grad_norm=1.0), ("max_grad_norm", "write gradient_clipping")),
    # activation checkpointing
    ({"activation_checkpointing": {}}, ("asks for nothing", "+ckpt=selective")),
    (
        {"activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": None, "profile": False}},
        ("asks for nothing", "number_checkpoints"),
    ),
    ({"activation_checkpointing": None}, ("activation_checkpointing=null", "must be an object")),
    ({"activation_checkpointing": {"partition_activations": True}}, ("tensor-parallel ranks",)),
    ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, ("reentrant function alone",)),
    ({"activation_checkpointing": {"synchronize_checkpoint_boundary": True}}, ("saves nothing",)),
    ({"activation_checkpointing": {"profile": True, "number_checkpoints": 4}}, ("profile=true",)),
    (
        {"activation_checkpointing": {"number_checkpoints": 4}, "pipeline": {"activation_checkpoint_interval": 2}},
        ("number_checkpoints=4 and pipeline.activation_checkpoint_interval=2", "one of the two"),
        PIPE,
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: json.dumps(mistake[0])[:70])
def test_each_mistake_is_said_once(mistake: Any) -> None:
    data, words, run = (*mistake, RUN)[:3]
    with pytest.raises(ConfigError) as caught:
        resolve(data, run, "mine.json")
    message = str(caught.value)
    assert message.startswith("mine.json: ")
    for word in words:
        assert word in message
    assert "\n" not in message, "one mistake, one problem"


def test_all_problems_are_said_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"stage": 1, **zero(2, stage3_max_reuse_distance=1), "elasticity": 1}, RUN, "mine.json")
    lines = str(caught.value).splitlines()
    assert lines[0] == "mine.json: 3 problems"
    assert [line.split(":")[0].split("=")[0] for line in lines[1:]] == [
        "  stage",
        "  zero_optimization.stage3_max_reuse_distance",
        "  elasticity",
    ]


def test_each_source_says_where() -> None:
    with pytest.raises(ConfigError, match=r"^DeepSpeed configuration: stge: "):
        resolve({"stge": 1}, RUN)
