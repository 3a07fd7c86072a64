"""What fills the memory of a loop of your own at its worst moment. What dist_ckpt adds is marked.

python examples/own_loop_memory.py
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dist_ckpt import MemoryMeter, apply  # added


def main(policy: Any = "selective", steps: int = 4, deep_step: int = 2) -> list[float]:
    """Trains a small encoder, shows what one update consists of, and returns the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(6)))
    print(apply(model, policy))  # added
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    meter = MemoryMeter(model, optimizer)  # added
    batch, losses = torch.randn(4, 32, 64), []
    for step in range(steps):
        with meter.profile(batch) if step == deep_step else nullcontext() as deep:  # added
            loss = (model(batch) - batch).square().mean()
            meter.after_forward(loss)  # added
            loss.backward()
            losses.append(loss.item())
            del loss
            meter.boundary(step)  # added
            optimizer.step()
            optimizer.zero_grad()
        if deep is not None:  # added
            print(f"peak {deep.memory.peak:,} bytes: {deep.memory.at_peak}")  # added
            for held in deep.profile.holdings[:3]:  # added
                print(f"{held.nbytes:>9,} bytes of {held.kind}: {held.module or 'the model'} {held.shape}")  # added
    return losses


if __name__ == "__main__":
    main()
