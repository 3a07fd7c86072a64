"""Saved tensors in host memory: right values, shared copies, nothing that stays alive, and every byte counted."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dist_ckpt.compat.torch import NodeKind, saved_tensors
from dist_ckpt.errors import PlanError
from dist_ckpt.memory.activations import SavedBytes, saved_bytes
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.memory.packed import Packed
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.memory.storages import Storages
from dist_ckpt.planning import apply
from dist_ckpt.report.console import memory_table
from dist_ckpt.wrap.offload import Offloader, Watched
from tests.unit.hosts import hosts_made
from tests.unit.toys import Stack


def packed_in(root: Tensor) -> list[Packed]:
    """What hooks of ours hold in a graph."""
    nodes, found = [root.grad_fn], []
    for node in nodes:
        found += [h.data for h in saved_tensors(node, NodeKind.of(type(node))) if isinstance(h.data, Packed)]
        nodes += [following for following, _ in node.next_functions if following and following not in nodes]
    return found


def gradients(model: nn.Module, loss: Tensor, backwards: int = 1) -> list[Tensor]:
    model.zero_grad()
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(
    model: nn.Module, x: Tensor, offloader: Offloader | None, backwards: int = 1
) -> tuple[SavedBytes, list[Tensor]]:
    torch.manual_seed(1)
    if offloader is None:
        loss = model(x).pow(2).sum()
    else:
        with offloader.hooks(model):
            loss = model(x).pow(2).sum()
    return saved_bytes([loss], model.parameters()), gradients(model, loss, backwards)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_and_bytes_are_those_without(backwards: int) -> None:
    model, x = Stack(3, 8, 0.1), torch.randn(2, 5, 4)
    expected_bytes, expected = step(model, x, None, backwards)
    found_bytes, found = step(model, x, Offloader(min_bytes=0), backwards)
    assert_equal(found, expected)
    assert found_bytes.total == found_bytes.offloaded == expected_bytes.total > 0
    assert found_bytes.on_device == expected_bytes.offloaded == 0


def test_a_gradient_of_a_gradient_is_right() -> None:
    def second(hooks: Any) -> Tensor:
        x = torch.linspace(-1, 1, 12, requires_grad=True)
        with hooks:
            y = (x.sin() * x.exp()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    assert torch.equal(second(Offloader(min_bytes=0).hooks()), second(torch.enable_grad()))


class Views(nn.Module):
    """Attention whose operands are views of one storage, and a tensor that several operations save."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v
        return mixed.sin() * mixed.exp() * mixed


def test_a_storage_is_copied_once_and_its_views_come_back_as_views_of_one() -> None:
    model, x = Views(), torch.randn(2, 5, 8)
    offloader = Offloader(min_bytes=0)
    with offloader.hooks(model):
        loss = model(x).sum()
        again = model(x.clone()).sum()
    packed = [one for one in packed_in(loss) if one.in_host_memory]
    assert len(packed) > len({id(one.held) for one in packed})
    assert saved_bytes([loss], model.parameters()).offloaded == Storages(one.held for one in packed).nbytes
    # Twice the whole: nothing of the other forward is shared with this one.
    assert saved_bytes([loss, again], model.parameters()).offloaded == 2 * Storages(one.held for one in packed).nbytes

    came_back: list[Tensor] = []
    get = type(packed[0]).get
    qkv = 2 * 5 * 24

    def spy(self: Packed) -> Tensor:
        came_back.append(get(self))
        return came_back[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(packed[0]), "get", spy)
        loss.backward()
    operands = [t for t in came_back if t.untyped_storage().nbytes() == 4 * qkv]
    assert len(operands) >= 3 and len({t.untyped_storage()._cdata for t in operands}) == 1


def test_a_tensor_that_several_regions_save_is_copied_once() -> None:
    """Cross-attention: each layer of a decoder saves the encoder's output."""
    memory = torch.randn(64, requires_grad=True) * 1
    offloader, parts = Offloader(min_bytes=0), []
    for factor in (1.0, 2.0, 3.0):
        w = torch.full((64,), factor, requires_grad=True)
        with offloader.hooks():
            parts.append(w * memory)
    loss = sum(parts).sum()
    assert saved_bytes([loss], []).offloaded == 64 * 4 + 3 * 64 * 4  # and each w, which is no parameter of a module


