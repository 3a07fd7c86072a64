"""What is advised of records, and what is not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Kind, Phase, Span, StepProfile
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.plan import Plan, Region
from dist_ckpt.report.advice import RunFacts, advice
from dist_ckpt.report.predicted import Predicted

MIB = 2**20
BLOCKS = tuple(f"layers.{number}" for number in range(4))


def held(kind: Kind, mib: float, module: str | None = None, source: str = "aten::mm", **more: Any) -> Holding:
    return Holding(kind, module, source, more.get("shape"), more.get("dtype", "float32"), int(mib * MIB), 1)


def profile_of(
    holdings: Iterable[Holding], rank: int = 0, stage: int | None = None, phase: str = "backward", beside_mib: float = 0
) -> StepProfile:
    """A step with its peak at 2 s; ``beside_mib`` are alive in the other phases, before and after everything else."""
    holdings = tuple(sorted(holdings, key=lambda h: -h.nbytes))
    at_peak = {kind: sum(h.nbytes for h in holdings if h.kind == kind) for kind in KINDS}
    peak, beside = sum(at_peak.values()), int(beside_mib * MIB)
    lower = {kind: beside if kind == "params" else 0 for kind in KINDS}
    names = ("forward", phase, "other")
    phases = tuple(
        Phase(name, 0, n + 0.5, n + 1.5, (beside, peak, beside)[n], (lower, at_peak, lower)[n])  # type: ignore[arg-type]
        for n, name in enumerate(names)
    )
    spans = tuple(
        Span(module, work, 0, start, start + 0.5)  # type: ignore[arg-type]
        for module in (*BLOCKS, "output")
        for work, start in (("forward", 1.5), ("backward", 2.0))
    )
    return StepProfile(
        rank=rank, stage=stage, device="cpu", step=3, duration_s=3.0, start_bytes=beside, boundary_bytes=beside,
        end_bytes=beside, peak_bytes=peak, peak_s=2.0, phase=phase, at_peak=at_peak, holdings=holdings, rest_bytes=0,
        phases=phases, spans=spans, times_s=(1.0, 2.0, 3.0),
        timeline={kind: (lower[kind], at_peak[kind], lower[kind]) for kind in KINDS},
    )  # fmt: skip


def memory_of(profile: StepProfile, **more: Any) -> RankMemory:
    at_peak = profile.at_peak
    given: dict[str, Any] = {
        "params": at_peak["params"], "grads": at_peak["params"], "optimizer": 2 * at_peak["params"], "other": 0,
        "activations": at_peak["activations"], "peak": profile.peak_bytes, "live": 4 * at_peak["params"],
        "at_peak": {"phase": profile.phase, **at_peak},
    }  # fmt: skip
    return RankMemory(profile.rank, profile.device, profile.step, stage=profile.stage, **given | more)


def advised(profiles: Sequence[StepProfile], run: RunFacts | None = None, **more: Any) -> list[tuple[str, int | None]]:
    report = MemoryReport(3, tuple(memory_of(profile, **more) for profile in profiles))
    return [(one.text, one.gain_bytes) for one in advice(report, profiles, run or RunFacts())]


def about(found: Sequence[tuple[str, int | None]], word: str) -> tuple[str, int | None]:
    """The only advice with a word in it."""
    matching = [one for one in found if word in one[0]]
    assert len(matching) == 1, (word, found)
    return matching[0]


def run_of(mode: str = "none", plan: Plan | None = None, **keys: Any) -> RunFacts:
    """Facts of the training program; ``train_seq_len`` stands for ``train.seq_len``."""
    config: dict[str, Any] = {
        "train": {"micro_batch": 4, "seq_len": 128, "grad_accum": None, "precision": "fp32", "accum_sync": None},
        "engine": {"name": "fsdp2", "stages": 1},
        "model": {"kind": "decoder", "loss": "full", "vocab_size": 512, "attention": "sdpa"},
    }
    for key, value in keys.items():
        section, _, name = key.partition("_")
        config[section][name] = value
    return RunFacts(config, plan or Plan(policy={"mode": mode}))


QUIET = (held("params", 12), held("activations", 20, "layers.0"), held("temporary", 68, "layers.1"))
"""100 MiB in which nothing stands out but results that are gone at once."""


def test_nothing_is_advised_of_a_step_in_which_nothing_stands_out() -> None:
    assert advised([profile_of(QUIET)], run_of()) == []
    assert advised([profile_of(QUIET, rank=rank) for rank in range(4)], run_of()) == []
    assert advice(MemoryReport(1, (RankMemory(0, "cpu", 1, 0, 0, 0, 0, None),)), (), run_of()) == ()


def logits(mib: float) -> tuple[Holding, ...]:
    return (
        held("activations", mib / 2, "output", shape=(4, 128, 512)),
        held("activations", mib / 4, None, "aten::_log_softmax", shape=(512, 512)),
        held("temporary", mib / 4, None, "aten::_log_softmax_backward_data", shape=(512, 512)),
        held("activations", 20, "layers.0", shape=(4, 128, 512)),
        held("params", 80 - mib, "output", "output.weight", shape=(512, 512)),
    )


def test_logits_are_named_with_the_keys_that_cut_them() -> None:
    text, gain = about(advised([profile_of(logits(40))], run_of()), "logits")
    assert text.startswith("logits (4 × 128 × 512), with what the loss makes of them, are 40.000 MiB (40% of the peak)")
    assert "model.loss=chunked model.loss_chunk=64 " in text
    assert gain == 35 * MIB
    assert "ranks" not in text and "rank 0" not in text


def test_logits_that_are_few_or_not_at_the_peak_are_left_alone() -> None:
    assert not any("logits" in text for text, _ in advised([profile_of(logits(5))], run_of()))
    # Without them, the peak would move to a moment that is nearly as high.
    moved = profile_of(logits(40), beside_mib=97)
    assert not any("logits" in text for text, _ in advised([moved], run_of()))
    _, gain = about(advised([profile_of(logits(40), beside_mib=90)], run_of()), "logits")
    assert gain == 10 * MIB


def test_other_losses_and_loops_get_the_remedy_that_they_have() -> None:
    chunked = about(advised([profile_of(logits(40))], run_of(model_loss="chunked")), "logits")[0]
    assert "model.loss=chunked" not in chunked and "model.loss_chunk=64" in chunked
    hf = about(advised([profile_of(logits(40))], run_of(model_kind="hf", model_vocab_size=256)), "logits")
    assert "train.micro_batch=2" in hf[0] and hf[1] == 20 * MIB
    own = about(advised([profile_of(logits(40))]), "logits")[0]
    assert "linear_cross_entropy" in own and "model." not in own and "train." not in own


def test_attention_scores_are_those_of_eager_attention() -> None:
    scores = (*QUIET, held("activations", 30, "layers.0.attention", "aten::_softmax", shape=(4, 2, 128, 128)))
    text, gain = about(advised([profile_of(scores)], run_of(model_attention="eager")), "model.attention=sdpa")
    assert gain == 30 * MIB and "30.000 MiB (23% of the peak)" in text
    assert not any("model.attention" in text for text, _ in advised([profile_of(scores)], run_of()))


def test_hidden_states_are_no_logits_where_the_model_is_as_wide_as_its_vocabulary() -> None:
    hidden = (
        held("temporary", 20, "norm", "aten::mul", shape=(4, 128, 512)),
        held("activations", 20, "tok_embeddings", "aten::index_select", shape=(4, 128, 512)),
        held("temporary", 20, "output", "aten::mm", shape=(512, 512)),  # the gradient of the head's input
        held("activations", 20, "", "aten::add", shape=(4, 128, 512)),
    )
    for run in (run_of(model_d_model=512), RunFacts()):
        _, gain = about(advised([profile_of((*hidden, *logits(40)))], run), "logits")
        assert gain == 35 * MIB
    assert not any("logits" in text for text, _ in advised([profile_of((*QUIET, *hidden))], run_of(model_d_model=512)))


def test_a_loss_in_pieces_is_advised_smaller_pieces_than_it_has() -> None:
    run = run_of(model_loss="chunked", model_loss_chunk=64)
    assert "model.loss_chunk=8 " in about(advised([profile_of(logits(40))], run), "logits")[0]
    smallest = run_of(model_loss="chunked", model_loss_chunk=4)
    assert not any("logits" in text for text, _ in advised([profile_of(logits(40))], smallest))


@pytest.mark.parametrize("heads", [1, 2])
def test_hidden_states_are_no_scores_where_the_model_is_as_wide_as_a_row_is_long(heads: int) -> None:
    run = run_of(model_attention="eager", model_d_model=128, model_n_heads=heads)
    alike = (
        held("activations", 20, "layers.0", "aten::add", shape=(4, 128, 128)),
        held("activations", 20, "layers.0.norm", "aten::mul", shape=(4, 128, 128)),
        held("activations", 20, "layers.0.attention", "aten::bmm", shape=(4, 128, 128 // heads)),
    )
    scores = held("activations", 30, "layers.0.attention", "aten::_softmax", shape=(4 * heads, 128, 128))
    product = held("activations", 30, "layers.0.attention", "aten::bmm", shape=(8, 128, 128))
    _, gain = about(advised([profile_of((*QUIET, *alike, scores, product))], run), "attention scores")
    assert gain == 30 * heads * MIB


def foreach(source: str, mib: float = 30) -> tuple[Holding, ...]:
    return held("temporary", mib, None, source), held("params", 40), held("optimizer", 60)


def test_an_optimizer_step_that_needs_memory_at_the_peak_could_be_fused() -> None:
    steps = [profile_of(foreach("aten::_foreach_sqrt"), phase="optimizer", beside_mib=90)]
    text, gain = about(advised(steps), "AdamW(fused=True)")
    assert gain == 30 * MIB and "aten::_foreach_sqrt" in text
    other = about(advised([profile_of(foreach("aten::cat"), phase="optimizer", beside_mib=90)]), "optimizer step, of")[
        0
    ]
    assert "aten::cat" in other and "fused" not in other
    for quiet in (
        profile_of(foreach("aten::_foreach_sqrt", 5), phase="optimizer", beside_mib=90),
        profile_of(foreach("aten::_foreach_sqrt"), phase="optimizer", beside_mib=129),
        profile_of(foreach("aten::_foreach_sqrt"), phase="backward", beside_mib=90),
    ):
        assert not any("temporary" in text and "optimizer step, of" in text for text, _ in advised([quiet]))


def test_gradients_that_wait_unsharded_are_told_by_what_they_take() -> None:
    waiting = [profile_of((*QUIET, held("grads", 48)))]
    run = run_of(train_accum_sync="boundary", train_grad_accum=2)
    text, gain = about(advised(waiting, run, grads=12 * MIB), "train.accum_sync=every")
    assert gain == 36 * MIB and "36.000 MiB (24% of the peak)" in text
    for other in (
        run_of(train_accum_sync="every", train_grad_accum=2),
        run_of(train_accum_sync="boundary"),
        run_of(train_accum_sync="boundary", train_grad_accum=2, engine_name="ddp"),
    ):
        assert not any("accum_sync" in text for text, _ in advised(waiting, other, grads=12 * MIB))
    assert not any("accum_sync" in text for text, _ in advised(waiting, run, grads=44 * MIB))


def test_without_a_deep_step_they_are_told_by_the_number_of_parameters() -> None:
    run = replace(
        run_of(train_accum_sync="boundary", train_grad_accum=2), costs=(Predicted(None, 1, 0, 0, 0, 0, 10 * MIB),)
    )
    report = MemoryReport(3, (replace(memory_of(profile_of(QUIET)), peak=None, live=None, at_peak=None),))
    assert [one.gain_bytes for one in advice(report, (), replace(run, costs=()))] == []
    (one,) = advice(report, (), run)
    assert one.gain_bytes == 40 * MIB and "train.accum_sync=every" in one.text


def segments(k: int) -> Plan:
    regions = tuple(Region(BLOCKS[start : start + k]) for start in range(0, len(BLOCKS), k))
    return Plan(blocks=BLOCKS, regions=regions, policy={"mode": "segments" if k > 1 else "full", "k": k})


def test_blocks_of_a_segment_that_are_whole_at_once_are_counted() -> None:
    whole = [held("unsharded", 20, f"{name}.attention.wq") for name in BLOCKS]
    text, gain = about(advised([profile_of((*QUIET, *whole))], run_of(plan=segments(4))), "unsharded")
    assert text.startswith("segments of 4 blocks hold 4 unsharded blocks at once, 80.000 MiB (44% of the peak)")
    assert "ckpt.k=2" in text and "ckpt=full" in text
    assert gain == 40 * MIB
    norm = held("unsharded", 1, "layers.3.norm")  # too small to be sharded
    text, gain = about(advised([profile_of((*QUIET, *whole[:3], norm))], run_of(plan=segments(4))), "unsharded")
    assert "hold 3 unsharded blocks at once, 61.000 MiB" in text and gain == 61 * MIB // 3
    two = [profile_of((*QUIET, *whole[:2]))]
    assert not any("unsharded" in text for text, _ in advised(two, run_of(plan=segments(4))))
    assert not any("unsharded" in text for text, _ in advised([profile_of((*QUIET, *whole))], run_of(plan=segments(1))))


@pytest.mark.parametrize(
    ("phase", "where"), [("optimizer", "the optimizer step"), ("loss", "the loss"), ("other", "the engine's own work")]
)
def test_a_peak_with_few_activations_is_no_case_for_recompute(phase: str, where: str) -> None:
    few = (
        held("optimizer", 60),
        held("params", 31),
        held("activations", 6, "layers.0"),
        held("recompute", 3, "layers.0"),
    )
    text, gain = about(advised([profile_of(few, phase=phase)], run_of("full")), "recompute cannot save more")
    assert f"only 9% of the peak, in {where}: recompute cannot save more than 9.000 MiB" in text
    assert "first lower the optimizer's state (engine=fsdp2, more ranks)" in text and "60.000 MiB" in text
    assert gain is None
    more = (*few, held("activations", 2, "layers.1"))
    assert not any("cannot save more" in text for text, _ in advised([profile_of(more)], run_of("full")))


@pytest.mark.parametrize(
    ("mode", "kind", "key"),
    [
        ("none", "activations", "ckpt=full keeps only their inputs (so the figure); ckpt=selective frees less"),
        ("selective", "activations", "ckpt=full keeps only their inputs;"),
        ("full", "recompute", "ckpt=nested ckpt.k=1 ckpt.inner=[attention,mlp] does it in smaller pieces"),
        ("segments", "recompute", "ckpt=nested does it in smaller pieces"),
    ],
)
def test_the_next_policy_is_named_where_blocks_hold_much(mode: str, kind: Kind, key: str) -> None:
    def steps(mib: float, beside: float = 0) -> list[StepProfile]:
        blocks = [held(kind, mib / 2, f"layers.{n}.feed_forward") for n in (2, 3)]
        profile = profile_of((held("temporary", 100 - mib, "output"), *blocks), beside_mib=beside)
        return [
            replace(profile, holdings=profile.holdings[:2], rest_bytes=blocks[0].nbytes)
        ]  # small ones are not listed

    run = run_of(plan=segments(4)) if mode == "segments" else run_of(mode)
    text, gain = about(advised(steps(60), run), "launch/sweep.py")
    assert f"60.000 MiB (60% of the peak), with ckpt={mode}: {key}" in text
    # The block that runs again, or the larger half of it, needs its own in any case.
    assert gain == (30 if mode == "full" else 45) * MIB
    assert about(advised(steps(60, beside=74), run), "launch/sweep.py")[1] == 26 * MIB
    for quiet in (steps(30), steps(60, beside=80)):
        assert not any("launch/sweep.py" in text for text, _ in advised(quiet, run))
    assert not any("launch/sweep.py" in text for text, _ in advised(steps(60), run_of("nested")))


def test_room_for_everything_means_that_nothing_needs_recompute() -> None:
    cost = Predicted(None, 1, 20 * MIB, 90 * MIB, 130, 100, 0)
    run = replace(run_of("full"), costs=(cost,))
    text, gain = about(advised([profile_of(QUIET)], run, capacity=200 * MIB, reserved=104 * MIB), "ckpt=none")
    assert "about 174.000 MiB of 200.000 MiB" in text and "30% less compute" in text and gain is None
    for other, capacity in (
        (run, 190 * MIB),
        (run, None),
        (replace(run, costs=(replace(cost, flops=100),)), 200 * MIB),
    ):
        assert not any(
            "ckpt=none" in t for t, _ in advised([profile_of(QUIET)], other, capacity=capacity, reserved=104 * MIB)
        )


def test_whole_model_states_on_every_rank_could_be_sharded() -> None:
    states = (held("params", 20), held("grads", 20), held("optimizer", 40), held("activations", 20, "layers.0"))
    steps = [profile_of(states, rank=rank) for rank in range(4)]
    text, gain = about(advised(steps, run_of(engine_name="ddp")), "engine=fsdp2 keeps")
    assert "80.000 MiB (80% of the peak)" in text and gain == 60 * MIB
    assert not any("engine=fsdp2 keeps" in text for text, _ in advised(steps, run_of()))
    assert not any("engine=fsdp2 keeps" in text for text, _ in advised(steps[:1], run_of(engine_name="ddp")))


def test_zero_shards_what_it_does_not_yet() -> None:
    run = run_of(engine_name="deepspeed")
    zero = [held("params", 30), held("grads", 30), held("optimizer", 60), held("activations", 40, "layers.0")]
    text, gain = about(advised([profile_of(zero, rank=rank) for rank in range(2)], run), "zero_optimization.stage=3")
    assert "all parameters, gradients and moments, 120.000 MiB" in text and gain == 60 * MIB
    zero[2] = held("optimizer", 45)  # of stage 1 or 2 on two ranks: 12 bytes a parameter, halved
    zero[0] = held("params", 40)
    text, gain = about(advised([profile_of(zero, rank=rank) for rank in range(2)], run), "zero_optimization.stage=3")
    assert "all parameters, 40.000 MiB" in text and gain == 20 * MIB
    for other in (
        [*zero, held("unsharded", 10, "layers.0")],
        [held("params", 20), held("optimizer", 30), *zero[1:2], *zero[3:]],
    ):
        found = advised([profile_of(other, rank=rank) for rank in range(2)], run)
        assert not any("zero_optimization" in text for text, _ in found)
    assert not any("zero_opt" in text for text, _ in advised([profile_of(zero, phase="optimizer")] * 2, run))


def test_memory_that_the_allocator_only_reserves_is_told() -> None:
    one = memory_of(profile_of(QUIET), reserved=130 * MIB, alloc_retries=2)
    (found,) = advice(MemoryReport(3, (one,)), (), run_of())
    assert "reserves 30.000 MiB more" in found.text and "23% of 130.000 MiB" in found.text and "2 times" in found.text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in found.text and found.gain_bytes == 30 * MIB
    assert advice(MemoryReport(3, (replace(one, reserved=108 * MIB),)), (), run_of()) == ()


def test_a_rank_with_twice_the_batch_is_named() -> None:
    more = (*QUIET, held("activations", 30, "layers.0"))
    steps = [profile_of(more if rank == 2 else QUIET, rank=rank) for rank in range(4)]
    text, gain = about(advised(steps, run_of()), "above the other ranks")
    assert text.startswith(
        "the memory of rank 2 is 130.000 MiB, 30% above the other ranks (100.000 MiB), most of it activations"
    )
    assert "micro-batches of the same rows" in text and gain == 30 * MIB
    less = [profile_of((*QUIET, held("activations", 9 * (rank == 2), "layers.0")), rank=rank) for rank in range(4)]
    assert not any("above" in text for text, _ in advised(less, run_of()))


def test_ranks_are_compared_by_what_is_accounted_where_there_is_no_deep_step() -> None:
    ranks = [RankMemory(rank, "cpu", 3, 10, 10, 20, 0, activations=60 * (1 + (rank == 1))) for rank in range(3)]
    (found,) = advice(MemoryReport(3, tuple(ranks)), (), run_of())
    assert found.text.startswith("the memory of rank 1 is") and "60% above" in found.text and found.gain_bytes == 60


def test_what_is_accounted_is_not_called_a_peak() -> None:
    ranks = [RankMemory(rank, "cpu", 3, 40, 40, 80, 0, activations=40) for rank in range(2)]
    (found,) = advice(MemoryReport(3, tuple(ranks)), (), run_of(engine_name="ddp"))
    assert "80% of what is accounted for)" in found.text


def test_stages_that_are_uneven_alike_are_one_advice() -> None:
    more = {1: 30, 5: 40, 9: 35}
    steps = [
        profile_of((*QUIET, held("activations", more.get(rank, 0), "layers.0")), rank=rank, stage=rank // 4)
        for rank in range(12)
    ]
    text, gain = about(advised(steps, run_of(engine_stages=3)), "micro-batches of the same rows")
    assert text.startswith("the memory of rank 5 is 140.000 MiB, 40% above the other ranks of stage 1")
    assert "most of it activations (likewise ranks 1,9, in other stages)" in text and gain == 40 * MIB
    holds = [*steps[:11], profile_of((*QUIET, held("unattributed", 30)), rank=11, stage=2)]
    found = advised([one for one in holds if one.rank != 9], run_of(engine_stages=3))
    assert "rank 5" in about(found, "same rows")[0] and "rank 11" in about(found, "holds on to")[0]


def pipeline(first: float, kind: Kind = "activations") -> list[StepProfile]:
    """Two stages of two ranks; the first holds more of one kind."""
    return [
        profile_of((*QUIET, held(kind, first if rank < 2 else 0, "layers.0")), rank=rank, stage=rank // 2)
        for rank in range(4)
    ]


def test_a_stage_above_the_others_gets_a_policy_of_its_own() -> None:
    run = run_of("selective", engine_stages=2, engine_name="deepspeed_pipe")
    text, gain = about(advised(pipeline(40), run), "ckpt.per_stage")
    assert text.startswith("stage 0 has a peak of 140.000 MiB, 40% above the next one, stage 1 (100.000 MiB)")
    assert "'ckpt.per_stage=[full,selective]'" in text and gain == 40 * MIB
    assert not any("above" in text for text, _ in advised(pipeline(10), run))


def test_a_stage_with_too_many_weights_is_a_matter_of_the_partition() -> None:
    run = run_of("selective", engine_stages=2, engine_name="deepspeed_pipe")
    text, _ = about(advised(pipeline(60, "optimizer"), run), "above the next one")
    assert "engine.partition" in text and "most of it optimizer" in text
    hardest = Plan(policy={"mode": "per_stage", "per_stage": [{"mode": "nested"}, {"mode": "none"}]})
    last = run_of(plan=hardest, engine_stages=2, engine_name="deepspeed_pipe")
    assert "engine.partition" in about(advised(pipeline(40), last), "above the next one")[0]


def test_who_holds_what_nobody_owns_is_named() -> None:
    kept = (*QUIET, held("unattributed", 30, source="list in train.py:12"))
    steps = [profile_of(kept if rank else QUIET, rank=rank) for rank in range(4)]
    found = [one for one in advised(steps, run_of()) if "held by" in one[0]]
    assert len(found) == 1
    assert "30.000 MiB" in found[0][0] and "list in train.py:12 on ranks 1-3" in found[0][0]
    assert found[0][1] == 30 * MIB
    copies = [held("unattributed", 15, source=f"Linear.{one} of variable 'old' in train.py:9") for one in ("a", "b")]
    advices = advised([profile_of((*QUIET, *copies))], run_of())
    assert about(advices, "held by variable 'old' in train.py:9")[1] == 30 * MIB, "as one"
    little = (*QUIET, held("unattributed", 5, source="list in train.py:12"))
    assert not any("held by" in text for text, _ in advised([profile_of(little)], run_of()))


def test_unknown_memory_is_told_where_there_was_no_deep_step() -> None:
    one = memory_of(profile_of(QUIET))
    (found,) = advice(MemoryReport(3, (replace(one, live=one.live + 20 * MIB),)), (), run_of())  # type: ignore[operator]
    assert "20.000 MiB" in found.text and "report.profile_step" in found.text
    assert advice(MemoryReport(3, (replace(one, live=one.live + 4 * MIB),)), (), run_of()) == ()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("engine", "precision", "usual"),
    [("fsdp2", "fp32", 2), ("fsdp2", "bf16", 2), ("deepspeed", "fp32", 3), ("deepspeed", "bf16", 6)],
)
def test_an_optimizer_with_a_copy_of_its_state_is_told(engine: str, precision: str, usual: int) -> None:
    run = run_of(engine_name=engine, train_precision=precision)
    steps = [profile_of(QUIET)]
    text, gain = about(advised(steps, run, grads=12 * MIB, optimizer=usual * 24 * MIB), "the optimizer of rank 0")
    assert f"{2 * usual:.1f} times its gradients, and AdamW {usual} times" in text and gain == usual * 12 * MIB
    for optimizer in (usual * 12, usual * 17):
        found = advised(steps, run, grads=12 * MIB, optimizer=optimizer * MIB)
        assert not any("the optimizer of" in text for text, _ in found)


def test_the_optimizer_of_anybodys_own_loop_may_need_more_than_adamw() -> None:
    steps = [profile_of(QUIET)]
    text, gain = about(advised(steps, grads=12 * MIB, optimizer=48 * MIB), "the optimizer of rank 0")
    assert "it may hold a copy" in text and "drop" not in text and gain is None
    amsgrad = advised(steps, grads=12 * MIB, optimizer=37 * MIB)
    assert not any("the optimizer of" in text for text, _ in amsgrad)


def test_the_largest_gain_comes_first_and_what_is_no_matter_of_bytes_last() -> None:
    kept = (held("optimizer", 80), held("unattributed", 12, source="a"), held("unattributed", 15, source="b"))
    gains = [gain for _, gain in advised([profile_of(kept)], run_of())]
    assert gains == [15 * MIB, 12 * MIB, None]


KEYS = re.compile(r"(train|model|ckpt|engine|report|data|sweep)(\.\w+)?=|\b(train|report|engine)\.\w|launch/")


def test_anybodys_own_loop_is_told_no_key_of_ours() -> None:
    one = memory_of(profile_of(QUIET))
    whole = [held("unsharded", 20, f"{name}.attention.wq") for name in BLOCKS]
    uneven = [profile_of((*QUIET, held("activations", 60 * (rank == 1), "layers.0")), rank, rank) for rank in (0, 1)]
    found = [
        *(text for kind in KINDS for text, _ in advised([profile_of([held(kind, 100, "layers.0")])])),
        *(text for stage in (0, 1) for text, _ in advised([replace(p, rank=1 - p.rank, stage=stage) for p in uneven])),
        *(
            text
            for mode in ("none", "full", "segments", "selective")
            for text, _ in advised(
                [profile_of((*QUIET, *whole, held("recompute" if mode != "none" else "activations", 300, "layers.0")))],
                RunFacts(plan=replace(segments(4), policy={"mode": mode})),
            )
        ),
        *(text for text, _ in advised([profile_of((*QUIET, *whole))], RunFacts(plan=segments(4)))),
        *(text for text, _ in advised(uneven, RunFacts(plan=Plan(stages=(("layers.0",), ("layers.1",)))))),
        *(text for text, _ in advised([profile_of(foreach("aten::_foreach_sqrt"), phase="optimizer")])),
        *(text for text, _ in advised([profile_of(logits(40))])),
        *(a.text for a in advice(MemoryReport(3, (replace(one, live=one.live + 20 * MIB),)), (), RunFacts())),  # type: ignore[operator]
    ]
    assert [text for text in found if KEYS.search(text)] == []
    said = "\n".join(found)
    words = (
        "recompute cannot",
        "MemoryMeter.profile()",
        "blocks keep for backward",
        "compute again",
        "above the next",
        "unsharded blocks at once",
    )
    for rule in words:
        assert rule in said, rule
