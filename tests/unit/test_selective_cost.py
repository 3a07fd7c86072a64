"""Every option of ``selective``: saved bytes and recomputed FLOPs by arithmetic, on fake and on real tensors."""

from __future__ import annotations

from typing import Any

import pytest

from dist_ckpt.cost import plan_cost
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.test_cost import Formula, batch_for, run_for_real

CONFIG = ModelConfig(n_layers=2)
FORMULA = Formula(CONFIG)
PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""A block's matrix products, in the order in which they run; attention runs before ``wo``."""


def floats(name: str) -> int:
    """Numbers a token that a result has."""
    d, f = CONFIG.d_model, CONFIG.d_ff
    kv = FORMULA.kv_dim
    sizes = {"wq": d, "wk": kv, "wv": kv, "wo": d, "w1": f, "w3": f, "w2": d, "attention": d + CONFIG.n_heads}
    return sizes[name]


def flops(name: str) -> int:
    if name == "attention":
        return FORMULA.attention_flops
    inside = CONFIG.d_ff if name == "w2" else CONFIG.d_model
    return 2 * FORMULA.tokens * inside * floats(name)


CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, (*PRODUCTS, "attention")),
    ({"save": ["matmul", "attention"]}, (*PRODUCTS, "attention")),
    ({"save": ["torch.ops.aten.mm.default"]}, PRODUCTS),
    ({"save": ["attention"]}, ("attention",)),
    ({"every_nth_matmul": 2}, ("wq", "wv", "w1", "w2", "attention")),
    ({"every_nth_matmul": 3, "save": ["mm"]}, ("wq", "wo", "w2")),
    ({"recompute_matmuls_of": "feed_forward"}, ("wq", "wk", "wv", "wo", "attention")),
    ({"recompute_matmuls_of": ["attention.w?", "feed_forward.w1"]}, ("w3", "w2", "attention")),
    ({"recompute_matmuls_of": "mlp", "every_nth_matmul": 2}, ("wq", "wv", "attention")),
    ({"offload": ["attention"]}, (*PRODUCTS, "attention")),
    ({"offload": ["matmul"], "save": ["attention"]}, (*PRODUCTS, "attention")),
    ({"offload": ["mm"], "save": [], "recompute_matmuls_of": "attention"}, ("w1", "w3", "w2")),
]


@pytest.mark.parametrize(("options", "kept"), CASES, ids=[str(options) for options, _ in CASES])
def test_saved_bytes_and_flops_follow_the_closed_formula(options: dict[str, Any], kept: tuple[str, ...]) -> None:
    """``w2``, the last product, is neither asked for by backward nor recomputed: it costs nothing either way."""
    model = Transformer(CONFIG)
    cost = plan_cost(model, make_plan(model, {"mode": "selective"} | options), batch_for(CONFIG))
    cached = sum(4 * FORMULA.tokens * floats(name) for name in kept if name != "w2")
    recomputed = sum(flops(name) for name in (*PRODUCTS, "attention") if name not in kept and name != "w2")
    assert cost.cached_bytes == CONFIG.n_layers * cached
    assert cost.saved_bytes == FORMULA.saved("full") + CONFIG.n_layers * cached
    assert cost.recomputed_flops == CONFIG.n_layers * recomputed
    assert run_for_real(CONFIG, {"mode": "selective"} | options) == (cost.saved_bytes, cost.flops)


@pytest.mark.parametrize(
    ("options", "waiting"),
    [
        ({"offload": ["attention"]}, ("attention",)),
        ({"offload": ["matmul"]}, PRODUCTS),
        ({"offload": ["matmul"], "recompute_matmuls_of": "feed_forward"}, ("wq", "wk", "wv", "wo")),
    ],
)
def test_what_waits_in_host_memory_is_counted(options: dict[str, Any], waiting: tuple[str, ...]) -> None:
    """Results of less than 64 KiB stay on the device; here a token's smallest result is wide enough."""
    batch = {name: tensor.repeat(8, 1) for name, tensor in batch_for(CONFIG).items()}
    tokens = 8 * FORMULA.tokens
    model = Transformer(CONFIG)
    cost = plan_cost(model, make_plan(model, {"mode": "selective"} | options), batch)
    large = [name for name in waiting if name != "w2"]
    sizes = [CONFIG.d_model if name == "attention" else floats(name) for name in large]  # its log-sum-exp is small
    assert all(4 * tokens * size >= 2**16 for size in sizes)
    assert cost.offloaded_bytes == CONFIG.n_layers * sum(4 * tokens * size for size in sizes)
