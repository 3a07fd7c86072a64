"""Copies on streams of their own, on a device that is as late as it may be.

There is no accelerator here. The double below stands for one: its side streams do nothing until somebody waits for
them, and complain of memory that was given away before they were done with it. What computes is synchronous. So a
wait that is missing gives wrong values or an error; that the calls do on a real device what they do here is for
``tests/gpu`` to show.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.wrap import hosted
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.transfer import Fetched, Streams, Synchronous, Waiting, transfer_for
from tests.unit.toys import Stack


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream, self._number = stream, stream.enqueued

    def query(self) -> bool:
        return self._stream.done >= self._number

    def happen(self) -> None:
        self._stream.run_until(self._number)


class LateStream:
    """Runs what it was given only when somebody waits for it."""

    def __init__(self, device: Any = None) -> None:
        self._pending: list[Callable[[], None]] = []
        self.waited_for: list[LateStream] = []
        self.enqueued = self.done = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._pending.append(work)
        self.enqueued += 1

    def run_until(self, number: int) -> None:
        while self.done < number:
            self.done += 1
            self._pending.pop(0)()

    def record_event(self) -> LateEvent:
        return LateEvent(self)

    def wait_event(self, event: LateEvent) -> None:
        self.enqueue(event.happen)

    def wait_stream(self, other: LateStream) -> None:
        self.waited_for.append(other)
        self.wait_event(other.record_event())


class Compute(LateStream):
    """The stream that the model runs on: what it is given is done at once."""

    def enqueue(self, work: Callable[[], None]) -> None:
        super().enqueue(work)
        self.run_until(self.enqueued)


class LateDevice(Streams):
    """Copies between memory of the CPU as if one side were a device."""

    Stream = LateStream

    def __init__(self, limit_bytes: int) -> None:
        self.compute = self.current = Compute()
        self.journal: list[str] = []
        super().__init__(torch.device("cpu"), limit_bytes)
        self.names = {id(self._outward): "out", id(self._inward): "back"}

    # What Streams asks of torch.cuda.

    def _streams_of(self, device: torch.device) -> Any:  # type: ignore[override]
        return self

    def current_stream(self, device: torch.device) -> LateStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _pinned(self, source: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(source, -99)

    def _copy(self, target: Tensor, source: Tensor) -> None:  # type: ignore[override]
        way = self.names[id(self.current)]
        assert self.current.waited_for == [self.compute], "what was computed so far may still use the memory"
        self.current.waited_for.clear()
        self.journal.append(f"{way} {source.numel()}")
        target.fill_(-77)  # until it is done
        ours = weakref.ref(source if way == "out" else target)
        theirs = weakref.ref(target if way == "out" else source)

        def work() -> None:
            read, written = (ours, theirs) if way == "out" else (theirs, ours)
            if written() is None and way == "out":
                return  # torch's host allocator waits for copies before it reuses pinned memory
            assert ours() is not None, f"device memory was given away before a copy {way} was done"
            written().detach().copy_(read())  # type: ignore[union-attr]

        self.current.enqueue(work)

    @property
    def leaving_bytes(self) -> int:
        return sum(source.nbytes for source, _, _ in self._leaving)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Offloader, LateDevice]]:
    def make(ahead_bytes: int = 2**20) -> tuple[Offloader, LateDevice]:
        device = LateDevice(ahead_bytes)
        monkeypatch.setattr(hosted, "transfer_for", lambda tensor, limit: device)
        return Offloader(0, ahead_bytes), device

    return make


def gradients(model: nn.Module, x: Tensor, offloader: Offloader | None, backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with contextlib.nullcontext() if offloader is None else offloader.hooks(model):
        loss = model(x).pow(2).sum()
    for n in range(backwards):
        loss.backward(retain_graph=n + 1 < backwards)
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("ahead_bytes", [0, 600, 2**20])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_right_on_a_device_that_is_late(late: Any, ahead_bytes: int, backwards: int) -> None:
    model, x = Stack(3, 8, 0.1), torch.randn(2, 5, 4)
    offloader, device = late(ahead_bytes)
    expected = gradients(model, x, None, backwards)
    for _ in range(3):
        for one, other in zip(gradients(model, x, offloader, backwards), expected, strict=True):
            assert torch.equal(one, other)
    assert len(device.journal) > 100 and device.leaving_bytes == 0


def test_the_forward_does_not_wait_below_the_limit_and_memory_is_bounded_above(late: Any) -> None:
    model, x = Stack(), torch.randn(2, 5, 4)
    offloader, device = late()
    with offloader.hooks(model):
        loss = model(x).sum()
    assert device._outward.done == 0 and device.leaving_bytes == saved_bytes([loss], model.parameters()).offloaded

    largest = 2 * 5 * 24 * 4
    offloader, device = late(largest + 100)
    peaks: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: peaks.append(device.leaving_bytes))
    with offloader.hooks(model):
        loss = model(x).sum()
    assert 0 < max(peaks) <= largest + 100 and device._outward.done > 0


def test_memory_that_is_read_already_is_given_back_without_waiting(late: Any) -> None:
    offloader, device = late()
    first = offloader.put(torch.randn(64))
    assert device.leaving_bytes == 64 * 4
    device._outward.run_until(device._outward.enqueued)
    second = offloader.put(torch.randn(16))
    assert device.leaving_bytes == 16 * 4 and device.compute.enqueued == 0
    del first, second


class Chain(torch.autograd.Function):
    """Saves what it is given, so that backward asks in the reverse order; notes what is on the way then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: LateDevice, log: list[list[str]]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.device, ctx.log = device, log
        return x[: x.numel() - 1].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.log.append(list(ctx.device.journal))
        assert x[0] == 7
        return torch.cat([grad, grad[:1]]), None, None


