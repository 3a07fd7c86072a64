"""Who holds a tensor, in words."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_ckpt.memory import holders
from dist_ckpt.memory.holders import UNKNOWN, holders_of, visible_storages

pytestmark = pytest.mark.usefixtures("alone")

HERE = "in test_holders.py:"


def test_an_attribute_is_named_as_such() -> None:
    layer = nn.Linear(2, 2)
    found = holders_of([layer.weight])[0]
    assert found.startswith(f"Linear.weight of variable 'layer' {HERE}"), found
    assert found.endswith("(test_an_attribute_is_named_as_such)"), found
    layer.stash = {"kept": [torch.zeros(2)]}  # type: ignore[assignment]
    found = holders_of([layer.stash["kept"][0]])[0]  # type: ignore[index]
    assert found.startswith("list dict['kept'] Linear.stash of variable 'layer' "), found


def test_of_a_module_within_modules_the_variable_is_told() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2))
    average = copy.deepcopy(model)
    found = holders_of([*average.parameters(), *average.buffers()])
    assert {name.split(" ")[0] for name in found} == {
        *("Linear.weight", "Linear.bias", "BatchNorm1d.weight", "BatchNorm1d.bias"),
        *("BatchNorm1d.running_mean", "BatchNorm1d.running_var", "BatchNorm1d.num_batches_tracked"),
    }
    assert all(" of variable 'average' in " in name for name in found), found


def test_however_many_tensors_there_are_they_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = []
    for few in (100, 1):
        monkeypatch.setattr(holders, "_FEW", few)
        found.append(holders_of(list(average.parameters())))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2 and "of variable 'average' in" in found[0][0]


def test_a_tensor_that_is_a_key_is_named_by_its_shape() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3, 4))])
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros(3, 4)
    optimizer.step()
    found = holders_of([optimizer.state[parameter]["exp_avg"]])[0]
    assert found.startswith("dict['exp_avg'] dict[Parameter 3 × 4] AdamW.state of variable 'optimizer' "), found


def closure() -> Callable[[], Tensor]:
    big = torch.zeros(3)
    return lambda: big


def test_closures_and_queues_are_named() -> None:
    function = closure()
    assert holders_of([function()])[0] == "'big' in the closure of closure.<locals>.<lambda>"
    last = deque([torch.zeros(2)])
    assert holders_of([last[0]])[0].startswith("deque 'last' in ")


def test_what_nobody_holds_is_unknown() -> None:
    assert holders_of([torch.zeros(1)]) == [UNKNOWN]


def test_storages_without_memory_are_nowhere() -> None:
    before = visible_storages()
    with FakeTensorMode():
        kept = torch.empty(4).untyped_storage()
    assert visible_storages() == before
    del kept
