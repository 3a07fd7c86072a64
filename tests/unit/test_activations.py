"""Saved bytes read from the graph: equal to what hooks see, and without their side effects."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.planning import apply


def seen_by_hooks(model: nn.Module, x: Tensor) -> int:
    """The usual way to count: hooks, one count a storage, parameters left out."""
    owned = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


class Gated(nn.Module):
    """Views, an in-place edit, an index, a list of tensors and a custom Function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, dim=-1)
        y = torch.cat([left.sigmoid() * right, (self.b(x) + 1).relu_()], dim=-1)
        y = y[:, torch.tensor([0, 2, 1])]
        return Doubled.apply(torch.einsum("bij,bkj->bik", y, y).softmax(-1) @ y)[..., :16] + x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, None, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Checkpointed(nn.Module):
    """torch's own checkpoints, nested, with a keyword tensor that another layer keeps too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, x: Tensor) -> Tensor:
        def outer(y: Tensor) -> Tensor:
            return checkpoint(self.inner, y.tanh(), use_reentrant=False).exp()

        return checkpoint(outer, self.inner(x), use_reentrant=False)


@pytest.mark.parametrize("kind", [Gated, Checkpointed])
def test_the_graph_holds_what_hooks_see(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    x = torch.randn(2, 3, 16)
    found = saved_bytes([model(x).sum()], model.parameters())
    assert found.total == seen_by_hooks(model, x) > 0
    assert found.opaque == ()


def test_what_an_in_place_edit_of_a_view_keeps_is_said_to_be_out_of_sight() -> None:
    """Such an operation's node is hidden inside ``CopySlices``: no figure, but no silence either."""
    model = nn.Linear(4, 4)
    edited = model(torch.randn(2, 3, 4)).relu_()  # a 3-D linear layer returns a view
    assert edited._is_view()
    assert saved_bytes([edited.sum()], model.parameters()).opaque == ("CopySlices",)
    apply(
        wrapped := nn.Sequential(nn.Sequential(model, nn.ReLU(inplace=True)), nn.Identity()),
        {"mode": "full", "blocks": "0"},
    )
    assert saved_bytes([wrapped(torch.randn(2, 3, 4)).sum()], model.parameters()).total == 2 * 3 * 4 * 4


def test_tensors_that_a_custom_function_keeps_as_attributes_count() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = {"scale": x + 1}
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.randn(8, 4, requires_grad=True)
    assert saved_bytes([Keeps.apply(x).sum()], [x]).total == 8 * 4 * 4