def run_chain(offloader: Offloader, device: LateDevice, sizes: range) -> list[list[str]]:
    log: list[list[str]] = []
    x = torch.full((sizes[0],), 7.0, requires_grad=True) * 1
    with offloader.hooks():
        for _ in sizes:
            x = Chain.apply(x, device, log)
    del device.journal[:]
    x.sum().backward()
    return log


def test_what_was_packed_before_is_on_its_way_when_it_is_asked_for(late: Any) -> None:
    offloader, device = late(ahead_bytes=4 * 55)
    log = run_chain(offloader, device, range(30, 20, -1))
    # 21 elements are asked for, and 22 and 23 fit into 55; then 24 …, as soon as there is room.
    assert log[0] == ["back 21", "back 22", "back 23"]
    assert log[1] == [*log[0], "back 24"]
    assert log[-1] == [f"back {n}" for n in range(21, 31)]
    assert all(len(entry) >= min(n + 2, 10) for n, entry in enumerate(log))


def test_nothing_comes_early_without_room(late: Any) -> None:
    offloader, device = late(ahead_bytes=0)
    log = run_chain(offloader, device, range(30, 20, -1))
    assert [len(entry) for entry in log] == list(range(1, 11))


def test_what_came_early_and_was_not_asked_for_is_let_go(late: Any) -> None:
    offloader, device = late()
    one, two = (torch.full((n,), 2.0, requires_grad=True) for n in (10, 20))
    with offloader.hooks():
        first, second = (one * one).sum(), (two * two).sum()
    second.backward()
    assert {"back 20", "back 10"} <= set(device.journal)
    assert all(copy.fetched is None for copy in offloader._copies._found.values())
    first.backward()
    assert torch.equal(one.grad, 2 * one) and torch.equal(two.grad, 2 * two)


def test_a_graph_that_dies_on_its_way_back_is_waited_for(late: Any) -> None:
    """Autograd lets go of what it no longer needs, whatever is being written there."""
    offloader, device = late()
    packed = [offloader.put(torch.randn(8)) for _ in range(3)]
    copies = [one._copy for one in packed]
    copies[0].fetch()
    del packed, copies
    device._inward.run_until(device._inward.enqueued)  # would raise if the memory were gone