def test_a_small_part_of_a_large_storage_is_copied_alone() -> None:
    data = torch.randn(100, 16)
    offloader = Offloader(min_bytes=0)
    assert offloader.put(data[10:20]).held.nbytes == 10 * 16 * 4
    heads = torch.randn(3, 10, 16)
    parts = [offloader.put(part) for part in heads.unbind(0)]  # q, k and v of a vision transformer
    assert Storages(part.held for part in parts).nbytes == heads.nbytes
    for part, expected in zip(parts, heads.unbind(0), strict=True):
        assert torch.equal(part.get(), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:, ::2],
        lambda t: t[3],
        lambda t: t.expand(4, *t.shape),
        lambda t: t.view(torch.int32),
        lambda t: t[0, 0],
        lambda t: torch.view_as_complex(t.view(6, 4, 2)),
        lambda t: t.as_strided((2, 3), (0, 5), 7),
    ],
)
def test_any_view_comes_back_with_its_strides(view: Callable[[Tensor], Tensor]) -> None:
    tensor = view(torch.randn(6, 8))
    back = Offloader(min_bytes=0).put(tensor).get()
    assert torch.equal(back, tensor) and back.stride() == tensor.stride() and back.dtype == tensor.dtype
    assert back.untyped_storage()._cdata != tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3),
        lambda: torch.empty(0, 4),
        lambda: torch.randn(400, 2).to_sparse(),
        lambda: torch.randn(400, dtype=torch.complex64).conj(),
        lambda: torch.randn(400, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(400).as_subclass(type("Own", (Tensor,), {})),
    ],
    ids=["small", "empty", "sparse", "conjugate", "negative", "subclass"],
)
def test_what_has_no_plain_memory_or_little_stays(make: Callable[[], Tensor]) -> None:
    tensor = make()
    packed = Offloader(min_bytes=64).put(tensor)
    assert not packed.in_host_memory and packed.get() is tensor


class Resident(nn.Module):
    """Saves parameters, views of them, buffers and what autocast makes of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16), False)
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight * self.frozen * self.table
        return x * self.weight.t() * self.frozen.detach().t() * self.table[:, 1:2]


def test_parameters_buffers_and_their_views_stay() -> None:
    model, x = Resident(), torch.randn(16, 16, requires_grad=True)
    with Offloader(min_bytes=0).hooks(model):
        loss = model(x).sum()
    own = Storages([*model.parameters(), *model.buffers()])
    staying = [one for one in packed_in(loss) if not one.in_host_memory]
    assert len(staying) >= 6 and all(one.held in own for one in staying)
    assert all(one.held not in own for one in packed_in(loss) if one.in_host_memory)
    found = saved_bytes([loss], [*model.parameters(), *model.buffers()])
    assert found.total == found.offloaded > 0


class Rotary(nn.Module):
    """Its table is given to its blocks in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(40, 8))
        self.layers = nn.ModuleList(Rotated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.table[: x.shape[1]])
        return x


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) * table


@pytest.mark.parametrize("policy", ["offload", {"mode": "full", "inputs": "offload"}], ids=str)
def test_buffers_of_the_model_around_a_region_stay(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloader.__init__, "__defaults__", (0, 0, ()))
    model, x = Rotary(), torch.randn(2, 30, 8)
    apply(model, policy)
    found = saved_bytes([model(x).sum()], [*model.parameters(), *model.buffers()])
    assert found.total == found.offloaded == 2 * x.nbytes  # what each layer is given


def test_a_model_with_a_plan_is_freed_at_once(no_collector: None) -> None:
    model = Rotary()
    apply(model, "offload")
    gc.collect()  # of what making the plan left
    alive = weakref.ref(model)
    del model
    assert alive() is None


def test_a_parameter_of_another_module_stays() -> None:
    tied = nn.Linear(16, 16)
    with Offloader(min_bytes=0).hooks(nn.Linear(2, 2)):
        loss = (tied(torch.randn(4, 16, requires_grad=True)) * tied.bias).sum()
    assert saved_bytes([loss], tied.parameters()).offloaded == 2 * 4 * 16 * 4


