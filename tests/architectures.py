"""Eight unlike architectures, each tiny and complete: a model, a batch and a loss.

All have dropout, so that a recompute that draws anew is seen, and each has something that a plain stack of blocks has
not: buffers that a forward edits, skip connections over many blocks, two lists of blocks, a routing decision, one cell
that is called many times.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

WIDTH = 8
HEADS = 2
P = 0.2


@dataclass(frozen=True)
class Case:
    """A model in training mode with what it is trained on; two cases of one seed are equal."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    blocks: tuple[str, ...]
    """Its blocks as a reader would name them; found without help unless ``spec`` says how."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What a policy has to be told about this model."""


class Attention(nn.Module):
    """Attention of ``x`` to ``memory`` (to itself without one), with materialised scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x if memory is None else memory).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        mixed = F.dropout(scores.softmax(-1), P, self.training) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(P))


class EncoderLayer(nn.Module):
    """A post-norm layer, as BERT's, that returns its attention's input too and takes its mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.norm1(x + self.attention(x, mask=mask))
        return self.norm2(x + self.mlp(x)), None


class Encoder(nn.Module):
    """Masked-token prediction, with the head's weight tied to the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(6, WIDTH)
        self.layer = nn.ModuleList(EncoderLayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids) + self.positions.weight[: ids.shape[1]], P, self.training)
        for layer in self.layer:
            x, _ = layer(x, mask=mask)
        return self.head(x)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn, self.mlp = Attention(), Attention(), mlp()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.norms[0](x))
        x = x + self.cross_attn(self.norms[1](x), memory, mask)
        return x + self.mlp(self.norms[2](x))


class EncoderDecoder(nn.Module):
    """Two lists of blocks; every block of the second one reads the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(3))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        memory, x = self.embed(ids), self.embed(targets)
        for layer in self.encoder:
            memory, _ = layer(memory, mask=mask)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        return self.head(x)


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm around an identity or a projection, as in ResNet-18."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + identity)


class ResNet(nn.Module):
    """Stages of different width that are attributes, not a list."""

    def __init__(self, depths: tuple[int, ...] = (2, 1, 2)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        channels = 4
        for number, depth in enumerate(depths, start=1):
            stride = 1 if number == 1 else 2
            blocks = [BasicBlock(channels, 4 * number, stride)]
            blocks += [BasicBlock(4 * number, 4 * number) for _ in range(depth - 1)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            channels = 4 * number
        self.stages = len(depths)
        self.fc = nn.Linear(channels, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(image)))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(F.dropout(x.mean((2, 3)), P, self.training))


class DoubleConv(nn.Module):
    """Two 3-D convolutions, each with a norm and an activation."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for first, second in ((channels_in, channels), (channels, channels)):
            layers += [nn.Conv3d(first, second, 3, padding=1), nn.BatchNorm3d(second), nn.LeakyReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Dropout3d(P))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Level(nn.Module):
    """One level of a U-Net around all the deeper ones, whose result meets the skip connection."""

    def __init__(self, channels_in: int, channels: int, deeper: nn.Module, out_of_deeper: int) -> None:
        super().__init__()
        self.down = nn.Sequential(DoubleConv(channels_in, channels))
        self.pool = nn.MaxPool3d(2)
        self.deeper = deeper
        self.up = nn.Sequential(DoubleConv(channels + out_of_deeper, channels))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        inside = F.interpolate(self.deeper(self.pool(skip)), size=skip.shape[2:])
        return self.up(torch.cat((skip, inside), dim=1))


class UNet3d(nn.Module):
    """A 3-D U-Net built from the bottom, each level inside the one above."""

    def __init__(self) -> None:
        super().__init__()
        bottom = DoubleConv(4, 6)
        self.net = Level(1, 2, Level(2, 4, bottom, 6), 4)
        self.head = nn.Conv3d(2, 1, 1)

    def forward(self, volume: Tensor) -> Tensor:
        return self.head(self.net(volume))


class ViTLayer(nn.Module):
    """A pre-norm layer with learned residual scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), mlp()
        self.scale = nn.Parameter(torch.full((2, WIDTH), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale[0] * self.attn(self.norm1(x))
        return x + self.scale[1] * self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, a class token, and layers in a ``Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(ViTLayer() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class Experts(nn.Module):
    """Each token goes to its best two of four experts; a buffer counts their load and a bias evens it out."""

    load: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(mlp() for _ in range(4))
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        _, chosen = torch.topk(scores + self.bias, 2, dim=-1)
        weights = scores.gather(-1, chosen)
        if self.training:
            self.load += F.one_hot(chosen, 4).sum((0, 1, 2))
            self.bias.copy_(-0.1 * torch.sign(self.load - self.load.mean()))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        return out


class MoELayer(nn.Module):
    """Attention and a mixture of experts; returns a dictionary, the routing loss besides the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.moe = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.attn(self.norm1(x))
        inside = self.norm2(x)
        return {"hidden": x + self.moe(inside), "aux": self.moe.gate(inside).logsumexp(-1).square().mean()}


class MoE(nn.Module):
    """Layers whose auxiliary losses are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(MoELayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, aux = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            out = layer(x)
            x, aux = out["hidden"], aux + out["aux"]
        return self.head(x), aux


class Cell(nn.Module):
    """One step of an LSTM with a projection and dropout, its state a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, memory = (torch.zeros_like(x), torch.zeros_like(x)) if state is None else state
        i, f, g, o = self.gates(torch.cat((x, hidden), dim=-1)).chunk(4, dim=-1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * memory.tanh()
        return F.dropout(self.out(hidden), P, self.training), (hidden, memory)


class Recurrent(nn.Module):
    """One cell, called once a position: there is no list of blocks to find."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(11, WIDTH), Cell(), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        state, outs = None, []
        for x in self.embed(ids).unbind(1):
            out, state = self.cell(x, state)
            outs.append(out)
        return self.head(torch.stack(outs, dim=1))


def token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs)
    aux = 0.0
    if isinstance(logits, tuple):
        logits, aux = logits
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()) + aux


def volume_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["volume"]), batch["labels"])


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch)