def test_an_edit_before_the_copy_is_done_raises_and_a_later_one_does_not_matter(late: Any) -> None:
    offloader, device = late()
    tensor = torch.full((8,), 3.0)
    packed = offloader.put(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation while it was on its way"):
        packed.get()

    tensor = torch.full((8,), 3.0)
    packed = offloader.put(tensor)
    device._outward.run_until(device._outward.enqueued)
    offloader.put(torch.zeros(8))  # looks what is done
    tensor.add_(1)
    assert torch.equal(packed.get(), torch.full((8,), 3.0))


def test_a_backward_does_not_wait_for_what_a_later_forward_sends_out(late: Any) -> None:
    """As in a pipeline, where the next micro-batch's forward comes before this one's backward."""
    offloader, device = late()
    one, two = (torch.full((n,), 2.0, requires_grad=True) for n in (10, 20))
    with offloader.hooks():
        first = (one * one).sum()
        second = (two * two).sum()
    first.backward()
    assert device.leaving_bytes == 20 * 4
    second.backward()
    assert device.leaving_bytes == 0 and torch.equal(two.grad, 2 * two)


def test_a_forward_that_raises_leaves_nothing_on_its_way(late: Any) -> None:
    offloader, device = late()
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(ValueError), offloader.hooks():
        x.exp()
        raise ValueError
    assert device.leaving_bytes == 0


def test_a_tensor_that_is_saved_again_is_needed_sooner(late: Any) -> None:
    offloader, device = late(ahead_bytes=4 * 100)
    shared = torch.full((50,), 7.0)
    packed = [
        offloader.put(shared),
        offloader.put(torch.zeros(40)),
        offloader.put(shared),
        offloader.put(torch.ones(30)),
    ]
    assert device.journal == ["out 50", "out 40", "out 30"]
    copies = [one._copy for one in packed]
    assert [copy.nbytes // 4 for copy in offloader._copies._before(copies[3])][:2] == [50, 40]


def test_the_order_of_what_is_gone_is_forgotten(late: Any) -> None:
    offloader, _ = late()
    for _ in range(20):
        offloader.put(torch.randn(8))
    alive = [offloader.put(torch.randn(8)) for _ in range(10)]
    for _ in range(500):
        offloader.put(torch.randn(8))
    assert len(offloader._copies._order) < 150
    last = offloader.put(torch.randn(8))
    before = list(offloader._copies._before(last._copy))
    assert before == [one._copy for one in reversed(alive)]
    assert list(offloader._copies._before(alive[5]._copy)) == [one._copy for one in reversed(alive[:5])]


class Journal:
    """Records what is asked of a transfer, with the copies done at once: the order of calls is the contract."""

    looks_ahead = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._inner = Synchronous()

    def out(self, source: Tensor) -> Waiting:
        self.calls.append(f"out {source.numel()}")
        return self._inner.out(source)

    def back(self, waiting: Waiting) -> Fetched:
        self.calls.append(f"back {waiting.host.numel()}")
        return self._inner.back(waiting)

    def arrived(self, fetched: Fetched) -> Tensor:
        self.calls.append(f"arrived {fetched.tensor.numel()}")
        return self._inner.arrived(fetched)

    def drop(self, fetched: Fetched) -> None:
        self.calls.append(f"drop {fetched.tensor.numel()}")

    def settle(self) -> None:
        self.calls.append("settle")


def test_what_is_asked_of_a_device_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    monkeypatch.setattr(hosted, "transfer_for", lambda tensor, limit: journal)
    offloader = Offloader(0, 2**20)
    x = torch.ones(3, requires_grad=True)
    with offloader.hooks():
        y = torch.cat([(x * 1).exp(), torch.ones(1)]).exp()
    assert journal.calls == ["out 3", "out 4"]
    y.sum().backward()
    # The copy that is needed now comes first, then the one before it, and only then is the first waited for.
    assert journal.calls[2:] == ["back 4", "back 3", "arrived 4", "drop 4", "arrived 3", "drop 3"]


def test_the_cpu_and_fake_tensors_need_no_streams() -> None:
    assert isinstance(transfer_for(torch.ones(1), 0), Synchronous)
    with torch._subclasses.FakeTensorMode():
        assert isinstance(transfer_for(torch.ones(1, device="cpu"), 0), Synchronous)
