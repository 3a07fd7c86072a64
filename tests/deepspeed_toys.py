"""The toys of training states under DeepSpeed as people use it, and their state read back through its own functions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.names import named_buffers, named_parameters
from dist_ckpt.states.files import open_folder
from dist_ckpt.states.training_state import read_tensors
from tests.state_toys import VOCAB, WIDTH, Toy

MOMENTS = ("exp_avg", "exp_avg_sq")


class Odd(nn.Module):
    """What models have besides trained matrices. ids: (batch, seq) → summed loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.embedding.weight.requires_grad = False
        self.conv = nn.Conv1d(WIDTH, 5, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.full((5,), float(seed)))
        self.count: Tensor
        self.register_buffer("count", torch.tensor(0))
        self.gain = nn.Parameter(torch.tensor([1.0 + seed]))  # DeepSpeed takes none of shape ()
        self.unused = nn.Linear(3, 3)
        self.table: Tensor
        self.register_buffer("table", torch.full((3,), 0.1), persistent=False)
        self.head = nn.Linear(5, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        self.count += 1
        x = (x - self.mean.to(x.dtype)) * self.gain
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 2:].flatten(), reduction="sum")


class Low(Toy):
    """With a buffer that is in 16 bits by itself, under every engine."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((3,), 1.0 + seed, dtype=torch.bfloat16))


def initialized(
    model: nn.Module,
    stage: int,
    bf16: bool = False,
    zero: Mapping[str, Any] = MappingProxyType({}),
    data: Mapping[str, Any] = MappingProxyType({}),
    optimizer: str = "AdamW",
) -> Any:
    """DeepSpeed's engine, with an optimizer of two groups, and with buckets and shards of a size that the toy has.

    Args:
        zero: options of ``zero_optimization``.
        data: other options.
    """
    compat.start(torch.device("cpu"))
    section: dict[str, Any] = {"stage": stage}
    if stage:
        section |= {"reduce_bucket_size": 200}
    if stage == 3:
        section |= {"stage3_param_persistence_threshold": 7, "stage3_prefetch_bucket_size": 200}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {**section, **zero},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        **data,
    }
    return compat.build(model, two_groups(model, optimizer), copy.deepcopy(config), torch.device("cpu"))


def two_groups(model: nn.Module, kind: str = "AdamW") -> Optimizer:
    """As :func:`tests.state_toys.adamw`, for models of which a part is frozen or missing."""
    trained = [(name, p) for name, p in named_parameters(model) if p.requires_grad]
    decay = [p for name, p in trained if "norm" not in name]
    rest = [p for name, p in trained if "norm" in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    make = getattr(torch.optim, kind)
    made: Optimizer = make([g for g in groups if g["params"]], lr=1e-2, betas=(0.9, 0.95), fused=True)
    return made


def train(engine: Any, steps: int, seed: int = 1) -> list[float]:
    """As :func:`tests.state_toys.train`; returns losses and norms."""
    ids = torch.randint(0, VOCAB, (steps, 2, 5), generator=torch.Generator().manual_seed(seed))
    seen = []
    for batch in ids:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        seen += [float(loss), float(engine.get_global_grad_norm() or 0.0)]
    return seen


def whole(engine: Any) -> dict[str, Tensor]:
    """Weights, moments and step counts of all ranks, by key; not by way of our own code."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    if hasattr(wrapper, "_hp_optimizer_states_linked") and any(optimizer.state.values()):
        wrapper._hp_optimizer_states_linked = False  # DeepSpeed links after the first group's first step, and only then
        wrapper._lazy_init_hp_params_optimizer_state()
    masters: dict[int, Tensor] = {}
    if hasattr(wrapper, "fp32_groups"):  # bf16 without ZeRO
        pairs = zip(itertools.chain(*wrapper.fp16_groups), itertools.chain(*wrapper.fp32_groups), strict=True)
        masters = {id(low): high for low, high in pairs}
    found = {f"model.{name}": value.float() for name, value in named_buffers(engine.module)}
    for name, p in named_parameters(engine.module):
        low = found[f"low.{name}"] = _gathered(p) if hasattr(p, "ds_id") else p
        if p.requires_grad and (hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")):
            found[f"model.{name}"] = safe_get_full_fp32_param(p)
            if any(optimizer.state.values()):
                found |= {f"{kind}.{name}": safe_get_full_optimizer_state(p, kind) for kind in MOMENTS}
        else:
            master = masters.get(id(p), low)
            found[f"model.{name}"] = master
            found |= {f"{kind}.{name}": m for kind, m in optimizer.state.get(master, {}).items() if kind in MOMENTS}
    steps = {float(entries["step"]) for entries in optimizer.state.values() if entries}
    found["steps"] = torch.tensor(sorted(steps))
    return {name: value.detach().float().clone() for name, value in found.items()}


def _gathered(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def stored(path: str | Path) -> dict[str, Tensor]:
    """What a state holds of weights and moments, by the keys of :func:`whole`."""
    state = open_folder(Path(path))
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in state.entries.items()}
    read_tensors(state, tensors)
    return by_kind({key: value for key, value in tensors.items() if not key.startswith("rng.")})


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state, by the keys of :func:`whole`."""
    found = {key: value for key, value in tensors.items() if key.startswith("model.")}
    for key, value in tensors.items():
        name, _, kind = key.removeprefix("optimizer.state.").rpartition(".")
        if key.startswith("optimizer.") and kind != "step":
            found[f"{kind}.{name}"] = value
    found["steps"] = torch.tensor(sorted({float(value) for key, value in tensors.items() if key.endswith(".step")}))
    return found
