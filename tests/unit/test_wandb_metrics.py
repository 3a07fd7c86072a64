"""The names of numbers in Weights & Biases."""

from __future__ import annotations

from dist_ckpt.memory.records import GIB, MemoryReport, RankMemory
from dist_ckpt.report.wandb.metrics import line_metrics, memory_metrics, peak_table, rank_table, stacks


def rank_memory(rank: int, **known: object) -> RankMemory:
    """Rank ``r`` has ``r`` GiB of parameters and more of the rest, and two GiB less than it has altogether."""
    sizes = {"params": rank, "grads": 1, "optimizer": 2 * rank, "other": 0, "activations": 4}
    counts = {name: size * GIB for name, size in sizes.items()}
    return RankMemory(rank=rank, device="cpu", step=7, **{**counts, **known})  # type: ignore[arg-type]


def report(*ranks: RankMemory) -> MemoryReport:
    return MemoryReport(7, ranks)


def test_a_line_has_torchtitans_names() -> None:
    line = {"step": 3, "loss": 2.5, "grad_norm": 0.7, "lr": 1e-3, "tokens": 64, "tokens_per_s": 640.0, "step_s": 0.1}
    assert line_metrics({**line, "eval_loss": 2.0}, world_size=4) == {
        "loss_metrics/global_avg_loss": 2.5, "grad_norm": 0.7, "lr": 1e-3, "tokens": 64, "tokens_per_s": 640.0,
        "time_metrics/end_to_end(s)": 0.1, "throughput(tps)": 160.0, "validation_metrics/loss": 2.0,
    }  # fmt: skip
    assert "validation_metrics/loss" not in line_metrics(line, 1)


def test_each_rank_has_its_curves() -> None:
    found = memory_metrics(report(rank_memory(0), rank_memory(1)), max_ranks=2)
    names = ("params", "grads", "optimizer", "activations", "other")
    assert set(found) == {f"memory/rank_{r}/{n}(GiB)" for r in (0, 1) for n in names} | {"memory/num_ooms"}
    assert [found[f"memory/rank_1/{n}(GiB)"] for n in names] == [1, 1, 2, 4, 0]


def test_what_the_allocator_says_is_there_where_it_says_it() -> None:
    asked = [rank_memory(r, live=8 * GIB, peak=(9 + r) * GIB, reserved=20 * GIB, alloc_retries=3) for r in (0, 1)]
    found = memory_metrics(report(*asked), max_ranks=16)
    assert found["memory/max_active(GiB)"] == 10
    assert found["memory/max_reserved(GiB)"] == 20
    assert found["memory/num_alloc_retries"] == 6
    assert (found["memory/rank_0/peak(GiB)"], found["memory/rank_1/peak(GiB)"]) == (9, 10)
    assert (found["memory/rank_0/unattributed(GiB)"], found["memory/rank_1/unattributed(GiB)"]) == (7, 4)


def test_of_more_ranks_than_asked_for_the_extremes_are_shown() -> None:
    found = memory_metrics(report(*(rank_memory(r) for r in (0, 3, 1, 2))), max_ranks=3)
    assert not any("rank_" in name for name in found)
    assert [found[f"memory/{which}/params(GiB)"] for which in ("max", "min", "mean", "heaviest")] == [3, 0, 1.5, 3]
    assert found["memory/heaviest/rank"] == 3
    by_peak = [rank_memory(r, peak=(10 - r) * GIB) for r in range(4)]
    assert memory_metrics(report(*by_peak), max_ranks=3)["memory/heaviest/rank"] == 0


def test_the_table_has_every_rank_and_no_empty_column() -> None:
    columns, rows = rank_table(report(rank_memory(0, activations=None), rank_memory(1, stage=1)))
    counts = ["params", "grads", "optimizer", "activations", "other", "accounted"]
    assert columns == ["rank", "stage", "device", *(f"{count}(GiB)" for count in counts)]
    assert rows == [[0, None, "cpu", 0, 1, 0, None, 0, None], [1, 1, "cpu", 1, 1, 2, 4, 0, 8]]
    assert stacks(columns, rows, ["grads", "activations", "peak"]) == {"grads": [1, 1], "activations": [0, 4]}


def test_the_peak_of_a_deep_step() -> None:
    assert peak_table(report(rank_memory(0))) is None
    peaks = [{"phase": "backward", "params": GIB, "recompute": r * GIB} for r in (0, 2)]
    columns, rows = peak_table(report(*(rank_memory(r, at_peak=peak) for r, peak in enumerate(peaks)))) or ([], [])
    assert columns == ["rank", "phase", "params(GiB)", "recompute(GiB)"]
    assert rows == [[0, "backward", 1, 0], [1, "backward", 1, 2]]
