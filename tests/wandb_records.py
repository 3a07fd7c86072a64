"""What Weights & Biases has recorded, read back from its files in a run folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt.memory.records import ACCOUNTED, GIB
from dist_ckpt.report.jsonl import read_json_lines
from dist_ckpt.report.wandb.log import logs, read_log


@dataclass(frozen=True)
class Recorded:
    """One start of a W&B run."""

    run_id: str
    project: str
    config: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    """By step, without what W&B adds by itself."""
    files: tuple[str, ...]
    """Media, under the start's ``files/``."""
    artifacts: dict[str, tuple[str, ...]]
    """Type to the names of the files in it."""
    exit_code: int | None
    """None if nobody has told the end."""
    commit: str
    folder: Path

    def media(self, key: str) -> Path:
        """The file of the last value of a key."""
        (path,) = [row[f"{key}.path"] for row in self.rows.values() if f"{key}.path" in row][-1:]
        return self.folder / "files" / path


def recorded(run: Path) -> list[Recorded]:
    """Every start, oldest first, of the only W&B run in a run folder."""
    starts = [path.name for path in (run / "wandb").glob("*run-*")]
    (run_id,) = {name.rpartition("-")[2] for name in starts if name != "latest-run"}
    assert run_id == (run / "wandb" / "run_id").read_text().strip()
    return [_read(path) for path in logs(run, run_id)]


def assert_as_in_the_folder(run: Path, starts: list[Recorded]) -> None:
    """Every line and every rank of every report is in W&B, once, and nothing else is."""
    rows = {step: row for start in starts for step, row in start.rows.items()}
    assert sum(len(start.rows) for start in starts) == len(rows)
    lines = read_json_lines(run / "metrics.jsonl")
    assert list(rows) == [line["step"] for line in lines]
    for line in lines:
        row = rows[line["step"]]
        assert row["loss_metrics/global_avg_loss"] == line["loss"]
        assert row.get("validation_metrics/loss") == line.get("eval_loss")
        assert [row[name] for name in ("grad_norm", "lr", "tokens")] == [line[n] for n in ("grad_norm", "lr", "tokens")]
    reports = {report["step"]: report["ranks"] for report in read_json_lines(run / "memory.jsonl")}
    assert {step for step, row in rows.items() if "memory/rank_0/params(GiB)" in row} == set(reports)
    for step, ranks in reports.items():
        for rank in ranks:
            found = {name: rows[step].get(f"memory/rank_{rank['rank']}/{name}(GiB)") for name in ACCOUNTED}
            assert found == {name: rank[name] / GIB for name in ACCOUNTED}


def steps(starts: list[Recorded]) -> list[int]:
    """The steps of all rows, one after the other."""
    return [step for start in starts for step in start.rows]


def without_account(patch: pytest.MonkeyPatch, home: Path) -> None:
    """As on a machine on which nobody has ever used W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patch.delenv(name)
    patch.setenv("HOME", str(home))
    patch.setenv("NETRC", str(home / ".netrc"))


def _read(path: Path) -> Recorded:
    rows: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    files: list[str] = []
    artifacts: dict[str, tuple[str, ...]] = {}
    run_id, project, commit, code = "", "", "", None
    for record in read_log(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            commit = record.run.git.commit
        elif kind == "history":
            step = record.history.step.num
            assert step not in rows, "two rows of one step"
            named = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows[step] = {name: value for name, value in named.items() if not name.startswith("_")}
        elif kind == "files":
            files += [file.path for file in record.files.files]
        elif kind == "artifact":
            artifacts[record.artifact.type] = tuple(entry.path for entry in record.artifact.manifest.contents)
        elif kind == "exit":
            code = record.exit.exit_code
    return Recorded(run_id, project, config, rows, tuple(files), artifacts, code, commit, path.parent)
