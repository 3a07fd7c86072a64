"""Saved and peak bytes of segments of every length, against the formula; writes docs/segments.md and its plot.

    python benchmarks/segments.py

n = 24 blocks in segments of k, for a Llama-like block, which keeps far more than its input, and for linear + ReLU,
which keeps one more tensor of its input's size. The bytes are exact: saved bytes from the autograd graph, peaks from
the CPU allocator's own events.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt import apply, make_plan
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.storages import Storages
from dist_ckpt.planning.measure import measure_blocks
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import TransformerBlock, rope_tables

ROOT = Path(__file__).resolve().parents[1]
N = 24
MIB = 2**20


class Decoder(nn.Module):
    """The blocks of a Llama-like decoder. x: (batch, seq, d_model) → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig(n_layers=N, d_model=64, n_heads=4, n_kv_heads=4, d_ff=172, max_seq_len=128)
        self.layers = nn.ModuleList(TransformerBlock(self.config) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = rope_tables(self.config)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def linear_relu() -> nn.Module:
    """x: (batch, width) → the same."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(N)))


MODELS = {
    "Llama-like block": (Decoder, (4, 128, 64)),
    "linear + ReLU": (linear_relu, (512, 64)),
}


@dataclass(frozen=True)
class Measured:
    """Bytes of one length."""

    k: int
    saved: int
    peak: int
    formula: float


def measure(build: Any, shape: tuple[int, ...], k: int) -> tuple[int, int]:
    """Saved bytes after forward, and the peak of what a step allocates beyond parameters and gradients."""
    torch.manual_seed(0)
    model = build()
    apply(model, {"mode": "segments", "k": k})
    x = torch.randn(shape, requires_grad=True)
    for parameter in (x, *model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    saved = saved_bytes([model(x).sum()], [x, *model.parameters(), *model.buffers()]).total
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(x).sum().backward()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    alive = peak = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        alive += change
        peak = max(peak, alive)
    return saved + Storages([x]).nbytes, peak + Storages([x]).nbytes


def sweep(build: Any, shape: tuple[int, ...]) -> tuple[list[Measured], str]:
    """Every length, and the one that ``k: sqrt`` chooses with a batch."""
    model, batch = build(), torch.randn(shape)
    blocks = make_plan(model, "full").blocks
    sizes = measure_blocks(model, batch, None, blocks).values()
    given = sum(size.inputs for size in sizes) / N
    kept = sum(size.kept for size in sizes) / N
    found = []
    for k in range(1, N + 1):
        saved, peak = measure(build, shape, k)
        found.append(Measured(k, saved, peak, math.ceil(N / k) * given + k * kept))
    chosen = len(make_plan(model, "segments", batch).regions[0].modules)
    return found, f"inputs of {given / MIB:.3f} MiB, blocks of {kept / MIB:.3f} MiB; `k: sqrt` takes {chosen}"


def main() -> None:
    """Measures, and writes the page and the plot."""
    torch.set_num_threads(1)
    pyplot.rcParams["svg.hashsalt"] = "segments"  # the same file for the same figures
    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(10, 4), layout="constrained")
    top = f"""# Segments of every length

n = {N} blocks in segments of k, written by `python benchmarks/segments.py`. Saved bytes are what is alive between
forward and backward, peak bytes the most that is alive during the step, without parameters and gradients. The formula
is ⌈n/k⌉·input + k·block (arXiv:1604.06174); its least is at k = √(n·input/block), which is √n only where a block keeps
about as much as its input.

Transformer blocks keep some twenty times their input, so `full` (k = 1) or `nested` is for them; longer segments pay
for blocks as small as linear + ReLU.

![saved and peak bytes over k](segments.svg)"""
    lines = top.splitlines()
    for axis, (name, (build, shape)) in zip(axes, MODELS.items(), strict=True):
        found, facts = sweep(build, shape)
        ks = [one.k for one in found]
        for label, values, style in (
            ("saved", [one.saved for one in found], "o-"),
            ("peak", [one.peak for one in found], "s-"),
            ("⌈n/k⌉·input + k·block", [one.formula for one in found], "--"),
        ):
            axis.plot(ks, [value / MIB for value in values], style, label=label, markersize=3)
        axis.set(title=name, xlabel="k", ylabel="MiB", ylim=(0, None))
        axis.legend()
        lines += ["", f"## {name}", "", f"{facts[0].upper()}{facts[1:]}.", ""]
        lines += ["| k | saved MiB | peak MiB | formula MiB |", "| ---: | ---: | ---: | ---: |"]
        lines += [f"| {m.k} | {m.saved / MIB:.3f} | {m.peak / MIB:.3f} | {m.formula / MIB:.3f} |" for m in found]
    figure.savefig(ROOT / "docs" / "segments.svg", metadata={"Date": None})
    (ROOT / "docs" / "segments.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
