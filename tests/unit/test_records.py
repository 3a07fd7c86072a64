"""Records of memory and cost: what is derived of them, and that they come back from JSON as they were."""

from __future__ import annotations

import json

import pytest

from dist_ckpt.memory.records import ACCOUNTED, MemoryReport, RankMemory
from dist_ckpt.report.predicted import Predicted, from_json, to_json

RANK = RankMemory(0, "cpu", 3, params=1, grads=2, optimizer=4, other=8, activations=16)


def test_a_report_comes_back_as_it_was() -> None:
    at_peak = {"phase": "backward", "params": 1}
    report = MemoryReport(3, (RANK, RankMemory(1, "cuda", 3, 1, 2, 4, 8, None, live=20, peak=0, at_peak=at_peak)))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ranks"][1]["unattributed"] == 5 and data["ranks"][0]["accounted"] == 31
    assert MemoryReport.from_dict(data) == report
    del data["ranks"][0]["leak"]
    assert MemoryReport.from_dict(data) == report, "an earlier version had no such field"
    with pytest.raises(TypeError, match="later"):
        RankMemory.from_dict({**RANK.to_dict(), "later": 1})


def test_the_most_that_is_known_of_a_rank() -> None:
    assert RANK.accounted == sum(getattr(RANK, name) for name in ACCOUNTED) == RANK.peak_or_accounted
    assert RankMemory(0, "cuda", 3, 1, 2, 4, 8, 16, peak=0).peak_or_accounted == 0, "a peak of nothing is known"
    assert RankMemory(0, "cpu", 3, 1, 2, 4, 8, None).peak_or_accounted is None


def test_a_prediction_comes_back_as_it_was() -> None:
    costs = (Predicted(0, 2, 10, 40, 130, 100, 7), Predicted(1, 1, 5, 20, 0, 0, 3))
    assert from_json(to_json(costs)) == costs
    assert [one.recomputed for one in costs] == [pytest.approx(0.3), None]
