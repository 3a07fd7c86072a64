"""The suite's two tiers, slices of the full one, and the record of what has passed at which commit.

Tiers: a test marked ``full`` belongs to the full tier and is left out unless asked for, or named on the
command line by its id.

    pytest                    the fast tier: each kind of thing once
    pytest --slice 3/8        the fast tier and the fourth (0-based: number 3) of eight parts of the full tier
    pytest -m full --slice 3/8    that part alone
    pytest --full             both tiers, every matrix

Record: ``pytest --full --record=docs/verification.json`` writes each test's outcome with the commit it was
run at. Run again at the same commit, it leaves out what has passed there, so that a long run can be
interrupted and taken up. The commit is the last one that touches anything but the record itself, so that
committing the record changes nothing; with uncommitted changes it ends in ``-dirty``, and no such outcome
is ever taken for granted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCHEMA = 1
WRITE_EVERY_S = 5.0
"""A run that is killed loses at most the outcomes of so many seconds."""
UNKNOWN_COMMIT = "unknown"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "tiers of the suite")
    group.addoption("--full", action="store_true", help="run the full tier too: every matrix")
    group.addoption("--slice", metavar="I/N", help="run the I-th of N parts of the full tier too; I counts from 0")
    group.addoption("--record", metavar="FILE", help="keep outcomes in this JSON file; leave out what has passed")


def pytest_configure(config: pytest.Config) -> None:
    part = config.getoption("slice")
    if part is not None:
        if config.getoption("full"):
            raise pytest.UsageError("--full and --slice exclude each other: --full is all of the full tier")
        _parse_slice(part)
    path = config.getoption("record")
    if path is not None:
        config.pluginmanager.register(Recorder(config.rootpath, config.rootpath / path), "verification-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("full"):
        return
    part = config.getoption("slice")
    index, parts = _parse_slice(part) if part is not None else (0, 0)

    def wanted(item: pytest.Item) -> bool:
        if item.get_closest_marker("full") is None or _is_named(config, item):
            return True
        return parts > 0 and slice_of(item.nodeid, parts) == index

    _deselect(config, items, [item for item in items if not wanted(item)])


def slice_of(test_id: str, parts: int) -> int:
    """Which of ``parts`` parts a test belongs to, whatever other tests there are: [0, parts)."""
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8], "big") % parts


def _parse_slice(text: str) -> tuple[int, int]:
    index, _, parts = text.partition("/")
    if not (index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
        raise pytest.UsageError(f"--slice {text}: must be I/N with 0 <= I < N, as in 0/8")
    return int(index), int(parts)


def _is_named(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether the command line names this very test, with or without its parameters, not only its file."""
    test_id = item.nodeid
    return any("::" in arg and arg in (test_id, test_id.partition("[")[0]) for arg in config.args)


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


class Recorder:
    """Keeps outcomes in a JSON file: {schema, commit, python, torch, machine, summary, tests: {id: entry}}.

    An entry is ``{outcome, commit, seconds}`` and, for a skip, ``reason``. ``summary`` counts the outcomes
    of this commit, and as ``stale`` the entries that were last run at another.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.commit = commit_of(root, path)
        self._root = root
        self._path = path
        self._tests: dict[str, dict[str, Any]] = json.loads(path.read_text())["tests"] if path.exists() else {}
        self._running: dict[str, dict[str, Any]] = {}
        self._passed_before = 0
        self._written_s = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        """Forgets tests that are no more; of those that were chosen, leaves out what has passed."""
        if not any("::" in arg for arg in config.args):
            collected = {item.nodeid for item in items}
            files = {_file_of(test_id) for test_id in collected}
            for test_id in list(self._tests):
                file = _file_of(test_id)
                if test_id not in collected and (file in files or not (self._root / file).exists()):
                    del self._tests[test_id]
        yield
        passed = [item for item in items if self._has_passed(item.nodeid)]
        self._passed_before = len(passed)
        _deselect(config, items, passed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gathers the reports of a test's set-up, call and tear-down; the last one makes its entry."""
        entry = self._running.setdefault(report.nodeid, {"outcome": "", "commit": self.commit, "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + report.duration, 2)
        if report.when == "call" or not report.passed:
            entry["outcome"] = _outcome(report)
        if report.skipped:
            entry["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
        if report.when == "teardown":
            self._tests[report.nodeid] = self._running.pop(report.nodeid)
            if time.monotonic() - self._written_s > WRITE_EVERY_S:
                self._write()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the record; that everything has passed before is a success, not an empty run."""
        self._write()
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed_before:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line: what the record now says of this commit."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self._summary().items())
        earlier = f", {self._passed_before} of them earlier" if self._passed_before else ""
        terminalreporter.write_line(f"{self._path.name}: {counts or 'nothing'} at {self.commit}{earlier}")

    def _has_passed(self, test_id: str) -> bool:
        if self.commit == UNKNOWN_COMMIT or self.commit.endswith("-dirty"):
            return False
        entry = self._tests.get(test_id)
        return entry is not None and entry["outcome"] == "passed" and entry["commit"] == self.commit

    def _summary(self) -> dict[str, int]:
        here = [entry["outcome"] for entry in self._tests.values() if entry["commit"] == self.commit]
        counts = dict(sorted(Counter(here).items()))
        if len(here) < len(self._tests):
            counts["stale"] = len(self._tests) - len(here)
        return counts

    def _write(self) -> None:
        record = {
            "schema": SCHEMA,
            "commit": self.commit,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "summary": self._summary(),
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(temporary, self._path)
        self._written_s = time.monotonic()


def commit_of(root: Path, record: Path) -> str:
    """The hash of the last commit that touches more than ``record``, with ``-dirty`` where that applies."""
    others = ["--", ".", f":(exclude){record.relative_to(root)}"]
    try:
        commit = _git(root, "log", "-1", "--format=%H", *others)
        changes = _git(root, "status", "--porcelain", *others)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN_COMMIT
    return f"{commit}-dirty" if changes else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return "error" if report.failed and report.when != "call" else report.outcome


def _file_of(test_id: str) -> str:
    return test_id.partition("::")[0]
