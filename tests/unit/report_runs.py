"""Run folders made up for tests of reports, with numbers as a decoder of 4 blocks has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Kind, Phase, Span, StepProfile
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.plan import OpRule, Plan, Region, SaveRule

MIB = 2**20
BLOCKS = tuple(f"layers.{n}" for n in range(4))


def profile(rank: int, stage: int | None = None, weight: int = 1, moments: int = 1, step: int = 6) -> StepProfile:
    """A deep step of two micro-batches, 0.2 s long; its peak is in the first backward.

    Args:
        weight: times the activations.
        moments: drawn for each that the curve needs.
    """
    static: dict[Kind, int] = {"params": 40 * MIB, "optimizer": 80 * MIB, "buffers": MIB, "unattributed": 3 * MIB}
    times: list[float] = [0.0]
    curve: list[dict[Kind, int]] = [dict.fromkeys(KINDS, 0) | static]
    phases: list[Phase] = []
    spans: list[Span] = []

    def advance(seconds: float, **changes: int) -> None:
        for part in range(1, moments + 1):
            times.append(times[-1] + seconds / moments)
            last = curve[-1]
            curve.append({kind: last[kind] + changes.get(kind, 0) * part // moments for kind in KINDS} if part == 1
                         else dict(last))  # fmt: skip
        curve[-1] = {kind: curve[-1 - moments][kind] + changes.get(kind, 0) for kind in KINDS}

    def phase(name: str, micro_batch: int | None, first: int) -> None:
        worst = max(range(first, len(curve)), key=lambda n: sum(curve[n].values()))
        phases.append(
            Phase(name, micro_batch, times[first], times[-1], sum(curve[worst].values()), curve[worst])  # type: ignore[arg-type]
        )

    for micro_batch in range(2):
        first = len(curve) - 1
        for block in BLOCKS:
            start = times[-1]
            advance(0.006, activations=30 * MIB * weight, temporary=4 * MIB)
            spans.append(Span(block, "forward", micro_batch, start, times[-1]))
        phase("forward", micro_batch, first)
        first = len(curve) - 1
        advance(0.004, temporary=12 * MIB)
        phase("loss", micro_batch, first)
        first = len(curve) - 1
        for block in reversed(BLOCKS):
            start = times[-1]
            advance(0.005, recompute=25 * MIB, communication=2 * MIB)
            spans.append(Span(block, "recompute", micro_batch, start, times[-1]))
            start = times[-1]
            grads = 10 * MIB if micro_batch == 0 else 0
            advance(0.007, recompute=-25 * MIB, communication=-2 * MIB, activations=-30 * MIB * weight, grads=grads)
            spans.append(Span(block, "backward", micro_batch, start, times[-1]))
        advance(0.001, temporary=-28 * MIB)
        phase("backward", micro_batch, first)
    boundary = sum(curve[-1].values())
    first = len(curve) - 1
    advance(0.01, temporary=40 * MIB)
    advance(0.01, temporary=-40 * MIB, grads=-40 * MIB)
    phase("optimizer", None, first)
    worst = max(range(len(curve)), key=lambda n: sum(curve[n].values()))
    at_peak = curve[worst]
    holdings = [
        Holding(kind, f"layers.{n}" if kind in ("activations", "recompute") else None, "aten::mm", (512, 1024),
                "float32", nbytes // len(BLOCKS), 1 + n)
        for kind, nbytes in at_peak.items() if nbytes > 8 * MIB
        for n in range(len(BLOCKS))
    ]  # fmt: skip
    holdings.sort(key=lambda one: -one.nbytes)
    return StepProfile(
        rank=rank, stage=stage, device="cpu", step=step, duration_s=times[-1], start_bytes=sum(curve[0].values()),
        boundary_bytes=boundary, end_bytes=sum(curve[-1].values()), peak_bytes=sum(at_peak.values()),
        peak_s=times[worst], phase=next(p.name for p in phases if p.start_s <= times[worst] <= p.end_s),
        at_peak=at_peak, holdings=tuple(holdings), rest_bytes=sum(at_peak.values()) - sum(h.nbytes for h in holdings),
        phases=tuple(phases), spans=tuple(spans), times_s=tuple(times),
        timeline={kind: tuple(moment[kind] for moment in curve) for kind in KINDS},
    )  # fmt: skip


def memory(profiles: Sequence[StepProfile], step: int = 6, capacity: int | None = None) -> MemoryReport:
    """What every rank says of the deep step."""
    return MemoryReport(
        step,
        tuple(
            RankMemory(
                rank=p.rank, stage=p.stage, device=p.device, step=step, params=p.at_peak["params"], grads=40 * MIB,
                optimizer=p.at_peak["optimizer"], other=p.at_peak["buffers"], activations=p.at_peak["activations"],
                live=p.boundary_bytes, peak=p.peak_bytes, capacity=capacity, at_peak={"phase": p.phase, **p.at_peak},
            )
            for p in profiles
        ),
    )  # fmt: skip


def plan(stages: int = 0) -> Plan:
    rules = (OpRule("save", "matmul"), OpRule("save", "attention", required=False))
    regions = tuple(Region((block,), SaveRule(ops=rules)) for block in BLOCKS[:3])
    split = (
        tuple(BLOCKS[n::1][: len(BLOCKS) // stages] for n in range(0, len(BLOCKS), len(BLOCKS) // stages))
        if stages
        else ()
    )
    return Plan(BLOCKS, regions, split, unmatched=BLOCKS[3:], policy={"mode": "selective"}, notes=("made up",))


def write_run(
    folder: Path, profiles: Sequence[StepProfile] = (), *, stages: int = 0, ranks: int = 2, mode: str = "selective"
) -> Path:
    """A whole run folder, of 12 steps with a report each sixth; the deep step is the sixth, if there is one."""
    folder.mkdir(parents=True)
    config = (
        "train: {steps: 12, micro_batch: 4, grad_accum: 2, global_batch: null, seq_len: 128}\n"
        f"ckpt: {{mode: {mode}}}\nmodel: {{kind: decoder}}\n"
        f"engine: {{name: {'deepspeed_pipe' if stages else 'fsdp2'}, stages: {stages or 1}}}\n"
    )
    (folder / "config.yaml").write_text(config)
    (folder / "plan.json").write_text(plan(stages).to_json())
    lines = [
        {"step": n, "loss": 5 - n / 10, "grad_norm": 1.5, "lr": 1e-3, "tokens": 2048, "tokens_per_s": 2048 / 0.25,
         "step_s": 1.0 if n == 6 else 0.25 + n / 1000}
        for n in range(1, 13)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = [
        RankMemory(rank=n, device="cpu", step=12, params=40 * MIB, grads=40 * MIB, optimizer=80 * MIB, other=MIB,
                   activations=(100 + n) * MIB, stage=profiles[n].stage if profiles else None)
        for n in range(len(profiles) or ranks)
    ]  # fmt: skip
    reports = [*([memory(profiles)] if profiles else []), MemoryReport(12, tuple(ledger))]
    (folder / "memory.jsonl").write_text("".join(json.dumps(report.to_dict()) + "\n" for report in reports))
    for one in profiles:
        (folder / "profile").mkdir(exist_ok=True)
        (folder / "profile" / f"rank_{one.rank}.json").write_text(json.dumps(one.to_dict()))
    costs = [
        {"stage": n if stages else None, "in_flight": max(stages - n, 1), "saved_bytes": 95 * MIB * max(stages - n, 1),
         "baseline_saved_bytes": 160 * MIB * max(stages - n, 1), "flops": 1_300_000, "baseline_flops": 1_200_000,
         "parameters": 10_000_000}
        for n in range(stages or 1)
    ]  # fmt: skip
    (folder / "cost.json").write_text(json.dumps(costs))
    (folder / "exit.json").write_text(json.dumps({"code": 0, "name": "done", "reason": "all steps done", "time": 0.0}))
    return folder
