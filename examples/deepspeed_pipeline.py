"""A DeepSpeed pipeline of one's own. What dist_ckpt adds is marked.

torchrun --nproc_per_node 2 examples/deepspeed_pipeline.py
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from dist_ckpt import apply  # added

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1_000_000,
}


class Block(nn.Module):
    """x: (batch, seq, 32) → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy; logits: (batch, seq, 61), labels: (batch, seq)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main(policy: Any = "full", steps: int = 3) -> list[float]:
    """Trains a small network to repeat its input, and returns the losses."""
    layers = [LayerSpec(nn.Embedding, 61, 32), *(LayerSpec(Block) for _ in range(4)), LayerSpec(nn.Linear, 32, 61)]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    plan = apply(model, policy)  # added: instead of activation_checkpoint_interval
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    losses = []
    for _ in range(steps):
        batches = ((ids, ids) for ids in torch.randint(0, 61, (4, 2, 16)))
        losses.append(float(engine.train_batch(batches)))
    if dist.get_rank() == 0:
        print(plan)
        print("losses", losses)
    return losses


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on CPUs it would be compiled, for half a minute
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
