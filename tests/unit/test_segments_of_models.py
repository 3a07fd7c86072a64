"""Segments of models that know nothing of them: the same gradients, and saved bytes exactly those of their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import apply
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.llama import Transformer
from tests.unit.toys import Residual

transformers = pytest.importorskip("transformers")

N, WIDTH, ROWS, SEQ = 6, 32, 2, 16
HIDDEN = ROWS * SEQ * WIDTH * 4
IDS = torch.randint(0, 64, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Case:
    """A model of six blocks."""

    model: nn.Module
    loss_of: Loss
    hidden: int
    """Bytes of a block's input."""
    given: int = 0
    """Bytes of what every block is given besides: kept once, whatever the segments."""
    unused: int = 0
    """Of these, what no block would keep by itself."""


def language_model_loss(model: nn.Module) -> Tensor:
    # A cache, which a plan switches off in training, has keys and values summed up in another order.
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def ours() -> Case:
    sizes = {"n_layers": N, "d_model": WIDTH, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "vocab_size": 64}
    return Case(Transformer(ModelConfig(**sizes, max_seq_len=SEQ, dropout=0.1)), lambda m: m(IDS, IDS), HIDDEN)


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_layer=N, n_embd=WIDTH, n_head=4, vocab_size=64, n_positions=SEQ, bos_token_id=0, eos_token_id=0
    )
    return Case(transformers.GPT2LMHeadModel(config), language_model_loss, HIDDEN)


def llama() -> Case:
    config = transformers.LlamaConfig(
        num_hidden_layers=N,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=64,
    )
    tables, positions = 2 * SEQ * (WIDTH // 4) * 4, SEQ * 8
    return Case(transformers.LlamaForCausalLM(config), language_model_loss, HIDDEN, tables + positions, positions)


def sequential() -> Case:
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True) for _ in range(N))
    x = torch.randn(ROWS, SEQ, WIDTH, generator=torch.Generator().manual_seed(0))
    first = nn.Linear(WIDTH, WIDTH)
    return Case(nn.Sequential(first, *layers), lambda m: m(x).square().sum(), HIDDEN)


def resnet() -> Case:
    class Normed(Residual):
        def __init__(self) -> None:
            super().__init__(8)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*(Normed() for _ in range(N))))
    return Case(model, lambda m: m(IMAGES).square().sum(), 2 * 8 * 16 * 16 * 4)


def run(case: Case, policy: Any) -> tuple[SavedBytes, dict[str, Tensor]]:
    model = copy.deepcopy(case.model)
    apply(model, policy)
    torch.manual_seed(1)
    loss = case.loss_of(model)
    saved = saved_bytes([loss], [*model.parameters(), *model.buffers(), IDS])
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return saved, {"loss": loss.detach()} | {name: t for name, t in found.items() if t is not None}


@pytest.mark.parametrize("build", [ours, gpt2, llama, sequential, resnet], ids=lambda build: build.__name__)
def test_saved_bytes_are_those_of_the_inputs(build: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    case = build()
    none, expected = run(case, "none")
    full, _ = run(case, "full")
    freed, rest = divmod(none.total - full.total + case.unused, N)  # a block keeps its input either way
    assert rest == 0
    for k in (2, 3, 6):
        saved, found = run(case, {"mode": "segments", "k": k})
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert saved.inputs == N // k * case.hidden + case.given
        assert saved.total == full.total - (N - N // k) * case.hidden
        if k < N:
            but_last, found = run(case, {"mode": "segments", "k": k, "skip_last": True})
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert but_last.total - saved.total == k * freed + (k - 1) * case.hidden, "the last, as without a policy"
