"""Whatever a block takes and returns, and however often it is called: the same as without a policy, or a reason."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt import PlanError, apply, named_parameters
from dist_ckpt.memory.activations import saved_bytes
from tests.unit.toys import Block

pytestmark = pytest.mark.filterwarnings("ignore:.* is not given what:UserWarning")  # segments that a loop cuts

MODES: list[Any] = ["full", "selective", {"mode": "segments", "k": 2}, {"mode": "nested", "k": 2}]


@dataclass
class Output:
    """What a block returns, as a dataclass."""

    hidden: Tensor
    extra: Tensor | None = None


class Pair(NamedTuple):
    hidden: Tensor
    scale: float


class Layer(Block):
    """A block with a dropout whose result ``shape`` puts into a container."""

    def __init__(self, give: Callable[[Tensor], Any], p: float = 0.3) -> None:
        super().__init__(p=p)
        self.give = give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["x"]
        scale = kwargs.get("scale", 1.0)
        mask = kwargs.get("mask")
        x = super().forward(x) * scale
        if mask is not None:
            x = x * mask
        return self.give(x)


class Net(nn.Module):
    """Calls its layers by ``call``, which also takes their results apart."""

    def __init__(self, give: Callable[[Tensor], Any], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(give) for _ in range(4))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def as_it_is(x: Tensor) -> Any:
    return x


GIVES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (as_it_is, lambda out: out),
    "tuple": (lambda x: (x, None, "note"), lambda out: out[0]),
    "list": (lambda x: [x, [x.mean()]], lambda out: out[0] + out[1][0]),
    "dict": (lambda x: {"hidden": x, "extra": x.std()}, lambda out: out["hidden"] + out["extra"]),
    "dataclass": (lambda x: Output(x, x.tanh()), lambda out: out.hidden + out.extra),
    "namedtuple": (lambda x: Pair(x, 0.5), lambda out: out.hidden * out.scale),
    "number": (lambda x: (x, 3, 0.5, True), lambda out: out[0] * out[1]),
    "views": (lambda x: x.chunk(2, dim=-1), lambda out: torch.cat(out, dim=-1)),
    "unused": (lambda x: (x, x.exp(), x.detach()), lambda out: out[0]),
}

CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "keywords": lambda layer, x: layer(x=x, scale=torch.full((8,), 1.5), mask=(x > -1).float()),
    "numbers": lambda layer, x: layer(x, scale=2, note="text", flag=True, nothing=None),
    "containers": lambda layer, x: layer(x, pair=(x, [x, {"deep": x}]), scale=x.mean()),
    "objects": lambda layer, x: layer(x, options=Output(x.detach()), kind=torch.float32, device=x.device),
    "an integer tensor": lambda layer, x: layer(x, scale=torch.tensor(2)),
    "twice": lambda layer, x: layer(layer(x).tanh()),
    "twice on one input": lambda layer, x: layer(x) + layer(x),
    "with the middle changed": lambda layer, x: layer(x.relu() + 1) * 0.5,
    "in place after": lambda layer, x: layer(x).mul_(2.0),
}


def results(model: nn.Module, width: int = 8, requires_grad: bool = True) -> dict[str, Tensor]:
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(2)).requires_grad_(requires_grad)
    torch.manual_seed(3)
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    found = {name: p.grad.clone() for name, p in named_parameters(model) if p.grad is not None}
    return {"out": out.detach(), **found, **({"x": x.grad} if x.grad is not None else {})}


def assert_same(model: nn.Module, plain: nn.Module, **options: Any) -> None:
    found, expected = results(model, **options), results(plain, **options)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def pair_of(make: Callable[[], nn.Module], mode: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    plain = make().train()
    model = copy.deepcopy(plain)
    apply(model, mode)
    return model, plain


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("give", GIVES)
def test_a_block_may_return_anything(give: str, mode: Any) -> None:
    make, take = GIVES[give]
    model, plain = pair_of(lambda: Net(make, lambda layer, x: take(layer(x))), mode)
    assert_same(model, plain)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_block_may_be_called_in_any_way(call: str, mode: Any) -> None:
    model, plain = pair_of(lambda: Net(as_it_is, CALLS[call]), mode)
    assert_same(model, plain)
    assert_same(model, plain, requires_grad=False)


class Memory:
    """An argument with state of every kind."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.total = torch.zeros(2, 5, 8)
        self.count = 0
        self.by_name: dict[str, Any] = {"deep": [{}]}


