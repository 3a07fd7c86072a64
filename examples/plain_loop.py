"""A plain PyTorch loop. What dist_ckpt adds is marked.

python examples/plain_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dist_ckpt import MemoryMeter, apply  # added


def main(policy: Any = "selective", steps: int = 4) -> list[float]:
    """Trains a small encoder to reproduce its input, and returns the losses."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    print(apply(model, policy))  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = MemoryMeter(model, optimizer)  # added, if you want to see the memory
    batch, losses = torch.randn(4, 32, 64), []
    for step in range(steps):
        loss = (model(batch) - batch).square().mean()
        meter.after_forward(loss)  # added, if you want to see the memory
        loss.backward()
        losses.append(loss.item())
        del loss
        memory = meter.boundary(step)  # added, if you want to see the memory
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {losses[-1]:.4f}, activations {memory.activations / 2**20:.2f} MiB")
    return losses


if __name__ == "__main__":
    main()
