"""``plan_cost`` against closed formulas and against what real tensors do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.cost import PlanCost, plan_cost
from dist_ckpt.errors import PlanError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.plan import Plan
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import Attention, Loss, ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer
from dist_ckpt.wrap.apply import apply_plan

POLICIES: list[Any] = [
    "none",
    "full",
    {"mode": "every_k", "k": 3},
    "selective",
    {"mode": "selective", "save": ["aten.mm.default"]},
    "selective_attention",
    {"mode": "selective_attention", "modules": ["feed_forward"]},
]
BATCH, SEQ = 2, 48


def batch_for(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, SEQ)
    return {n: torch.randint(0, config.vocab_size, shape, generator=generator) for n in ("input_ids", "labels")}


@dataclass(frozen=True)
class Formula:
    """Saved bytes and FLOPs of ``tiny`` (fp32, fused attention, full loss, no dropout) by arithmetic."""

    c: ModelConfig
    tokens: int = BATCH * SEQ

    @property
    def kv_dim(self) -> int:
        return self.c.n_kv_heads * self.c.head_dim

    @property
    def qkv_flops(self) -> int:
        return 2 * self.tokens * self.c.d_model * (self.c.d_model + 2 * self.kv_dim)

    @property
    def attention_flops(self) -> int:
        """Two products of (seq, head_dim) and (head_dim, seq) matrices per head."""
        return 2 * 2 * BATCH * self.c.n_heads * SEQ * SEQ * self.c.head_dim

    @property
    def out_flops(self) -> int:
        return 2 * self.tokens * self.c.d_model * self.c.d_model

    @property
    def ffn_matrix_flops(self) -> int:
        return 2 * self.tokens * self.c.d_model * self.c.d_ff

    @property
    def none_flops(self) -> int:
        """Backward: twice each linear layer; flash attention five products, as it makes the scores anew."""
        linear = self.c.n_layers * (self.qkv_flops + self.out_flops + 3 * self.ffn_matrix_flops)
        linear += 2 * self.tokens * self.c.d_model * self.c.vocab_size
        attention = self.c.n_layers * self.attention_flops
        return 3 * linear + attention + attention * 5 // 2

    def recomputed_flops(self, mode: str) -> int:
        """A recompute ends at the last tensor that backward needs: w2 (full) and wo (attention) are not run again."""
        full = self.qkv_flops + self.attention_flops + self.out_flops + 2 * self.ffn_matrix_flops
        per_block = {
            "none": 0,
            "full": full,
            "selective": 0,
            "selective_attention": self.qkv_flops + self.attention_flops,
        }
        return self.c.n_layers * per_block[mode]

    def saved(self, mode: str) -> int:
        assert mode in ("full", "selective")
        residual = 4 * self.tokens * self.c.d_model
        norm = 4 * self.tokens + 3 * residual  # 1/rms; its input, the normalised input and the output
        loss = 4 * self.tokens * self.c.vocab_size + 8 * self.tokens + 4  # log-probabilities, labels, their weight
        outside = 8 * self.tokens + norm + loss  # the embedding keeps the ids
        inputs = self.c.n_layers * residual
        heads = self.c.d_model + 2 * self.kv_dim + self.c.d_model + self.c.n_heads  # q, k, v, output, log-sum-exp
        kept = 4 * self.tokens * (heads + self.c.d_model + 2 * self.c.d_ff)  # … of wo, w1 and w3; not of w2
        return outside + inputs + (self.c.n_layers * kept if mode == "selective" else 0)


@pytest.mark.parametrize("mode", ["none", "full", "selective", "selective_attention"])
def test_flops_follow_the_closed_formula(mode: str) -> None:
    config = ModelConfig()
    model = Transformer(config)
    cost = plan_cost(model, make_plan(model, mode), batch_for(config))
    formula = Formula(config)
    assert cost.baseline_flops == formula.none_flops
    assert cost.recomputed_flops == formula.recomputed_flops(mode)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_saved_bytes_follow_the_closed_formula(mode: str) -> None:
    config = ModelConfig()
    model = Transformer(config)
    assert plan_cost(model, make_plan(model, mode), batch_for(config)).saved_bytes == Formula(config).saved(mode)


def run_for_real(config: ModelConfig, policy: Any) -> tuple[int, int]:
    """Saved bytes and FLOPs of one step on real tensors."""
    model = Transformer(config)
    init_parameters(model, 0, config.n_layers)
    apply_plan(model, make_plan(model, policy))
    saved: list[int] = []

    def step() -> None:
        loss = model(**batch_for(config))
        saved.append(saved_bytes([loss], [*model.parameters(), *model.buffers()]).total)
        loss.backward()

    flops = count_flops(step)
    return saved[0], flops


VARIANTS = [
    {},
    {"dropout": 0.1},
    {"attention": Attention.eager, "dropout": 0.1, "loss": Loss.chunked, "loss_chunk": 40},
    {"attention": Attention.chunked, "attention_chunk": 20, "tied": True},
]


@pytest.mark.parametrize(
    "variant",
    [VARIANTS[0], VARIANTS[1], *(pytest.param(variant, marks=pytest.mark.full) for variant in VARIANTS[2:])],
    ids=["plain", "dropout", "eager-chunked_loss", "chunked-tied"],
)
def test_cost_on_fake_tensors_is_what_real_ones_do(variant: dict[str, Any]) -> None:
    config = ModelConfig(n_layers=3, **variant)
    for policy in POLICIES:
        model = Transformer(config)
        cost = plan_cost(model, make_plan(model, policy), batch_for(config))
        assert (cost.saved_bytes, cost.flops) == run_for_real(config, policy), policy


def test_meta_whole_and_applied_models_cost_the_same() -> None:
    config = ModelConfig(n_layers=2)
    whole = Transformer(config)
    plan = make_plan(whole, "selective")
    expected = plan_cost(whole, plan, batch_for(config))
    meta = Transformer(config).to("meta")
    meta_batch = {name: tensor.to("meta") for name, tensor in batch_for(config).items()}
    assert plan_cost(meta, plan, meta_batch) == expected
    apply_plan(whole, plan)
    assert plan_cost(whole, plan, batch_for(config)) == expected


def test_nothing_of_the_model_or_the_generators_is_touched() -> None:
    config = ModelConfig(n_layers=2, dropout=0.5)
    model = Transformer(config).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    plan_cost(model, make_plan(model, "full"), batch_for(config))
    assert torch.equal(torch.get_rng_state(), rng)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.layers[0]) is type(Transformer(config).layers[0])


def test_cost_prints_shares() -> None:
    common = {"input_bytes": 0, "cached_bytes": 0}
    cost = PlanCost(saved_bytes=2**20, flops=150, baseline_saved_bytes=2**22, baseline_flops=100, **common)
    text = str(cost)
    assert "25.0%" in text and "recomputes 50 FLOPs (+50.0%" in text


class ValueDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x[x > 0]


def test_what_fake_tensors_keep_less_of_is_named() -> None:
    model = nn.Sequential(nn.LSTM(8, 8))
    cost = plan_cost(model, Plan(), torch.randn(3, 2, 8), lambda m, x: m(x)[0].sum())
    assert cost.opaque == ("MkldnnRnnLayerBackward0",)


def test_a_forward_that_depends_on_values_is_refused_by_name() -> None:
    model = ValueDependent()
    with pytest.raises(PlanError, match="its forward depends on them"):
        plan_cost(model, make_plan(model, "full"), torch.randn(3, 4))


def test_outputs_with_a_loss_and_positional_batches_are_understood() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    plan = make_plan(model, "full")
    by_tensor = plan_cost(model, plan, torch.randn(3, 4))
    assert by_tensor == plan_cost(model, plan, (torch.randn(3, 4),))
    assert by_tensor == plan_cost(model, plan, torch.randn(3, 4), lambda m, x: m(x).sum())
    # Inputs of both blocks; the last ReLU's output is the second block's, and lives only through the sum: not saved.
    assert by_tensor.saved_bytes == 2 * 3 * 4 * 4


@pytest.mark.full
def test_the_default_of_selective_is_not_dominated() -> None:
    """No other policy keeps no more and computes no more; what it recomputes costs no FLOPs at all."""
    config = ModelConfig()
    model = Transformer(config)
    costs = {str(p): plan_cost(model, make_plan(model, p), batch_for(config)) for p in POLICIES}
    default = costs.pop("selective")
    assert default.recomputed_flops == 0 and default.saved_bytes < 0.6 * default.baseline_saved_bytes
    for name, other in costs.items():
        assert other.saved_bytes > default.saved_bytes or other.flops > default.flops, name
