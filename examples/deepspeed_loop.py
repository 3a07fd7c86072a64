"""A DeepSpeed loop of one's own. What dist_ckpt adds is marked.

torchrun --nproc_per_node 2 examples/deepspeed_loop.py
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from dist_ckpt import apply, guard_accumulation  # added

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
    "steps_per_print": 1_000_000,
}


def main(policy: Any = "selective", steps: int = 3) -> list[float]:
    """Trains a small encoder to reproduce its input, and returns the losses of this rank."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    apply(model, policy)  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    guard_accumulation(engine)  # added: more backwards than configured raise instead of losing gradients
    losses = []
    for step in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            batch = torch.randn(4, 32, 64)
            loss = (engine(batch) - batch).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on CPUs it would be compiled, for half a minute
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