def test_autocast_copies_of_weights_stay_and_are_no_activations() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)

    def run(hooks: Any) -> tuple[SavedBytes, list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16), hooks:
            loss = model(x).float().sum()
        return saved_bytes([loss], model.parameters()), gradients(model, loss)

    found, grads = run(Offloader(min_bytes=0).hooks(model))
    expected, expected_grads = run(torch.enable_grad())
    assert (found.total, found.weight_copies) == (expected.total, expected.weight_copies)
    assert found.offloaded == found.total > 0 and found.weight_copies > 0
    assert_equal(grads, expected_grads)


def test_an_edit_of_what_stays_raises_as_without_hooks() -> None:
    """Saved-tensor hooks switch autograd's own check off."""
    x = torch.randn(4, requires_grad=True)
    with Offloader(min_bytes=1000).hooks():
        hidden = x.sigmoid()
        loss = hidden.sum()
    hidden.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("edited", ["weight", "input"])
def test_an_edit_of_a_parameter_or_input_that_stays_raises(edited: str) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with Offloader(min_bytes=1000).hooks(model):
        loss = model(model(x)).sum()
    with torch.no_grad():
        (model.weight if edited == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_edit_of_what_is_offloaded_does_not_matter() -> None:
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    with Offloader(min_bytes=0).hooks():
        hidden = x.sigmoid()
        loss = hidden.sum()
    hidden.detach().mul_(2)
    loss.backward()
    value = x.detach().sigmoid()
    assert torch.equal(x.grad, value * (1 - value))


def test_a_storage_that_was_edited_in_between_is_copied_again() -> None:
    offloader, tensor = Offloader(min_bytes=0), torch.zeros(64)
    before = offloader.put(tensor)
    tensor.add_(1)
    after = offloader.put(tensor)
    assert before.get().sum() == 0 and after.get().sum() == 64


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_parts_of_a_storage_that_are_edited_by_themselves_are_copied_by_themselves(kind: type[nn.Module]) -> None:
    """The gates of a cell are computed in place, each in its part of one storage and with its own version counter."""
    torch.manual_seed(0)
    model, x = kind(16, 16, 2, dropout=0.2), torch.randn(5, 3, 16)
    expected, found = ([], [])
    for grads, offloader in ((expected, None), (found, Offloader(min_bytes=0))):
        torch.manual_seed(1)
        model.zero_grad()
        with contextlib.nullcontext() if offloader is None else offloader.hooks(model):
            loss = model(x)[0].pow(2).sum()
        grads += gradients(model, loss)
    assert_equal(found, expected)


def test_one_storage_as_two_types_is_right() -> None:
    tensor, offloader = torch.randn(64), Offloader(min_bytes=0)
    packed = [offloader.put(tensor), offloader.put(tensor.view(torch.int32))]
    assert torch.equal(packed[0].get(), tensor) and torch.equal(packed[1].get(), tensor.view(torch.int32))


def test_a_new_storage_at_an_old_address_is_another_one() -> None:
    """Memory that is freed because its copy waits on the host goes to the next tensor of that size."""
    offloader = Offloader(min_bytes=0)
    packed = [offloader.put(torch.full((4096,), float(n))) for n in range(20)]
    assert [float(one.get()[0]) for one in packed] == list(range(20))


class Scales(torch.autograd.Function):
    """Edits in backward what it saved in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(0)
        return grad * 2


def test_an_edit_in_backward_reaches_nobody_else() -> None:
    x = torch.linspace(1, 2, 8, requires_grad=True)
    with Offloader(min_bytes=0).hooks():
        y = x * 1
        loss = (y.pow(3) + Scales.apply(y)).sum()
    loss.backward()
    assert torch.equal(x.grad, 3 * x.detach().pow(2) + 2)


@pytest.mark.parametrize("min_bytes", [0, 400])
def test_nothing_survives_the_loss(min_bytes: int, monkeypatch: pytest.MonkeyPatch, no_collector: None) -> None:
    made = hosts_made(monkeypatch)
    model, offloader = Stack(), Offloader(min_bytes)
    region = weakref.ref(model)
    with offloader.hooks(model):
        hidden = model(torch.randn(2, 5, 4))
        loss = hidden.sigmoid().sum()
    alive = weakref.ref(hidden)
    del hidden
    assert alive() is None and any(ref() is not None for ref in made)
    del loss
    assert len(made) > 5 and not any(ref() is not None for ref in made)
    del model
    assert region() is None


def test_backward_frees_copies_as_it_goes(monkeypatch: pytest.MonkeyPatch, no_collector: None) -> None:
    made = hosts_made(monkeypatch)
    model, counts = Stack(), list[int]()
    model.blocks[1].register_full_backward_hook(lambda *_: counts.append(sum(ref() is not None for ref in made)))
    with Offloader(min_bytes=0).hooks(model):
        loss = model(torch.randn(2, 5, 4)).sum()
    before = sum(ref() is not None for ref in made)
    loss.backward()
    assert 0 < counts[0] < before and not any(ref() is not None for ref in made)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x).sigmoid()
        raise ValueError("in the middle")


def test_an_exception_in_forward_leaves_nothing(monkeypatch: pytest.MonkeyPatch, no_collector: None) -> None:
    made = hosts_made(monkeypatch)
    model, offloader = Fails(), Offloader(min_bytes=0)
    with pytest.raises(ValueError, match="in the middle") as caught, offloader.hooks(model):
        model(torch.randn(2, 4))
    caught.__dict__.clear()  # its traceback holds the frames and so the tensors
    del caught
    assert made and not any(ref() is not None for ref in made)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def on_device(offloader: Offloader) -> int:
    return sum(one.fetched is not None for one in offloader._copies._found.values())


def test_a_kept_graph_keeps_nothing_on_the_device() -> None:
    model, offloader, seen = Stack(), Offloader(min_bytes=0), list[int]()
    model.blocks[0].register_full_backward_hook(lambda *_: seen.append(on_device(offloader)))
    with offloader.hooks(model):
        loss = model(torch.randn(2, 5, 4)).sum()
    waiting = len(offloader._copies._found)
    loss.backward(retain_graph=True)
    assert seen[0] > 0 and on_device(offloader) == 0
    assert len(offloader._copies._found) == waiting > 0
    torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
    assert on_device(offloader) == 0


def test_a_saved_tensor_can_be_looked_at_outside_of_backward() -> None:
    x = torch.randn(64, requires_grad=True)
    offloader = Offloader(min_bytes=0)
    with offloader.hooks():
        y = x.exp()
    assert torch.equal(y.grad_fn._saved_result, y) and on_device(offloader) == 0


def test_a_backward_that_raised_does_not_disturb_the_next() -> None:
    model, x, offloader = Stack(), torch.randn(2, 5, 4), Offloader(min_bytes=0)
    expected = step(model, x, None)[1]

    def refuse(*_: Any) -> None:
        raise ValueError("in backward")

    handle = model.blocks[1].mlp[0].weight.register_hook(refuse)
    with offloader.hooks(model):
        loss = model(x).sum()
    with pytest.raises(ValueError, match="in backward"):
        loss.backward(retain_graph=True)
    handle.remove()
    stale = [one for one in offloader._copies._found.values() if one.fetched is not None]
    left: list[int] = []
    handle = (
        model.blocks[1].mlp[0].weight.register_hook(lambda _: left.append(sum(o.fetched is not None for o in stale)))
    )
    assert_equal(step(model, x, offloader)[1], expected)
    assert len(stale) > 0 and left == [0]


def test_copies_and_pickles_of_an_offloader_are_fresh() -> None:
    offloader = Offloader(min_bytes=7, ahead_bytes=9)
    packed = offloader.put(torch.randn(64))
    for other in (copy.deepcopy(offloader), pickle.loads(pickle.dumps(offloader))):
        assert other._settings == (7, 9) and len(other._copies._found) == 0
    one, two = copy.deepcopy((offloader, offloader))
    assert one is two is not offloader and len(offloader._copies._found) == 1
    del packed


def test_compiling_over_it_is_refused_and_compiling_inside_is_right() -> None:
    model, x, offloader = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), Offloader(min_bytes=0)
    torch._dynamo.reset()

    def over(x: Tensor) -> Tensor:
        with offloader.hooks(model):
            return model(x).sigmoid()

    with pytest.raises(Exception, match="PlanError") as caught:
        torch.compile(over, backend="aot_eager", fullgraph=True)(x)
    assert "offloads what it saves" in str(caught.value) or isinstance(caught.value.__cause__, PlanError)

    inside = torch.compile(lambda x: model(x).sigmoid(), backend="aot_eager")
    with offloader.hooks(model):
        loss = inside(x).sum()
    assert saved_bytes([loss], model.parameters()).offloaded > 0
    assert_equal(gradients(model, loss), gradients(model, model(x).sigmoid().sum()))


def test_inside_a_region_that_is_recomputed_it_is_right() -> None:
    model, x, offloader = Stack(2, 8, 0.1), torch.randn(2, 5, 8, requires_grad=True), Offloader(min_bytes=0)

    def run(inner: Any) -> list[Tensor]:
        def outer(x: Tensor) -> Tensor:
            with inner():
                x = model.blocks[0](x)
            return model.blocks[1](x.exp())

        torch.manual_seed(1)
        return gradients(model, checkpoint(outer, x, use_reentrant=False).pow(2).sum(), backwards=2)

    assert_equal(run(lambda: offloader.hooks(model)), run(torch.enable_grad))


def test_the_meter_counts_it() -> None:
    model = Stack()
    meter = MemoryMeter(model)
    x = torch.randn(2, 5, 4)
    assert meter.after_forward(model(x).sum()) > 0 and meter.boundary(1).offloaded is None
    with Offloader(min_bytes=400).hooks(model):
        loss = model(x).sum()
    kept = meter.after_forward(loss)
    loss.backward()
    memory = meter.boundary(2)
    assert memory.offloaded is not None and 0 < memory.offloaded < memory.activations == kept
    assert meter.boundary(3).offloaded is None


def test_other_peoples_offloading_is_counted_where_it_is() -> None:
    """On the CPU, torch's own hooks copy nothing; their tensors are saved bytes as any."""
    model, x = Stack(), torch.randn(2, 5, 4)
    with save_on_cpu():
        loss = model(x).sum()
    with Offloader(min_bytes=0).hooks(model):
        ours = model(x).sum()
    found = saved_bytes([loss], model.parameters())
    assert found.total == saved_bytes([ours], model.parameters()).total and found.offloaded == 0


def test_on_a_device_activations_are_what_the_device_holds() -> None:
    """The meta device stands for an accelerator: what its graph keeps in CPU memory is not on it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid()).to("meta")
    x = torch.randn(2, 4, device="meta")
    kept = MemoryMeter(model).after_forward(model(x).sum())
    meter = MemoryMeter(model)

    def pack(tensor: Tensor) -> Tensor:
        return tensor if tensor is x or tensor.shape == (4, 8) else torch.empty(tensor.shape)

    with saved_tensors_hooks(pack, lambda tensor: tensor.to("meta")):
        loss = model(x).sum()
    assert kept == (2 * 4 + 2 * 8) * 4 and meter.after_forward(loss) == 2 * 4 * 4
    memory = meter.boundary(1)
    assert (memory.activations, memory.offloaded) == (2 * 4 * 4, 2 * 8 * 4)


def test_reports_show_it_where_there_is_any() -> None:
    common = {"rank": 0, "device": "cuda", "step": 1, "params": 1, "grads": 1, "optimizer": 1, "other": 1}
    for offloaded in (None, 2**20):
        report = MemoryReport(1, (RankMemory(**common, activations=1, offloaded=offloaded),))
        shown = [str(column.header) for column in memory_table(report).columns]
        assert ("offloaded" in shown) == ("offloaded" in str(report)) == (offloaded is not None)
        assert report.ranks[0].accounted == 5  # what the device holds


def test_tensors_on_the_host_stay_there_if_the_region_is_on_a_device() -> None:
    module, tensor = nn.Linear(2, 2), torch.randn(8, requires_grad=True)
    hooks = Offloader(min_bytes=0).hooks(module)
    with hooks:
        assert hooks.pack_hook(tensor * 1).in_host_memory  # a copy, as on the CPU
        hooks._on_accelerator = True
        assert not hooks.pack_hook(tensor * 2).in_host_memory


def test_a_watched_leaf_is_itself_so_that_sharding_may_exchange_its_data() -> None:
    """ZeRO-3 gives a parameter other memory between forward and backward, and autograd follows it."""
    weight = nn.Parameter(torch.randn(4))
    watched = Watched(weight)
    weight.data = torch.full((4,), 7.0)
    assert torch.equal(watched.get(), weight)
