"""Policies of one Llama-like stack on a CPU thread: saved bytes, FLOPs and paired step time.

    python benchmarks/policies.py [rounds]

A policy that no other beats in saved bytes and step time is marked ``*``: it lies on the Pareto front.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._pairing import Paired, paired
from dist_ckpt import apply_plan, make_plan, plan_cost
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

ROUNDS = 15
CONFIG = ModelConfig(n_layers=12, d_model=256, n_heads=4, n_kv_heads=4, d_ff=704)
SHAPE = (4, 256)
POLICIES: dict[str, Any] = {
    "none": "none",
    "selective": "selective",
    "selective (mm only)": {"mode": "selective", "save": ["mm"]},
    "selective (attention only)": {"mode": "selective", "save": ["attention"]},
    "selective_attention": "selective_attention",
    "selective_attention (feed_forward)": {"mode": "selective_attention", "modules": ["feed_forward"]},
    "every_k (k=2)": {"mode": "every_k", "k": 2},
    "full": "full",
}


def on_front(name: str, saved: dict[str, int], times: dict[str, float]) -> bool:
    """Whether no other policy is at least as good in both and better in one."""
    return not any(
        saved[o] <= saved[name] and times[o] <= times[name] and (saved[o], times[o]) != (saved[name], times[name])
        for o in saved
    )


def main() -> None:
    """Prints the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    batch = {name: torch.randint(0, CONFIG.vocab_size, SHAPE) for name in ("input_ids", "labels")}
    models, costs = {}, {}
    for name, policy in POLICIES.items():
        model = Transformer(CONFIG)
        init_parameters(model, 0, CONFIG.n_layers)
        plan = make_plan(model, policy)
        costs[name] = plan_cost(model, plan, batch)
        apply_plan(model, plan)
        models[name] = model

    def step(name: str) -> None:
        models[name](**batch).backward()
        models[name].zero_grad()

    others = paired([lambda n=name: step(n) for name in POLICIES], rounds)
    base = Paired((1.0,) * rounds, others[0].base_s)
    ratios = dict(zip(POLICIES, [base, *others], strict=True))
    saved = {name: cost.saved_bytes for name, cost in costs.items()}
    times = {name: ratio.median for name, ratio in ratios.items()}
    table = Table(
        title=f"{CONFIG.n_layers} blocks, d {CONFIG.d_model}, batch {SHAPE[0]} × {SHAPE[1]}, fp32, {rounds} rounds"
    )
    for column in ("policy", "saved MB", "FLOPs", "step", "95 % of the median"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name in POLICIES:
        mark = " *" if on_front(name, saved, times) else ""
        cost, ratio = costs[name], ratios[name]
        table.add_row(
            name + mark,
            f"{cost.saved_bytes / 1e6:.1f}",
            f"{cost.flops / cost.baseline_flops:.3f}",
            f"{ratio.median:.3f}",
            f"{ratio.lower_95:.3f} … {ratio.upper_95:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
