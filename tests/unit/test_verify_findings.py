"""What a proof catches: for each kind of fault a small module that has it; found by name, with cause and advice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import verify
from dist_ckpt.verification import Finding, Verification

WIDTH = 8


class Layer(nn.Module):
    """A block with one part of a kind that a test chooses. x: (batch, seq, width) → the same."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.part = part
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(self.part(torch.tanh(self.into(x)))))


class Model(nn.Module):
    """Three layers of a kind."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(part()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def proof_of(part: Callable[[], nn.Module], plan: Any = "full", **options: Any) -> Verification:
    torch.manual_seed(0)
    return verify(Model(part), torch.randn(2, 5, WIDTH), None, plan, **options)


def finding_at(verification: Verification, where: str) -> Finding:
    """The finding about a place; the report is in the message if there is none."""
    found = [finding for finding in verification.findings if finding.where == where]
    assert found, str(verification)
    return found[0]


class GrowingCache(nn.Module):
    """Keeps its keys in a dict, as attention with a key/value cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = self.key(x)
        if "key" in self.cache:
            key = torch.cat([self.cache["key"], key], dim=1)
        self.cache["key"] = key.detach()
        return torch.softmax(x @ key.transpose(1, 2), -1) @ key


def test_a_cache_that_grows_in_the_recompute() -> None:
    proof = proof_of(GrowingCache)
    found = finding_at(proof, "layers.2.part")  # the first in backward, where torch stops with an error
    assert "cache['key'] was nothing for its forward and float32 (2, 5, 8) for its recompute" in found.what
    assert "use_cache=False" in found.advice
    assert "CheckpointError" in proof.notes[0]


class SlotCache(nn.Module):
    """Overwrites what it keeps: shapes stay the same, and so does the number of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.zeros(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sigmoid(x * (1 + self.memory[0]))
        self.memory[0] = self.memory[0] + out.detach().mean((0, 1))
        return out


def test_a_cache_that_is_overwritten() -> None:
    proof = proof_of(SlotCache)
    found = finding_at(proof, "layers.{0-2}.part")
    assert "other values" in found.what and "memory[0]" in found.what and "register_buffer" in found.advice
    assert any(check.status == "differs" and check.max_abs > 1e-6 for check in proof.gradients)


class CachedResult(nn.Module):
    """Returns what it has computed before, if there is such a thing."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.known:
            self.known[x.shape[1]] = torch.sigmoid(x).exp()
        return self.known[x.shape[1]]


def test_a_module_that_returns_cached_tensors() -> None:
    found = finding_at(proof_of(CachedResult), "layers.2.part")
    assert "known[5] was nothing for its forward and float32 (2, 5, 8) for its recompute" in found.what
    assert "cache" in found.advice


class Router(nn.Module):
    """Sends each token to one of four experts, all of them on all tokens or each on its own.

    Args:
        dense: each expert computes every token, and one result is chosen: shapes do not depend on the choice.
    """

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dense = dense
        self.balance = torch.zeros(4)  # no buffer, so nothing keeps it for the recompute

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(self.router(x))
        pick = (score + self.balance).topk(1, dim=-1).indices.squeeze(-1)
        self.load = torch.bincount(pick.flatten(), minlength=4).float()
        if self.dense:
            every = torch.stack([torch.tanh(expert(x)) for expert in self.experts], -2)
            return every.gather(-2, pick[..., None, None].expand(*pick.shape, 1, WIDTH)).squeeze(-2) * score.amax(
                -1, True
            )
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (pick == number).nonzero(as_tuple=True)
            out = out.index_put(rows, torch.tanh(expert(x[rows])) * score[rows][:, number, None])
        return out


def balanced_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Loss-free balancing, as between two micro-batches: the bias moves after the forward."""
    loss: Tensor = model(x)
    for module in model.modules():
        if isinstance(module, Router):
            module.balance = module.balance + 0.3 * torch.sign(module.load.mean() - module.load)
    return loss


@pytest.mark.parametrize("dense", [True, False])
def test_routing_that_flips_and_the_advice_that_helps(dense: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(lambda: Router(dense)), torch.randn(4, 16, WIDTH)
    proof = verify(model, x, balanced_loss, "full")
    found = finding_at(proof, "layers.{0-2}.part" if dense else "layers.2.part")
    assert "topk chose otherwise" in found.what and "balance" in found.what
    assert '{"mode": "selective", "save": ["topk"]}' in found.advice
    if dense:  # no error of torch's, and wrong gradients
        assert any(check.status == "differs" and check.relative > 1e-3 for check in proof.gradients)
    assert verify(model, x, balanced_loss, {"mode": "selective", "save": ["topk"]}).ok


class Masked(nn.Module):
    """Multiplies with a random mask; ``draw`` gives it."""

    def __init__(self, draw: Callable[[torch.Size], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * self.draw(x.shape)


class Private(nn.Module):
    """Draws from a torch generator of its own, held in a list."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * (torch.rand(x.shape, generator=self.generators[0]) > 0.5)


