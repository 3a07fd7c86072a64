"""Other people's trainers: their own checkpointing is refused, and sharded training is that without a plan."""

from __future__ import annotations

import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import PlanError, apply, named_parameters
from tests.ranks import RankGroups
from tests.unit.toys import Block, Stack

pytestmark = pytest.mark.full


def tiny_gpt2() -> Any:
    from tests.hf_models import build

    return build("gpt2")


def rows() -> list[dict[str, Tensor]]:
    ids = [(torch.arange(8) + start) % 32 for start in range(16)]
    return [{"input_ids": one, "labels": one} for one in ids]


def trained_by_hf(rank: int, world: int, policy: Any, **options: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    model = tiny_gpt2()
    apply(model, policy)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, disable_tqdm=True, **common, **options)
        trainer = Trainer(model, arguments, train_dataset=rows())
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def refused_by_hf(rank: int, world: int) -> str:
    try:
        trained_by_hf(rank, world, "full", gradient_checkpointing=True)
    except PlanError as error:
        return str(error)
    return ""


def test_the_trainer_of_hugging_face(ranks: RankGroups) -> None:
    expected = ranks(2).run(trained_by_hf, "none")
    assert ranks(2).run(trained_by_hf, "selective") == expected
    for message in ranks(2).run(refused_by_hf):
        assert "switched on after a plan was applied" in message and "TrainingArguments" in message


def planned(policy: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(4, p=0.2).train()
    apply(model, policy)
    return model


def gradients(model: nn.Module, backward: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    backward(model(torch.randn(2, 5, 4)).square().sum())
    return {n: p.grad.clone() for n, p in named_parameters(model) if p.grad is not None}


def accelerated(rank: int, world: int, policy: Any) -> dict[str, Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return gradients(accelerator.prepare(planned(policy)), accelerator.backward)


def in_fabric(rank: int, world: int, policy: Any) -> dict[str, Tensor]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"))
    fabric.launch()
    return gradients(fabric.setup_module(planned(policy)), fabric.backward)


@pytest.mark.parametrize("train", [accelerated, in_fabric])
def test_replicated_training_is_that_without_a_plan(ranks: RankGroups, train: Any) -> None:
    expected = ranks(2).run(train, "none")
    for policy in ("full", "selective", {"mode": "segments", "k": 2}):
        for found, wanted in zip(ranks(2).run(train, policy), expected, strict=True):
            assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def with_accelerates_own(model: nn.Module, offload: bool = False) -> nn.Module:
    """What ``Accelerator.prepare`` does with ``activation_checkpointing=True``; on a CPU it shards nothing."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
        activation_checkpointing_offload=offload,
    )
    plugin.set_auto_wrap_policy(model)
    return fsdp2_apply_ac(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), model)


def with_lightnings_own(model: nn.Module) -> nn.Module:
    """What ``FSDPStrategy`` does with an ``activation_checkpointing_policy``."""
    from lightning.fabric.strategies.fsdp import _activation_checkpointing_kwargs, _setup_activation_checkpointing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _setup_activation_checkpointing(model, _activation_checkpointing_kwargs(None, {Block}))
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "accelerate": with_accelerates_own,
    "accelerate with offload": lambda model: with_accelerates_own(model, offload=True),
    "lightning": with_lightnings_own,
}


@pytest.mark.parametrize("how", WAYS)
def test_own_checkpointing_of_a_trainer_is_refused_before_and_after(how: str) -> None:
    with pytest.raises(PlanError, match=r"a Block is already in a torch (Checkpoint|Offload)Wrapper"):
        apply(WAYS[how](planned("none")), "full")
    for policy in ("full", "selective", {"mode": "segments", "k": 2}):
        model = WAYS[how](planned(policy))
        with pytest.raises(PlanError, match="another activation checkpoint runs around a recomputed Block"):
            model(torch.randn(2, 5, 4))
