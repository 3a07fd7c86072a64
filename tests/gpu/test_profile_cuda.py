"""The deep step on a real device: the allocator's own figures, to the byte. Skipped where there is no GPU."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.memory.profile.step_profile import KINDS
from dist_ckpt.planning import apply
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")

CONFIG = ModelConfig(n_layers=4, d_model=256, d_ff=1024)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_a_step_is_what_the_allocator_says(policy: str, tmp_path: Path) -> None:
    model = Transformer(CONFIG).cuda()
    init_parameters(model, 0, CONFIG.n_layers)
    apply(model, policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = MemoryMeter(model, optimizer)
    batch = {name: torch.randint(0, CONFIG.vocab_size, (8, 512)).cuda() for name in ("input_ids", "labels")}

    def step() -> tuple[int, int]:
        """What the allocator says of it: the peak, and what is live at the boundary, which has its peak begin anew."""
        torch.cuda.reset_peak_memory_stats()
        loss = model(**batch)
        meter.after_forward(loss)
        loss.backward()
        del loss
        live, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        meter.boundary(1)
        optimizer.step()
        optimizer.zero_grad()
        return max(peak, torch.cuda.max_memory_allocated()), live

    step()
    before = torch.cuda.memory_allocated()
    history = tmp_path / "history.pickle"
    with meter.profile(batch, history) as deep:
        peak, live = step()
    assert deep.profile.start_bytes == before
    assert deep.profile.end_bytes == torch.cuda.memory_allocated()
    assert (deep.memory.peak, deep.memory.live) == (peak, live)
    assert deep.memory.at_peak is not None
    assert sum(deep.memory.at_peak[kind] for kind in KINDS) == peak
    assert deep.profile.peak_bytes == pytest.approx(peak, rel=0.005)
    assert abs(deep.memory.at_peak["unattributed"]) <= 0.02 * peak
    assert any(pickle.loads(history.read_bytes())["device_traces"])