def test_hooks_that_pack_into_something_unknown_are_named() -> None:
    model = nn.Linear(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
        loss = model(torch.randn(2, 4)).sum()
    assert "hooks" in saved_bytes([loss], model.parameters()).opaque[0]


def test_a_keyword_tensor_of_a_region_counts() -> None:
    block = nn.Linear(4, 4)

    def run(x: Tensor, *, mask: Tensor) -> Tensor:
        return (block(x) * mask).exp()

    out = checkpoint(run, torch.randn(2, 4), use_reentrant=False, mask=torch.ones(2, 4))
    assert saved_bytes([out], block.parameters()).inputs == 2 * (2 * 4 * 4)


def test_autocast_weight_copies_are_no_activations() -> None:
    model = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    found = saved_bytes([loss], model.parameters())
    assert found.total == 8 * 64 * 2  # the bf16 input
    assert found.weight_copies == 0  # an input that needs no gradient needs no weight
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(model(x)).float().sum()
    found = saved_bytes([loss], model.parameters())
    assert (found.total, found.weight_copies) == (2 * 8 * 64 * 2, 64 * 64 * 2)


def test_tensors_packed_by_other_hooks_count_as_packed() -> None:
    model = nn.Linear(64, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        loss = model(torch.randn(8, 64)).sum()
    assert saved_bytes([loss], model.parameters()).total == 8 * 64 * 2  # the input, halved; no weight: it needs no grad


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_an_in_place_edit_still_raises_with_the_meter_on(policy: str) -> None:
    """Saved-tensor hooks would switch this check off, and gradients would be silently wrong."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)) for _ in range(2)))
    if policy != "none":
        apply(model, policy)
    meter = MemoryMeter(model)
    hidden = torch.sigmoid(model[0](torch.randn(2, 8)))
    loss = model[1](hidden).sum()
    assert meter.after_forward(loss) > 0
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("compressed", [False, True])
def test_sparse_tensors_count_with_their_indices(compressed: bool) -> None:
    values, columns = torch.ones(6), torch.arange(6)
    if compressed:
        sparse = torch.sparse_csr_tensor(torch.arange(7), columns, values, (6, 16), check_invariants=True)
    else:
        sparse = torch.sparse_coo_tensor(torch.stack([columns, columns]), values, (6, 16), check_invariants=True)
    indices = (7 + 6 if compressed else 2 * 6) * 8
    weight = torch.randn(16, 5, requires_grad=True)
    assert saved_bytes([torch.sparse.mm(sparse, weight).sum()], [weight]).total == 6 * 4 + indices


def test_nothing_survives_the_loss() -> None:
    model = nn.Sequential(Gated(), Checkpointed())
    meter = MemoryMeter(model)
    hidden = model[0](torch.randn(2, 3, 16))
    alive = weakref.ref(hidden)
    loss = model[1](hidden).sum()
    del hidden
    meter.after_forward(loss)
    gc.disable()  # reference counts alone have to free the graph: a cycle would keep activations until a collection
    try:
        del loss
        assert alive() is None
    finally:
        gc.enable()


def test_the_meter_adds_no_operation() -> None:
    model = nn.Sequential(Gated(), Checkpointed())
    apply(model, {"mode": "selective", "blocks": "*"})
    meter = MemoryMeter(model)
    loss = model(torch.randn(2, 3, 16)).sum()
    with profile() as recorded:
        meter.after_forward(loss)
    assert [event.name for event in recorded.events() if event.name.startswith("aten::")] == []
    loss.backward()
    with profile() as recorded:
        meter.boundary(1)
    assert [event.name for event in recorded.events() if event.name.startswith("aten::")] == []


@pytest.mark.parametrize("root", [{"loss": 1}, 3.0, torch.ones(())])
def test_a_loss_without_a_graph_is_an_error(root: object) -> None:
    with pytest.raises(ValueError, match="after_forward takes the loss"):
        MemoryMeter(nn.Linear(2, 2)).after_forward(root)  # type: ignore[arg-type]


def test_peak_is_the_worst_micro_batch_of_a_step() -> None:
    model = nn.Linear(4, 4)
    meter = MemoryMeter(model)
    for rows in (2, 5, 3):
        loss = model(torch.randn(rows, 4)).exp().sum()
        meter.after_forward(loss)
        loss.backward()
    assert meter.boundary(1).activations == 5 * 4 * 4 * 2  # input and result of exp
    after = meter.boundary(2)
    assert after.activations is after.accounted is None  # nothing was measured: no figure, and no 0


def test_a_graph_through_which_backward_has_gone_is_a_mistake() -> None:
    linear = nn.Linear(4, 4)
    meter = MemoryMeter(linear)
    loss = linear(torch.randn(2, 4)).tanh().sum()
    kept = meter.after_forward(loss)
    loss.backward(retain_graph=True)
    assert meter.after_forward(loss) == kept, "it is there for another one"
    loss.backward()
    with pytest.raises(ValueError, match="before backward, which has let go"):
        meter.after_forward(loss)
    weight, other = linear.weight, nn.Parameter(torch.ones(4, 4))
    assert meter.after_forward((weight + other).sum()) == 0, "a graph that keeps nothing"
    assert MemoryMeter(nn.ParameterList([weight, other])).after_forward((weight * other).sum(0)) == 0, "or parameters"
