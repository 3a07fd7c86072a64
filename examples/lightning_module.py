"""A Lightning module: the plan is applied where the model is built, before any strategy shards. Additions are marked.

python examples/lightning_module.py
"""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dist_ckpt import apply  # added


class Reproduce(lightning.LightningModule):
    """An encoder that learns to reproduce its input."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        print(apply(self.encoder, policy))  # added
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = (self.encoder(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(policy: Any = "selective", steps: int = 4) -> list[float]:
    """Trains with Lightning's own loop, and returns the losses."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Reproduce(policy)
    loader = DataLoader(torch.randn(32, 8, 32), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    print(main())
