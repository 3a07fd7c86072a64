"""What stages save and compute: what is said on tensors without memory is what a pipeline then holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import Plan, PlanError, apply_plan, make_plan, plan_cost
from dist_ckpt.cost import StageCost, stage_costs, stage_table
from dist_ckpt.engines.stage import keep_stage
from dist_ckpt.errors import EngineError
from dist_ckpt.flops import count_flops
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.schedule import in_flight
from dist_ckpt.stages import LayerList, Stages, layers_by_stage, layers_of, partition
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.toys import Block

ROWS, SEQ, VOCAB, MICRO_BATCHES = 2, 12, 32, 3


def transformer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{"n_layers": 4, "vocab_size": VOCAB, "d_model": 32, "n_heads": 2} | options))


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), *(Block(8, 0.1) for _ in range(4)), nn.Linear(8, VOCAB))


def micro_batch(seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.to(device), "labels": ids.clone().to(device)}


class Rank:
    """One stage, with its part of the plan on real tensors."""

    def __init__(self, model: nn.Module, layers: LayerList, plan: Plan, stage: int) -> None:
        assert plan.stages
        self.layers, self.is_last = layers, stage + 1 == len(plan.stages)
        self.own = layers_by_stage(layers, plan.stages)[stage]
        self.model = copy.deepcopy(model)
        keep_stage(self.model, plan.stages, stage)
        apply_plan(self.model, plan.part(stage))

    def forward(self, received: Tensor, labels: Tensor) -> Tensor:
        x = received.detach().clone().requires_grad_(received.is_floating_point()).clone()
        for layer in self.own:
            x = layer.run(self.model, x)
        return self.layers.loss(self.model, x, labels) if self.is_last else x

    def kept(self, roots: list[Tensor]) -> int:
        return saved_bytes(roots, [*self.model.parameters(), *self.model.buffers()]).total


def measured(model: nn.Module, layers: LayerList, plan: Plan) -> list[tuple[int, int, int]]:
    """(peak of saved bytes, micro-batches at that peak, FLOPs of a micro-batch) of each stage, under 1F1B."""
    ranks = [Rank(model, layers, plan, stage) for stage in range(len(plan.stages))]
    batches = [micro_batch(seed) for seed in range(MICRO_BATCHES)]
    given = [batch["input_ids"] for batch in batches]
    found = []
    for stage, rank in enumerate(ranks):
        outputs: list[Tensor] = []
        peak = at_peak = 0
        for x, batch in zip(given, batches, strict=True):
            pending = [out for out in outputs if out.grad_fn is not None][-(in_flight(len(ranks), stage, 99) - 1) :]
            if in_flight(len(ranks), stage, 99) == 1:
                pending = []
            outputs.append(rank.forward(x, batch["labels"]))
            kept = rank.kept([*pending, outputs[-1]])
            if kept > peak:
                peak, at_peak = kept, len(pending) + 1

        def step(rank: Rank = rank, x: Tensor = given[0], labels: Tensor = batches[0]["labels"]) -> None:
            out = rank.forward(x, labels)
            out.backward(torch.ones_like(out))

        found.append((peak, at_peak, count_flops(step)))
        given = outputs
    return found


POLICIES: list[Any] = [
    "none",
    "full",
    "selective",
    {"mode": "segments", "k": 2},
    {"mode": "nested", "k": 2, "inner": ["block", "attention"]},
    {"mode": "selective_attention", "inputs": "offload"},
    {"per_stage": ["full", {"mode": "nested", "k": 2}, "selective", "none"]},
]


CASES = [
    ("sequential", POLICIES[-1]),
    ("tied", POLICIES[-1]),
    *(
        pytest.param(kind, policy, marks=pytest.mark.full)
        for kind in ("transformer", "sequential")
        for policy in POLICIES
    ),
]


@pytest.mark.parametrize(("kind", "policy"), CASES, ids=str)
def test_stages_hold_what_is_said_times_what_is_in_flight(kind: str, policy: Any) -> None:
    model = sequential() if kind == "sequential" else transformer(dropout=0.1, tied=kind == "tied", attention="eager")
    layers = layers_of(model)
    stages = partition(layers, model, 4, (1, 1, 2, 0))
    plan = make_plan(model, policy, stages=stages)
    costs = stage_costs(model, layers, plan, micro_batch(), MICRO_BATCHES)
    for cost, (peak, at_peak, flops) in zip(costs, measured(model, layers, plan), strict=True):
        assert cost.in_flight == at_peak == min(4 - cost.stage, MICRO_BATCHES)
        assert cost.saved_bytes == peak == cost.in_flight * cost.micro_batch.saved_bytes > 0
        assert cost.micro_batch.flops == flops
    assert all(not p.grad for p in model.parameters())


def test_a_stage_saves_at_most_what_it_saves_without_the_plan() -> None:
    model = transformer()
    layers = layers_of(model)
    stages = partition(layers, model, 3, (2, 1, 1))
    plan = make_plan(model, {"per_stage": ["full", "selective", "none"]}, stages=stages)
    first, second, last = stage_costs(model, layers, plan, micro_batch(), 1)
    activation = ROWS * SEQ * 32 * 4
    # What full keeps of two blocks: the input of each, and of the embedding its ids. No dropout is at work.
    assert first.micro_batch.saved_bytes == 2 * activation + ROWS * SEQ * 8
    assert first.micro_batch.input_bytes == 2 * activation
    assert (
        second.micro_batch.cached_bytes > 0 and second.micro_batch.saved_bytes < second.micro_batch.baseline_saved_bytes
    )
    assert last.micro_batch.saved_bytes == last.micro_batch.baseline_saved_bytes
    assert (last.micro_batch.recomputed_flops, first.micro_batch.recomputed_flops > 0) == (0, True)
    nothing = stage_costs(model, layers, Plan(stages=stages), micro_batch(), 1)
    assert [cost.micro_batch.saved_bytes for cost in nothing] == [
        cost.micro_batch.baseline_saved_bytes for cost in (first, second, last)
    ]


def test_stages_together_compute_what_the_model_does() -> None:
    model = transformer()
    layers = layers_of(model)
    plan = make_plan(model, "selective", stages=partition(layers, model, 3, "parameters"))
    costs = stage_costs(model, layers, plan, micro_batch(), 4)
    whole = plan_cost(model, plan, micro_batch())
    assert sum(cost.micro_batch.flops for cost in costs) == whole.flops
    assert sum(cost.micro_batch.baseline_flops for cost in costs) == whole.baseline_flops
    assert sum(cost.parameters for cost in costs) == sum(p.numel() for p in model.parameters())


def test_a_model_without_memory_costs_the_same() -> None:
    model = transformer()
    with torch.device("meta"):
        empty = Transformer(model.config)
    layers = layers_of(model)
    plan = make_plan(model, "full", stages=partition(layers, model, 2, "uniform"))
    on_meta = stage_costs(empty, layers_of(empty), plan, micro_batch(device="meta"), 4)
    assert on_meta == stage_costs(model, layers, plan, micro_batch(), 4)


def test_a_tied_weight_counts_in_each_of_its_stages() -> None:
    model = transformer(tied=True)
    layers = layers_of(model)
    costs = stage_costs(model, layers, Plan(stages=partition(layers, model, 2, "uniform")), micro_batch(), 1)
    assert sum(cost.parameters for cost in costs) == sum(p.numel() for p in model.parameters()) + VOCAB * 32


def test_the_table_has_a_line_a_stage() -> None:
    cost = plan_cost(transformer(), Plan(), micro_batch())
    table = stage_table([StageCost(0, cost, 4, 1234), StageCost(1, cost, 1, 56)])
    lines = table.splitlines()
    assert lines[0] == "activations per stage, MiB, and recomputed FLOPs" and len(lines) == 4
    assert lines[2].split() == [
        "0",
        "1,234",
        *(f"{cost.saved_bytes / 2**20:.3f}",) * 2,
        "×",
        "4",
        f"{4 * cost.saved_bytes / 2**20:.3f}",
        "+0.0%",
    ]
    assert len({len(line) for line in lines[1:]}) == 1


def test_plans_without_or_with_other_stages_are_refused() -> None:
    model = transformer()
    layers = layers_of(model)
    with pytest.raises(PlanError, match=r"takes a plan with stages"):
        stage_costs(model, layers, make_plan(model, "full"), micro_batch(), 1)
    wrong: Stages = (("tok_embeddings", "dropout"), ("layers.1",))
    with pytest.raises(EngineError, match=r"not those of this model's layers: stage 0 does not own 'layers.0'"):
        stage_costs(model, layers, Plan(stages=wrong), micro_batch(), 1)
