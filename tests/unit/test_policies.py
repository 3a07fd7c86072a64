"""What the options of policies mean for a plan, and plans that are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt import Plan, apply, apply_plan, make_plan, plan_cost
from dist_ckpt.errors import PlanError
from dist_ckpt.planning.measure import freed_bytes
from dist_ckpt.trainer.models.config import Attention, ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.toys import Stack

SIZES = {"n_layers": 4, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 64, "max_seq_len": 32}
IDS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
BATCH = (IDS, IDS)
INPUT = 2 * 32 * 32 * 4


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**(SIZES | options)))


def regions(plan: Plan) -> list[tuple[str, ...]]:
    return [region.modules for region in plan.regions]


def test_first_n_recomputes_the_first_blocks() -> None:
    model = Stack(5)
    plan = make_plan(model, {"mode": "first_n", "n": 2})
    assert regions(plan) == [("blocks.0",), ("blocks.1",)]
    assert plan.unmatched == ("blocks.2", "blocks.3", "blocks.4")
    with pytest.raises(PlanError, match=r"ckpt\.n=6: there are 5 blocks; mode 'full'"):
        make_plan(model, {"mode": "first_n", "n": 6})


def test_excluded_blocks_are_left_alone_under_every_mode() -> None:
    model = transformer()
    for mode in ("full", "every_k", "first_n", "selective", "selective_attention", "segments", "nested", "offload"):
        plan = make_plan(model, {"mode": mode, "exclude": ["layers.0", "layers.3"]})
        assert {"layers.0", "layers.3"} <= set(plan.unmatched), mode
        assert not any(n.startswith(("layers.0", "layers.3")) for names in regions(plan) for n in names)
        assert ("exclude=layers.0", 1) in plan.matched
    with pytest.raises(PlanError, match=r"ckpt\.exclude='layer\.0' matches no module"):
        make_plan(model, {"mode": "full", "exclude": "layer.0"})
    with pytest.raises(PlanError, match=r"ckpt\.exclude='layers\.0\.attention' matches no block; the blocks are"):
        make_plan(model, {"mode": "full", "exclude": ["layers.1", "layers.0.attention"]})
    with pytest.raises(PlanError, match="leaves no block"):
        make_plan(model, {"mode": "full", "exclude": "TransformerBlock"})


def test_small_regions_are_left_out_and_listed() -> None:
    model = transformer()
    whole = plan_cost(model, make_plan(model, "full"), BATCH)
    freed = (whole.baseline_saved_bytes - whole.saved_bytes) // 4
    plan = make_plan(model, {"mode": "full", "min_bytes": freed}, BATCH)
    assert len(plan.regions) == 4 and plan.notes == ()
    plan = make_plan(model, {"mode": "full", "min_bytes": freed + 1}, BATCH)
    assert plan.regions == () and plan.unmatched == plan.blocks
    assert plan.notes == (f"left out layers.{{0-3}}: frees {freed:,} bytes",)
    with pytest.raises(PlanError, match=r"ckpt\.min_bytes=5 needs a batch"):
        make_plan(model, {"mode": "full", "min_bytes": 5})


@pytest.mark.parametrize(
    "policy", [{"mode": "segments", "k": 2}, {"mode": "selective"}, {"mode": "selective_attention"}], ids=str
)
def test_bytes_that_regions_free_add_up_to_what_a_plan_saves(policy: dict[str, Any]) -> None:
    model = transformer()
    plan = make_plan(model, policy)
    cost = plan_cost(model, plan, BATCH)
    assert sum(freed_bytes(model, plan.regions, BATCH, None).values()) == cost.baseline_saved_bytes - cost.saved_bytes


def test_the_best_length_follows_the_measured_bytes() -> None:
    """√(n·input/block): for blocks that keep about their input √n, for those that keep much more shorter ones."""
    narrow = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(16)))
    plan = make_plan(narrow, {"mode": "segments"}, torch.randn(4, 8))
    assert len(plan.regions) == 4, plan.notes
    nested = make_plan(narrow, "nested", torch.randn(4, 8))
    assert len(nested.regions) == 4 and "with regions inside" in nested.notes[0]
    deep = transformer(n_layers=9)
    assert len(make_plan(deep, "segments", BATCH).regions) == 9
    assert len(make_plan(deep, "segments").regions) == len(make_plan(deep, "nested", BATCH).regions) == 3


def test_query_chunks_are_the_innermost_level() -> None:
    model = transformer(attention=Attention.chunked, attention_chunk=8)
    plan = make_plan(model, {"mode": "nested", "k": 2, "inner": ["block", "chunk"]})
    assert [region.modules for region in plan.all_regions()][1:3] == [("layers.0",), ("layers.0.attention.chunk",)]
    assert {region.depth for region in plan.regions} == {3}
    cost = plan_cost(model, plan, BATCH)
    segments = plan_cost(model, make_plan(model, {"mode": "segments", "k": 2}), BATCH)
    assert cost.saved_bytes == segments.saved_bytes
    attention = plan_cost(model, make_plan(model, {"mode": "selective_attention", "modules": "chunk"}), BATCH)
    keys = 8 + 16 + 24 + 32  # that the chunks of 8 queries see
    softmax, mask = 2 * 4 * 8 * keys * 4, 8 * keys
    assert attention.baseline_saved_bytes - attention.saved_bytes == 4 * (softmax + mask), "of every chunk and layer"


def test_a_written_plan_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = make_plan(transformer(), {"mode": "nested", "k": 2, "inner": ["attention", "mlp"]})
    path.write_text(plan.to_json(), encoding="utf-8")
    assert apply(transformer(), {"mode": "plan", "path": str(path)}) == plan
    with pytest.raises(PlanError, match=r"path=.*plan\.json: .*nothing about layers\.\{4-5\}.*of 4 blocks.*has 6"):
        make_plan(transformer(n_layers=6), {"mode": "plan", "path": str(path)})
    with pytest.raises(PlanError, match=r"the plan names 'layers\.2'"):
        make_plan(transformer(n_layers=2), {"mode": "plan", "path": str(path)})
    with pytest.raises(PlanError, match=r"the plan names 'layers\.0"):
        apply_plan(Stack(4), plan)
    with pytest.raises(PlanError, match="No such file"):
        make_plan(transformer(), {"mode": "plan", "path": str(tmp_path / "nothing")})
    with pytest.raises(PlanError, match=r"ckpt\.path is missing"):
        make_plan(transformer(), "plan")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(PlanError, match=r"plan\.json: not a plan"):
        make_plan(transformer(), {"mode": "plan", "path": str(path)})
