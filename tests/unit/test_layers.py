"""Which layers a model repeats, told by what lies side by side, whatever the modules are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.layers import repeated_layers
from tests.unit.toys import Block, Residual, Stack


class Conv(nn.Sequential):
    """One convolution with its activation, as an author would name it."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())


class Double(nn.Sequential):
    """Two of them."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(Conv(a, b), Conv(b, b))


class Down(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.MaxPool2d(2), Double(a, b))


class Numbered(nn.Module):
    """A U-Net written out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_0 = Double(1, 2)
        self.down_1, self.down_2, self.down_3 = Down(2, 4), Down(4, 8), Down(8, 16)
        self.up_3, self.up_2, self.up_1 = Double(24, 8), Double(12, 4), Double(6, 2)
        self.fc1, self.fc2 = nn.Linear(2, 2), nn.Linear(2, 2)


class Skip(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


def nested(channels: int, depth: int) -> nn.Module:
    """Levels inside each other, each with a block down and a stack of modules up."""
    if depth == 0:
        return Double(channels, channels)
    up = nn.Sequential(nn.ConvTranspose2d(2 * channels, channels, 2), Double(channels, channels))
    return nn.Sequential(Double(channels, 2 * channels), Skip(nested(2 * channels, depth - 1)), up)


class Stage(nn.Module):
    """A stage of a ResNet or a Swin transformer: layers of one width, and a step to the next."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.grow = nn.Linear(width, 2 * width)


class Mixture(nn.Module):
    """A layer with experts of its own in a list beside its attention."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 16), nn.Linear(16, width)) for _ in range(4))


def module(**parts: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def names(prefix: str, count: int) -> set[str]:
    return {f"{prefix}{i}" for i in range(count)}


def shared() -> nn.Module:
    block = Block()
    return module(layers=nn.ModuleList([block, block, block]))


def lazy() -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4)) for _ in range(3))


def towers() -> nn.Module:
    return module(**{f"encoder{i}": module(layers=nn.ModuleList(Block() for _ in range(2))) for i in (1, 2)})


def pyramid() -> nn.Module:
    return module(
        stages=nn.ModuleList(Stage(4 * 2**i, depth) for i, depth in enumerate((1, 2, 1))), head=nn.Linear(4, 4)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a list": (lambda: Stack(3), names("blocks.", 3)),
    "a list of one": (lambda: Stack(1), {"blocks.0"}),
    "a dictionary": (lambda: module(d=nn.ModuleDict({"a": Block(), "b": Block()})), {"d.a", "d.b"}),
    "a sequence between others": (
        lambda: nn.Sequential(nn.Linear(4, 8), Block(), Block(), module(head=nn.Linear(8, 2))),
        {"1", "2"},
    ),
    "two lists": (lambda: module(a=Stack(2), b=Stack(3)), names("a.blocks.", 2) | names("b.blocks.", 3)),
    "two towers with numbers": (towers, {f"encoder{t}.layers.{i}" for t in (1, 2) for i in range(2)}),
    "numbered attributes": (
        Numbered,
        {"conv_0", "down_1", "down_2", "down_3", "up_1", "up_2", "up_3"},
    ),
    "levels in each other": (lambda: nested(2, 2), {"0", "1.inside.0", "1.inside.1.inside", "1.inside.2", "2"}),
    "stages of layers": (pyramid, {"stages.0.layers.0", "stages.1.layers.0", "stages.1.layers.1", "stages.2.layers.0"}),
    "equal sequences are blocks": (
        lambda: nn.Sequential(*(nn.Sequential(Residual(4), Residual(4)) for _ in range(3))),
        names("", 3),
    ),
    "layers with experts": (lambda: module(layers=nn.ModuleList(Mixture() for _ in range(3))), names("layers.", 3)),
    "one layer with experts": (lambda: module(layers=nn.ModuleList([Mixture()])), {"layers.0"}),
    "layers of one weight": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))),
        names("", 3),
    ),
    "one block in many places": (shared, {"layers.0"}),
    "weights without shapes": (lazy, names("", 3)),
    "nothing but operations": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), set()),
    "one cell": (lambda: module(cell=nn.LSTMCell(4, 4), head=nn.Linear(4, 4)), set()),
    "no modules": (nn.Module, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_repeated_layers(case: str) -> None:
    make, expected = CASES[case]
    with torch.device("meta"):
        assert repeated_layers(make()) == expected
    assert repeated_layers(make()) == expected


def test_a_wide_and_deep_model_takes_no_time() -> None:
    """Each module is looked at a few times, not once a pair."""
    looks = 0

    class Counting(nn.Linear):
        def __getattribute__(self, name: str) -> Tensor:
            nonlocal looks
            looks += name == "_parameters"
            return super().__getattribute__(name)

    layers = [nn.Sequential(Counting(2, 2), Counting(2, 2)) for _ in range(400)]
    model = nn.ModuleList(layers)
    looks = 0
    assert len(repeated_layers(model)) == 400
    assert looks <= 10 * 800
