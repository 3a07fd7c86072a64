"""Memory that grows from report to report, and what only looks like it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.memory import leaks
from dist_ckpt.memory.holders import UNKNOWN, holders_of
from dist_ckpt.memory.leaks import NOTICEABLE, LeakWatch
from dist_ckpt.memory.ledger import owners_of
from dist_ckpt.memory.out_of_memory.limits import resident_bytes

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds more at each look, whatever its tensors do."""
    sizes = count(2**30, NOTICEABLE)
    monkeypatch.setattr(leaks, "resident_bytes", lambda: next(sizes))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts how often all tensors are looked for."""
    found: list[int] = []
    original = leaks.visible_tensors
    monkeypatch.setattr(leaks, "visible_tensors", lambda device: found.append(1) or original(device))
    yield found


def watched(grow: Callable[[nn.Module, int], None], steps: int = 6) -> LeakWatch:
    """A watch after some reports, before each of which something may have grown."""
    model = nn.Linear(64, 64)
    watch = LeakWatch(lambda: owners_of(model, None), CPU)
    for step in range(10, 10 * steps + 1, 10):
        grow(model, step)
        watch.look(step)
    return watch


def test_a_list_that_is_appended_to_is_named(growing: None) -> None:
    kept_for_later: list[Tensor] = []
    leak = watched(lambda _, step: kept_for_later.append(torch.zeros(512, 1024))).leak
    assert leak is not None
    assert (leak.category, leak.nbytes, leak.first_step, leak.last_step) == ("unattributed", 4 * 2**20, 20, 40)
    assert leak.holder is not None
    assert "'kept_for_later'" in leak.holder and "test_leaks.py" in leak.holder
    assert "1 new tensor: 512 × 1024 float32" in leak.holder
    assert str(leak).startswith("memory that nothing owns grew by 4.000 MiB from step 20 to 40, held by list 'kept")


def test_losses_that_keep_their_graphs_are_told_as_such(growing: None) -> None:
    losses: list[Tensor] = []
    weight = torch.ones(512, 1024, requires_grad=True)
    leak = watched(lambda _, step: losses.append(weight.exp().sum())).leak
    assert leak is not None and leak.category == "unattributed" and leak.nbytes >= 4 * 2**20
    assert leak.holder is not None and "the graph of list 'losses'" in leak.holder


def test_what_the_model_itself_collects_has_its_category(growing: None) -> None:
    leak = watched(lambda model, step: model.register_buffer(f"seen_{step}", torch.zeros(512, 1024))).leak
    assert leak is not None and leak.category == "other" and leak.holder is None
    assert str(leak) == "memory in category 'other' grew by 4.000 MiB from step 20 to 40"


def test_caches_that_fill_up_and_small_lists_are_none(growing: None) -> None:
    kept: list[Tensor] = []
    watch = watched(lambda _, step: kept.append(torch.zeros(512, 1024)) if step in (20, 30) else None)
    assert watch.leak is None
    assert watched(lambda _, step: kept.append(torch.zeros(NOTICEABLE // 8))).leak is None


def test_nothing_is_searched_while_the_process_does_not_grow(
    monkeypatch: pytest.MonkeyPatch, searches: list[int]
) -> None:
    held = {"bytes": 2**30}
    monkeypatch.setattr(leaks, "resident_bytes", lambda: held["bytes"])
    watched(lambda _, step: held.update(bytes=2**30 + (step % 20) * 1000))
    assert not searches
    watched(lambda _, step: held.update(bytes=2**30 + (NOTICEABLE if step >= 30 else 0)))
    assert len(searches) == 1, "one growth, however long it stays"


def test_a_process_knows_what_it_holds() -> None:
    before = resident_bytes()
    if before is None:
        pytest.skip("needs /proc")
    kept = torch.ones(32 * 2**20 // 4)
    assert (resident_bytes() or 0) - before >= 0.9 * kept.nbytes


def test_nothing_is_searched_where_nobody_keeps_count(monkeypatch: pytest.MonkeyPatch, searches: list[int]) -> None:
    monkeypatch.setattr(leaks, "resident_bytes", lambda: None)
    assert watched(lambda *_: None).leak is None
    assert not searches


def test_looking_for_holders_leaves_variables_as_they_are() -> None:
    kept = locals()
    held = torch.zeros(3)
    assert holders_of([held]) != [UNKNOWN]
    assert kept["kept"] is kept


def test_looking_for_holders_keeps_nothing_alive() -> None:
    held = torch.zeros(3)
    alive = weakref.ref(held)
    holders_of([held])
    del held
    assert alive() is None
