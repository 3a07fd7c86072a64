"""Sharded parameters, each by itself: torch's ``fully_shard``; with replicas hybrid (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dist_ckpt.engines.base import materialize
from dist_ckpt.engines.torch_engine import TorchEngine
from dist_ckpt.errors import EngineError
from dist_ckpt.names import named_parameters


class FSDP2Engine(TorchEngine):
    """Every rank holds its rows of each parameter; a model on meta never exists whole."""

    name = "fsdp2"
    default_accum_sync = "every"
    accumulates_unsharded = True
    takes_replicas = True
    model: FSDPModule  # type: ignore[assignment]

    def shard(self, model: nn.Module, blocks: Sequence[str]) -> nn.Module:
        on_meta = any(p.is_meta for p in model.parameters())
        if not on_meta:
            model.to(self.device)
        mesh = self._mesh()
        bf16 = self.options.precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,
        )
        modules = dict(model.named_modules())
        for name in blocks:  # a block that recomputes is sharded as it is: the unshard hook stays outside its region
            fully_shard(modules[name], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if on_meta:
            materialize(model, self.device, self._initialize)
        return model

    def _mesh(self) -> DeviceMesh:
        world, replicas = dist.get_world_size(), self.options.replicas
        if world % replicas:
            raise EngineError(f"engine.replicas={replicas} does not divide the {world} ranks")
        if replicas == 1:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        return init_device_mesh(self.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    @contextmanager
    def reduction(self, reduce: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(reduce)
        yield

    def clip_gradients(self, max_norm: float) -> float:
        parameters = [p for _, p in named_parameters(self.model)]  # type: ignore[arg-type]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)
