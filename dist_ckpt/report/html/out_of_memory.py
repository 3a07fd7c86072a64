"""The page of a rank that has run out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt.memory.records import ACCOUNTED, MemoryReport, in_bytes
from dist_ckpt.report.html.page import render
from dist_ckpt.report.html.parts import Bytes, Cell, Fact, Facts, Listing, Part, Section, Share, Table

Record = Mapping[str, Any]
"""What ``oom/rank_r.json`` holds."""

_RANKS = 64
"""Of the last report that are listed, the heaviest."""

_PHASES = {
    "setup": "while the model was set up",
    "forward": "in forward",
    "loss": "in the loss",
    "recompute": "in the recompute of a region, in backward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "evaluation": "in validation",
    "saving": "while a training state was saved or loaded",
    "other": "between the parts of a step",
}


def out_of_memory_page(record: Record) -> str:
    """One rank's page.

    Args:
        record: as JSON has it.
    """
    made: tuple[tuple[str, str, tuple[Part, ...]], ...] = (
        ("asked", "What was asked for", _asked(record)),
        ("alive", "What filled memory", _alive(record)),
        ("next", "What to try", _next(record)),
        ("holdings", "The largest tensors", _holdings(record)),
        ("ranks", "The other ranks", _ranks(record)),
        ("notes", "Not found out", tuple(record["notes"])),
    )
    sections = [Section(anchor, title, parts) for anchor, title, parts in made if parts]
    return render("sections.html.j2", title=_title(record), lead=[_lead(record)], sections=sections)


def _title(record: Record) -> str:
    stage = "" if record["stage"] is None else f" (stage {record['stage']})"
    return f"Rank {record['rank']}{stage} ran out of memory in step {record['step']}"


def _lead(record: Record) -> str:
    requested = record["requested_bytes"]
    what = "An allocation" if requested is None else f"An allocation of {in_bytes(requested)}"
    collective = f", for the collective {record['collective']}" if record["collective"] else ""
    return f"{what} failed {_PHASES[record['phase']]}{_of_module(record['module'])}{collective}."


def _of_module(module: str | None) -> str:
    return "" if module is None else f" of {module}" if module else " of the model itself"


_HOLDERS = {"cpu": "by the process"}


def _asked(record: Record) -> tuple[Part, ...]:
    facts = [
        Fact("asked for", in_bytes(record["requested_bytes"])),
        Fact("phase", record["phase"], record["collective"] or ""),
        Fact("module", _module(record["module"]), "estimated from the graph" if record["phase"] == "backward" else ""),
        Fact("held", in_bytes(record["held_bytes"]), _HOLDERS.get(record["device"], "by the allocator")),
        Fact("limit", in_bytes(record["limit_bytes"]), "" if record["limit_bytes"] else "none but the device's"),
    ]
    line = [f"Line: {record['line']}"] if record["line"] else []
    return (Facts(tuple(facts)), *line, f"Error: {record['message']}")


def _alive(record: Record) -> tuple[Part, ...]:
    by_kind: Mapping[str, int] = record["by_kind"]
    total = sum(by_kind.values())
    kinds = sorted((kind for kind in by_kind if by_kind[kind]), key=lambda kind: -by_kind[kind])
    rows = tuple((kind, Bytes(by_kind[kind]), Share(by_kind[kind] / total)) for kind in kinds)
    parts: list[Part] = [Table("tensors by kind", ("kind", "bytes", "share"), rows, note=_ALIVE)]
    if record["unexplained_bytes"] is not None:
        parts.append(
            Table(
                "what was held",
                ("part", "bytes"),
                (
                    ("before there was a model", Bytes(record["start_bytes"])),
                    ("tensors", Bytes(total)),
                    ("not explained", Bytes(record["unexplained_bytes"])),
                    ("together", Bytes(record["held_bytes"])),
                ),
                note="Not explained: the allocator's gaps, Python's objects, libraries, threads, and what went when "
                "the error passed.",
            )
        )
    by_module: Mapping[str, Mapping[str, int]] = record["by_module"]
    if by_module:
        shown = [kind for kind in kinds if any(kind in inner for inner in by_module.values())]
        modules: tuple[tuple[Cell, ...], ...] = tuple(
            (_module(name), Bytes(sum(inner.values())), *(Bytes(inner.get(kind, 0)) for kind in shown))
            for name, inner in by_module.items()
        )
        note = "The module of a saved tensor is told from the parameters around it in the graph."
        parts.append(Table("by module, heaviest first", ("module", "all", *shown), modules, note=note))
    return tuple(parts)


_ALIVE = (
    "Still there when the error arrived. The failed operation's own temporaries, and gradients on their way through "
    "backward, were gone by then."
)


def _next(record: Record) -> tuple[Part, ...]:
    found: Sequence[Mapping[str, Any]] = record["suggestions"]
    if not found:
        return (record["advice"],)
    rows = tuple(
        (
            one["change"],
            Bytes(one["freed_bytes"]),
            Bytes(one["saved_bytes"]),
            f"+{one['recomputed']:.1%}",
        )
        for one in found
    )
    columns = ("change", "saves", "activations then", "FLOPs more than without a policy")
    note = "Predicted for this rank as plan_cost does it, on the model without memory."
    return (record["advice"], Table("less activations", columns, rows, note=note))


def _holdings(record: Record) -> tuple[Part, ...]:
    rows = tuple(
        (
            one["kind"],
            _module(one["module"]),
            one["source"],
            " × ".join(map(str, one["shape"] or ())) or "-",
            one["dtype"] or "-",
            one["count"],
            Bytes(one["nbytes"]),
        )
        for one in record["holdings"]
    )
    rest = record["rest_bytes"]
    note = f"Smaller ones, {in_bytes(rest)} together, are left out." if rest else ""
    columns = ("kind", "module", "what", "shape", "dtype", "count", "bytes")
    return (Table("alike tensors together, heaviest first", columns, rows, note=note),) if rows else ()


def _ranks(record: Record) -> tuple[Part, ...]:
    if record["last_report"] is None:
        return ("No memory was reported before.",)
    report, heaviest = MemoryReport.from_dict(record["last_report"]), record["heaviest_rank"]
    columns = (*ACCOUNTED, "accounted", "peak")
    shown = sorted(report.ranks, key=lambda rank: rank.peak_or_accounted or 0, reverse=True)[:_RANKS]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (rank.rank, *(Bytes(getattr(rank, name)) for name in columns)) for rank in shown
    )
    left_out = len(report.ranks) - len(rows)
    note = f"The {left_out} lightest ranks are left out." if left_out else ""
    mine = "this one" if heaviest == record["rank"] else f"rank {heaviest}"
    return (
        Listing(((f"The heaviest rank was {mine}, as of step {report.step}.", ""),)),
        Table(f"memory per rank at step {report.step}", ("rank", *columns), rows, note=note),
    )


def _module(name: str | None) -> str:
    return "-" if name is None else name or "(the model itself)"
