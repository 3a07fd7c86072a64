"""From a configuration to its parts: model, plan, cost and engine. Nothing here needs a process group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.cost import PlanCost, plan_cost
from dist_ckpt.engines import ENGINES, DataParallelEngine, TrainingOptions
from dist_ckpt.engines.optim import OptimizerOptions
from dist_ckpt.errors import ConfigError
from dist_ckpt.plan import Plan
from dist_ckpt.trainer.config import Config, DeviceType
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer


def device_type(config: Config) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    available = torch.cuda.is_available()
    if config.device.type is DeviceType.cuda and not available:
        raise ConfigError("device=cuda: torch finds no CUDA device; valid here: cpu, auto")
    return "cuda" if available and config.device.type is not DeviceType.cpu else "cpu"


def build_model(config: Config) -> Transformer:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Transformer(config.model)


def cost_of(config: Config, plan: Plan) -> PlanCost:
    """What the plan costs on one micro-batch of this run, in the run's precision."""
    model: nn.Module = build_model(config)
    autocast = config.engine.name == "ddp" and config.train.precision == "bf16"
    if config.train.precision == "bf16" and not autocast:  # FSDP gathers low-precision copies of the parameters
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    shape = (config.train.micro_batch, config.train.seq_len)
    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}

    def loss(module: nn.Module, inputs: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(**inputs)

    return plan_cost(model, plan, batch, loss)


def build_engine(config: Config, device: torch.device) -> DataParallelEngine:
    """The run's engine, not yet prepared."""
    train = config.train
    optimizer = OptimizerOptions(
        lr=train.lr,
        min_lr_ratio=train.min_lr_ratio,
        warmup_steps=train.warmup_steps,
        total_steps=train.steps,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.optimizer_eps,
    )
    options = TrainingOptions(
        precision="bf16" if train.precision == "bf16" else "fp32",
        clip=train.clip,
        accum_sync="every" if config.resolved_accum_sync() == "every" else "boundary",
        compile=train.compile,
        replicas=config.engine.replicas,
        optimizer=optimizer,
    )

    def initialize(model: nn.Module) -> None:
        whole = next(m for m in model.modules() if isinstance(m, Transformer))
        whole.init_buffers()
        init_parameters(whole, train.seed, config.model.n_layers)

    def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch)

    return ENGINES[config.engine.name](options, device, loss_sum, initialize)
