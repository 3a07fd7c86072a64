"""A ResNet with BatchNorm, whose statistics stay those of a run without a plan. What dist_ckpt adds is marked.

python examples/resnet.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_ckpt import apply  # added


class BasicBlock(nn.Module):
    """Two convolutions around an identity or a projection. x: (batch, channels_in, height, width)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        same = stride == 1 and channels_in == channels
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of two blocks. x: (batch, 3, height, width) → (batch, classes)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def main(policy: Any = "full", steps: int = 4) -> list[float]:
    """Trains on random images, and returns the losses, in training and then with BatchNorm's statistics."""
    torch.manual_seed(0)
    model = ResNet()
    print(apply(model, policy))  # added
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(F.cross_entropy(model(images), labels).item())
    print(f"losses {', '.join(f'{loss:.4f}' for loss in losses[:-1])}; in eval() {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
