"""A loop with accelerate: the plan is applied before ``prepare``, which may shard. What dist_ckpt adds is marked.

python examples/accelerate_loop.py
accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from dist_ckpt import apply  # added


def main(policy: Any = "selective", steps: int = 4) -> list[float]:
    """Trains a small Llama on counting, and returns the losses of this rank."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    accelerator.print(apply(model, policy))  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader([(torch.arange(16) + start) % 64 for start in range(64)], batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    losses = []
    for ids, _ in zip(loader, range(steps), strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
