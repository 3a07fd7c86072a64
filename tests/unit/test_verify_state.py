"""A proof finds state that a recompute changes again, or finds changed: caches, counters, arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt import Plan, Region, verify
from tests.unit.proofs import WIDTH, Model, finding_at, proof_of


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


class Context:
    step = 0.0


class InContext(nn.Module):
    """Hands its layers an object that they read, and moves it on when they have run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadingLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        context = Context()
        for layer in self.layers:
            x = layer(x, context)
        context.step = 3.0
        return x.square().mean()


class ReadingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return torch.sigmoid(self.into(x) * (1 + context.step))


def test_an_object_that_is_an_argument_and_changes_after_the_forward() -> None:
    torch.manual_seed(0)
    found = finding_at(verify(InContext(), torch.randn(2, 5, WIDTH), None, "full"), "layers.{0-1}")
    assert "argument 'context' of layers.0.step was nothing for its forward and 3.0" in found.what


class OneLayer(nn.Module):
    """A model that is one region, its root."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.sigmoid(self.into(x) / self.calls)


def test_a_fault_in_the_models_own_forward() -> None:
    proof = verify(OneLayer(), torch.randn(2, 5, WIDTH), None, Plan(regions=(Region(("",)),)))
    assert "calls was 0 for its forward" in finding_at(proof, "the model").what


class CountingInItsClass(nn.Module):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        return torch.sigmoid(x)


def test_a_class_attribute_that_the_forward_counts_in() -> None:
    found = finding_at(proof_of(CountingInItsClass), "layers.{0-2}.part")
    assert "class attribute CountingInItsClass.seen was 0 for its forward and 3" in found.what
    assert "which left 6" in found.what and CountingInItsClass.seen == 0


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