class NumpyPrivate(Private):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [np.random.default_rng(1)]  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.from_numpy(self.generators[0].random(x.shape, dtype=np.float32))  # type: ignore


def numpy_mask(shape: torch.Size) -> Tensor:
    return torch.from_numpy(np.random.rand(*shape).astype(np.float32))


def python_mask(shape: torch.Size) -> Tensor:
    return torch.tensor([random.random() for _ in range(shape[-1])])


def mask_of_a_closure() -> Callable[[torch.Size], Tensor]:
    generator = random.Random(3)

    def draw(shape: torch.Size) -> Tensor:
        return torch.tensor([generator.random() for _ in range(shape[-1])])

    return draw


_GENERATOR = torch.Generator().manual_seed(5)


def mask_of_a_global(shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR)


@pytest.mark.parametrize(
    ("part", "stream"),
    [
        (Private, "generators[0]"),
        (NumpyPrivate, "generators[0]"),
        (lambda: Masked(numpy_mask), "numpy.random"),
        (lambda: Masked(python_mask), "random"),
        (lambda: Masked(mask_of_a_closure()), "variable 'generator' around mask_of_a_closure.<locals>.draw"),
        (lambda: Masked(mask_of_a_global), f"global '_GENERATOR' of {__name__}"),
    ],
    ids=["torch", "numpy_private", "numpy", "random", "closure", "global"],
)
def test_randomness_that_no_checkpoint_replays(part: Callable[[], nn.Module], stream: str) -> None:
    proof = proof_of(part)
    found = next(finding for finding in proof.findings if stream in finding.what)
    assert found.where == "layers.{0-2}.part", str(proof)
    assert f"draws from {stream}, which no checkpoint replays" in found.what
    assert "torch's own generators" in found.advice
    assert any(name.endswith(stream) for name in proof.streams)


class SkippedByChance(nn.Module):
    """Drop path, with Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if random.random() < 0.5 else x


def test_a_layer_that_is_skipped_by_chance() -> None:
    found = finding_at(proof_of(SkippedByChance), "layers.{0-2}.part")
    assert "draws from random, which no checkpoint replays" in found.what and "torch's own generators" in found.advice


class Alternating(nn.Module):
    """Runs its inner layer every second time, from a state that is no buffer."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.turn = first

    def forward(self, x: Tensor) -> Tensor:
        self.turn = not self.turn
        return x if self.turn else x + self.inner(x)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_only_one_of_both_calls(first: bool) -> None:
    one, other = ("forward", "recompute") if first else ("recompute", "forward")
    found = finding_at(proof_of(lambda: Alternating(first)), "layers.2.part" if first else "layers.{0-2}.part")
    assert f"its {one} called inner, its {other} did not: turn was {first}" in found.what
    assert "register_buffer" in found.advice


class Counting(nn.Module):
    """Counts its tokens in a plain attribute, a list, or a buffer."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.seen = 0
        self.history: list[int] = []
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "attribute":
            self.seen += x.shape[1]
        elif self.where == "list":
            self.history.append(x.shape[1])
        else:
            self.total += x.shape[1]
        return torch.sigmoid(x)


def test_a_load_counter_in_an_attribute() -> None:
    found = finding_at(proof_of(lambda: Counting("attribute")), "layers.{0-2}.part")
    assert "seen was 0 for its forward and 5 for its recompute, which left 10" in found.what
    assert "register_buffer" in found.advice


def test_a_list_that_grows() -> None:
    found = finding_at(proof_of(lambda: Counting("list")), "layers.{0-2}.part")
    assert "history was list of 0 for its forward and list of 1 for its recompute, which left list of 2" in found.what


def test_a_counter_in_a_buffer_is_fine() -> None:
    proof = proof_of(lambda: Counting("buffer"))
    assert proof.ok and proof.buffers == 3, str(proof)


class Ending(nn.Module):
    """A block that ends with a given operation."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.into(x))


class EndingModel(Model):
    def __init__(self, last: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Identity)
        self.layers = nn.ModuleList(Ending(last()) for _ in range(3))


