"""The tiers, the slices and the record, on small suites made for the purpose."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.verification import slice_of

PLUGIN = ("-p", "tests.verification", "-p", "no:cacheprovider")
INI = "[pytest]\nmarkers = full: the full tier\n"
SUITE = """
import pytest

def test_fast():
    pass

@pytest.mark.full
@pytest.mark.parametrize("case", range(12))
def test_matrix(case):
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(test_suite=SUITE)
    return pytester


def _passed(suite: pytest.Pytester, *arguments: str) -> set[str]:
    result = suite.runpytest_inprocess(*PLUGIN, "-rA", *arguments)
    return {line.removeprefix("PASSED ") for line in result.outlines if line.startswith("PASSED ")}


def test_full_tier_only_runs_when_asked_for(suite: pytest.Pytester) -> None:
    assert _passed(suite) == {"test_suite.py::test_fast"}
    assert len(_passed(suite, "--full")) == 13
    assert _passed(suite, "test_suite.py::test_matrix[3]") == {"test_suite.py::test_matrix[3]"}
    assert len(_passed(suite, "test_suite.py::test_matrix")) == 12


def test_slices_share_the_full_tier_between_them(suite: pytest.Pytester) -> None:
    fast = {"test_suite.py::test_fast"}
    slices = [_passed(suite, "--slice", f"{index}/3") for index in range(3)]
    assert all(fast < part for part in slices)
    assert sum(len(part - fast) for part in slices) == 12
    assert set.union(*slices) == _passed(suite, "--full")
    assert slices[1] - fast == _passed(suite, "-m", "full", "--slice", "1/3")
    assert {slice_of(test_id, 3) for test_id in slices[1] - fast} == {1}


@pytest.mark.parametrize("arguments", [("--slice", "3/3"), ("--slice", "one"), ("--slice", "0/2", "--full")])
def test_wrong_options_are_refused(suite: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    result = suite.runpytest_inprocess(*PLUGIN, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def _commit(folder: Path, message: str) -> str:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", message)
    return git("rev-parse", "HEAD")


def _record(folder: Path) -> Any:
    return json.loads((folder / "docs" / "record.json").read_text())


def test_record_takes_up_where_it_ended(pytester: pytest.Pytester) -> None:
    pytester.makefile(".ini", pytest=INI)
    pytester.makefile("", **{".gitignore": "__pycache__/\nswitch\n"})
    pytester.makepyfile(
        test_suite="""
        import os, pytest

        def test_good(): pass

        @pytest.mark.full
        def test_switched(): assert os.path.exists("switch")

        @pytest.mark.skip(reason="not here")
        def test_skipped(): pass

        @pytest.mark.xfail(strict=True)
        def test_xfailed(): assert False

        @pytest.fixture
        def broken(): raise RuntimeError

        def test_broken(broken): pass
        """
    )
    first = _commit(pytester.path, "one")
    run = (*PLUGIN, "--full", "--record", "docs/record.json")
    pytester.runpytest_inprocess(*run).assert_outcomes(passed=1, failed=1, skipped=1, xfailed=1, errors=1)
    record = _record(pytester.path)
    assert record["commit"] == first
    assert record["summary"] == {"error": 1, "failed": 1, "passed": 1, "skipped": 1, "xfailed": 1}
    assert record["tests"]["test_suite.py::test_skipped"]["reason"] == "Skipped: not here"

    Path("switch").touch()
    _commit(pytester.path, "only the record")
    again = pytester.runpytest_inprocess(*run)
    again.assert_outcomes(passed=1, skipped=1, xfailed=1, errors=1, deselected=1)
    again.stdout.fnmatch_lines([f"record.json: 1 error, 2 passed, * at {first}, 1 of them earlier"])

    pytester.makepyfile(test_suite="def test_good(): pass\n\ndef test_new(): pass\n")
    pytester.runpytest_inprocess(*run).assert_outcomes(passed=2)
    assert _record(pytester.path)["commit"] == f"{first}-dirty"
    assert set(_record(pytester.path)["tests"]) == {"test_suite.py::test_good", "test_suite.py::test_new"}
    pytester.runpytest_inprocess(*run).assert_outcomes(passed=2)

    second = _commit(pytester.path, "two")
    pytester.runpytest_inprocess(*run, "-k", "good").assert_outcomes(passed=1, deselected=1)
    assert _record(pytester.path)["summary"] == {"passed": 1, "stale": 1}
    pytester.runpytest_inprocess(*run).assert_outcomes(passed=1, deselected=1)
    assert _record(pytester.path)["summary"] == {"passed": 2}
    nothing_left = pytester.runpytest_inprocess(*run)
    assert nothing_left.ret == pytest.ExitCode.OK
    assert {entry["commit"] for entry in _record(pytester.path)["tests"].values()} == {second}


def test_record_outside_a_repository_takes_nothing_for_granted(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(suite.path.parent))
    for _ in range(2):
        suite.runpytest_inprocess(*PLUGIN, "--record", "docs/record.json").assert_outcomes(passed=1, deselected=12)
    assert _record(suite.path)["commit"] == "unknown"