class Slotted:
    """State without a dictionary."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def count(memory: Any, y: Tensor) -> None:
    memory.count += 1


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "a list that grows": (Memory, lambda memory, y: memory.seen.append(y.detach())),
    "a tensor in place": (Memory, lambda memory, y: memory.total.add_(y.detach())),
    "a number": (Memory, count),
    "a new attribute": (Memory, lambda memory, y: setattr(memory, "last", y.detach())),
    "something deep inside": (Memory, lambda memory, y: memory.by_name["deep"][0].update(last=1)),
    "a slot": (Slotted, count),
    "in a tuple": (lambda: (1, Memory()), lambda memory, y: count(memory[1], y)),
    "in a list": (lambda: [Memory()], lambda memory, y: count(memory[0], y)),
}


class Remembers(Layer):
    """Changes an argument, as a cache is changed."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(as_it_is)
        self.change = change

    def forward(self, x: Tensor, memory: Any) -> Tensor:
        y = super().forward(x)
        self.change(memory, y)
        return y + (0.1 * memory["last"] if isinstance(memory, dict) else 0)


class WithMemory(nn.Module):
    """Its layers share one object that they change."""

    def __init__(self, make: Callable[[], Any], change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.make = nn.ModuleList(Remembers(change) for _ in range(4)), make

    def forward(self, x: Tensor) -> Tensor:
        memory = self.make()
        for layer in self.layers:
            x = layer(x, memory)
        return x


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_an_object_that_a_block_changes_is_refused(change: str, mode: Any) -> None:
    model, _ = pair_of(lambda: WithMemory(*CHANGES[change]), mode)
    with pytest.raises(PlanError, match=r"a recomputed Remembers changes its argument 'memory' \((Memory|Slotted)\)"):
        results(model)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_plain_container_that_a_block_changes_is_replayed(mode: Any) -> None:
    def change(memory: dict[str, Any], y: Tensor) -> None:
        memory["last"] = y.detach() + memory.get("last", 0)

    model, plain = pair_of(lambda: WithMemory(dict, change), mode)
    assert_same(model, plain)


class Shared(nn.Module):
    """One block registered in three places, and a weight that two blocks and the head share."""

    def __init__(self) -> None:
        super().__init__()
        first = Layer(as_it_is)
        self.layers = nn.ModuleList([first, Layer(as_it_is), first, Layer(as_it_is), first])
        self.layers[3].mlp[0].weight = self.layers[1].mlp[0].weight
        self.head = nn.Linear(8, 16)
        self.head.weight = self.layers[1].mlp[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_shared_modules_and_tied_weights(mode: Any) -> None:
    model, plain = pair_of(Shared, mode)
    assert_same(model, plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.layers[0] is model.layers[2] and model.head.weight is model.layers[1].mlp[0].weight


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_autocast_is_what_it_was_in_the_forward(mode: Any) -> None:
    model, plain = pair_of(lambda: Net(as_it_is, lambda layer, x: layer(x)), mode)
    found = []
    for one in (model, plain):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(x).float().square().mean()
        loss.backward()  # outside of autocast, as everybody does
        found.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_copies_and_pickles_train_as_the_original(mode: Any) -> None:
    torch.manual_seed(1)
    model = Shared().train()
    plain = copy.deepcopy(model)
    apply(model, mode)
    x = torch.randn(2, 5, 8)
    kept = saved_bytes([model(x).sum()], model.parameters()).total
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(twin, plain)
        assert saved_bytes([twin(x).sum()], twin.parameters()).total == kept
        assert twin.layers[0] is twin.layers[2] and twin.layers[0] is not model.layers[0]


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("give", ["tensor", "tuple", "dict"])
def test_compiled_blocks_return_the_same(give: str, mode: Any) -> None:
    torch._dynamo.reset()
    make, take = GIVES[give]
    model, plain = pair_of(lambda: Net(make, lambda layer, x: take(layer(x))), mode)
    for one in (model, plain):
        for layer in one.layers:
            layer.compile(backend="aot_eager")
    found, expected = results(model), results(plain)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