def _tokens(*names: str, batch: int = 2, seq: int = 6, vocab: int = 11) -> dict[str, Tensor]:
    return {name: torch.randint(vocab, (batch, seq)) for name in names}


def _names(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(count))


def decoder() -> Case:
    config = ModelConfig(
        vocab_size=11, n_layers=4, d_model=8, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8, dropout=P
    )
    model = Transformer(config)
    init_parameters(model, seed=1, n_layers=4)
    return Case(model, _tokens("input_ids", "labels"), own_loss, _names("layers", 4))


def encoder() -> Case:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    return Case(Encoder(), _tokens("ids", "labels") | {"mask": mask}, token_loss, _names("layer", 4))


def encoder_decoder() -> Case:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 5:] = False
    batch = _tokens("ids", "targets", "labels") | {"mask": mask}
    return Case(EncoderDecoder(), batch, token_loss, (*_names("encoder", 3), *_names("decoder", 3)))


def resnet() -> Case:
    batch = {"image": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 4, 2])}
    blocks = ("layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer3.1")
    return Case(ResNet(), batch, token_loss, blocks)


def unet3d() -> Case:
    volume = torch.randn(2, 1, 8, 8, 8)
    blocks = ("net.down.0", "net.deeper.down.0", "net.deeper.deeper", "net.deeper.up.0", "net.up.0")
    return Case(UNet3d(), {"volume": volume, "labels": (volume > 0).float()}, volume_loss, blocks)


def vit() -> Case:
    return Case(
        ViT(), {"image": torch.randn(3, 3, 8, 8), "labels": torch.tensor([1, 0, 3])}, token_loss, _names("blocks", 4)
    )


def moe() -> Case:
    return Case(MoE(), _tokens("ids", "labels"), token_loss, _names("layers", 4))


def recurrent() -> Case:
    return Case(Recurrent(), _tokens("ids", "labels"), token_loss, ("cell",), {"blocks": "Cell"})


ARCHITECTURES: Mapping[str, Callable[[], Case]] = types.MappingProxyType(
    {
        "decoder": decoder,
        "encoder": encoder,
        "encoder_decoder": encoder_decoder,
        "resnet": resnet,
        "unet3d": unet3d,
        "vit": vit,
        "moe": moe,
        "recurrent": recurrent,
    }
)


def build(name: str) -> Case:
    """The case of one architecture, the same numbers each time, in training mode."""
    torch.manual_seed(1)
    case = ARCHITECTURES[name]()
    case.model.train()
    return case