def test_rrelu_as_the_last_operation() -> None:
    torch.manual_seed(0)
    model, x = EndingModel(nn.RReLU), torch.randn(2, 5, WIDTH)
    proof = verify(model, x, None, "full")
    found = finding_at(proof, "layers.{0-2}.last")
    assert "rrelu_with_noise" in found.what and "early_stop=false" in found.advice
    assert verify(model, x, None, {"mode": "full", "early_stop": False}).ok


def test_what_fills_its_arguments_earlier_is_fine() -> None:
    assert proof_of(nn.RReLU).ok


def test_a_norm_as_the_last_operation_is_fine() -> None:
    torch.manual_seed(0)
    proof = verify(EndingModel(lambda: nn.BatchNorm1d(5)), torch.randn(2, 5, WIDTH), None, "full")
    assert proof.ok, str(proof)


class Clock:
    step = 0


class Annealed(nn.Module):
    """Reads a global step counter, which the training code moves on."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * (1 + 1 / (1 + Clock.step)))


def test_a_global_step_counter_that_moves_on() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        Clock.step += 1
        return loss

    torch.manual_seed(0)
    proof = verify(Model(Annealed), torch.randn(2, 5, WIDTH), loss_fn, "full")
    found = finding_at(proof, "layers.{0-2}.part")
    assert "class attribute Clock.step was 0 for its forward and 1 for its recompute" in found.what
    assert "buffer" in found.advice
    assert Clock.step == 0


_calls = 0


class CountingGlobally(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global _calls
        _calls += 1
        return torch.sigmoid(x) / _calls


def test_a_global_that_the_forward_counts_in() -> None:
    found = finding_at(proof_of(CountingGlobally), "layers.{0-2}.part")
    assert f"global '_calls' of {__name__} was 0 for its forward and 3 for its recompute, which left 6" in found.what
    assert _calls == 0


class Edited(nn.Module):
    """Edits a frozen parameter of its own, as a codebook's moving average does."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sigmoid(x * self.code.clone())
        with torch.no_grad():
            self.code.data.mul_(0.5)
        return out


def test_a_frozen_parameter_that_the_forward_edits() -> None:
    found = finding_at(proof_of(Edited), "layers.{0-2}.part")
    assert "code" in found.what and "register_buffer" in found.advice


def test_what_a_guard_refuses_is_a_finding() -> None:
    proof = proof_of(lambda: nn.Dropout(0.5), {"mode": "full", "preserve_rng_state": False})
    found = finding_at(proof, "layers.0")
    assert found.what.startswith("the plan is refused: ") and "preserve_rng_state" in found.what
    assert proof.is_refused and proof.has_failed and "PlanError" in proof.notes[0]


def test_a_hook_inside_a_region_that_collects() -> None:
    seen: list[tuple[int, ...]] = []

    def collect(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(tuple(out.shape))

    torch.manual_seed(0)
    model = Model(nn.Tanh)
    model.layers[1].part.register_forward_hook(collect)
    found = finding_at(verify(model, torch.randn(2, 5, WIDTH), None, "full"), "layers.1.part")
    assert "'seen'" in found.what and "which left list of 2" in found.what
    assert not seen


class Keys:
    """A key/value cache as an object, one for all layers."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def update(self, layer: int, key: Tensor) -> Tensor:
        self.of[layer] = torch.cat([self.of[layer], key], dim=1) if layer in self.of else key
        return self.of[layer]


class Attending(nn.Module):
    """A layer that is handed the model's key/value cache, and fills it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Keys) -> Tensor:
        key = cache.update(self.number, self.key(x))
        return x + torch.softmax(self.query(x) @ key.transpose(1, 2), -1) @ key


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Attending, range(3)))

    def forward(self, x: Tensor, cache: Keys) -> Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().mean()


def test_a_cache_that_is_an_argument() -> None:
    torch.manual_seed(0)
    cache = Keys()
    proof = verify(WithCache(), {"x": torch.randn(2, 5, WIDTH), "cache": cache}, None, "full")
    texts = [str(finding) for finding in proof.findings]
    assert any(text.startswith("layers.") and "'cache'" in text and "use_cache" in text for text in texts), texts
    assert not cache.of


class SharedMask(nn.Module):
    """Hands all layers one mask as a keyword, and edits it behind autograd's back when they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MaskedLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH)
        for layer in self.layers:
            x = layer(x, mask=mask)
        mask.data.zero_()
        return x.square().mean()


class MaskedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.sigmoid(self.into(x)) * mask


def test_an_argument_that_is_edited_after_the_forward() -> None:
    torch.manual_seed(0)
    found = finding_at(verify(SharedMask(), torch.randn(2, 5, WIDTH), None, "full"), "layers.{0-1}")
    assert "argument 'mask' of the region was edited after its forward" in found.what and "copy" in found.advice
