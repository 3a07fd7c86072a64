"""What DeepSpeed gets to know: complete, explicit, and what the user wrote."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.deepspeed_config import RunSettings, read_config, resolve
from tests.unit.deepspeed_runs import BF16, PIPE, RUN, zero

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"


def test_what_deepspeed_gets_is_explicit() -> None:
    config = resolve(zero(2, reduce_bucket_size="auto"), RUN)
    assert config.as_dict() == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": False, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    assert (config.stage, config.precision, config.path, config.notes) == (2, "fp32", None, ())


def test_nothing_is_clipped_unless_asked() -> None:
    unclipped = dataclasses.replace(RUN, clip=None)
    for data in ({}, {"gradient_clipping": "auto"}, {"gradient_clipping": 0}, {"gradient_clipping": 0.0}):
        assert resolve(data, unclipped).data["gradient_clipping"] == math.inf


def test_a_copy_for_deepspeed_to_change() -> None:
    config = resolve(zero(1, offload_optimizer={"device": "cpu"}), RUN)
    config.as_dict()["zero_optimization"]["offload_optimizer"]["device"] = "none"
    assert config.data["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_sizes_follow_the_width_as_hugging_face_has_it() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    data = zero(3, **dict.fromkeys(names, "auto"), sub_group_size="auto", overlap_comm="auto")
    wide = resolve(data, dataclasses.replace(RUN, hidden_size=100)).data["zero_optimization"]
    assert wide == {"stage": 3} | dict(zip(names, (10_000, 9_000, 1_000), strict=True))
    assert resolve(data, RUN).data["zero_optimization"] == {"stage": 3}, "DeepSpeed's defaults"


def test_a_pipeline_never_recomputes_by_itself() -> None:
    config = resolve({"pipeline": {"activation_checkpoint_interval": 2, "stages": "auto"}}, PIPE)
    assert config.data["pipeline"] == {"activation_checkpoint_interval": 0, "use_reentrant": False}
    assert config.data["train_batch_size"] == 16, "of two pipelines"
    assert "pipeline" not in resolve({}, RUN).data


def test_the_throughput_timer_runs_where_it_logs() -> None:
    silent = {"throughput": {"enabled": False}}
    data = resolve({"wall_clock_breakdown": True}, RUN).data
    assert (data["wall_clock_breakdown"], data["timers"]) == (True, silent)
    data = resolve({"wall_clock_breakdown": True, "steps_per_print": 3}, RUN).data
    assert data["steps_per_print"] == 3
    assert "timers" not in data
    assert resolve({"wall_clock_breakdown": False}, PIPE).data["timers"] == silent


FP16_OFF = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
AUTO = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
# As people write them for Hugging Face's Trainer, with what DeepSpeed gets to know about ZeRO.
IN_THE_WILD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 2 with offload": (
        AUTO
        | {
            "fp16": FP16_OFF,
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "allgather_partitions": True,
                "allgather_bucket_size": 2e8,
                "overlap_comm": True,
                "reduce_scatter": True,
                "reduce_bucket_size": 2e8,
                "contiguous_gradients": True,
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {"allgather_bucket_size": 200_000_000, "overlap_comm": True, "contiguous_gradients": True},
    ),
    "stage 3, offload switched off": (
        AUTO
        | {
            "fp16": FP16_OFF | {"min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "none", "pin_memory": True},
                "overlap_comm": False,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        {"overlap_comm": False, "sub_group_size": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000},
    ),
    "stage 2, permissive": (
        AUTO
        | {
            "zero_allow_untested_optimizer": True,
            "fp16": FP16_OFF,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": False,
                "reduce_scatter": True,
                "reduce_bucket_size": 5e8,
                "contiguous_gradients": True,
                "round_robin_gradients": False,
            },
        },
        {"reduce_scatter": True, "reduce_bucket_size": 500_000_000},
    ),
    "everything that is off": (
        {
            "elasticity": {"enabled": False},
            "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
            "tensorboard": {"enabled": False, "output_path": "runs"},
            "prescale_gradients": False,
            "sparse_gradients": False,
            "communication_data_type": None,
            "steps_per_print": None,
            "zero_optimization": {"stage": 1, "offload_optimizer": None, "overlap_comm": None},
        },
        {},
    ),
}


@pytest.mark.parametrize("run", [RUN, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", IN_THE_WILD)
def test_files_in_the_wild_are_taken(name: str, run: RunSettings) -> None:
    data, expected = IN_THE_WILD[name]
    before = json.dumps(data)
    config = resolve(data, run)
    assert json.dumps(data) == before, "not changed"
    assert expected.items() <= config.data["zero_optimization"].items()
    assert config.data["bf16"]["enabled"] == (run.precision == "bf16")
    assert "auto" not in json.dumps(config.data)
    assert not {"optimizer", "activation_checkpointing", "elasticity", "sparse_gradients"} & set(config.data)


def test_what_is_done_in_another_way_is_noted() -> None:
    config = resolve(IN_THE_WILD["stage 3, offload switched off"][0], RUN)
    assert len(config.notes) == 1
    assert config.notes[0].startswith("zero_optimization.stage3_gather_16bit_weights_on_model_save")
    assert "launch/export.py" in config.notes[0]


def test_what_gains_nothing_on_the_cpu_is_noted() -> None:
    data = zero(2, offload_optimizer={"device": "cpu"}, overlap_comm=True)
    notes = resolve(data, RUN).notes
    assert [note.split(":")[-1] for note in notes] == [
        " the ranks compute on the CPU, so nothing is freed",
        " on the CPU nothing overlaps, and there are two buckets instead of one",
    ]
    assert resolve(data, dataclasses.replace(RUN, device="cuda")).notes == ()
    assert resolve(zero(2, offload_optimizer={"device": "none"}), RUN).notes == ()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shipped_configurations_fit_any_run(path: Path, precision: Any) -> None:
    run = PIPE if path.stem == "pipeline" else dataclasses.replace(RUN, micro_batch=3, clip=None)
    run = dataclasses.replace(run, precision=precision, device="cuda")
    config = resolve(read_config(path), run, str(path))
    stage = 1 if path.stem == "pipeline" else int(path.stem.removeprefix("zero")[0])
    assert (config.stage, config.precision, config.notes) == (stage, precision, ())
