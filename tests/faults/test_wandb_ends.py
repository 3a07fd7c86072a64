"""Runs with Weights & Biases that end in any way, or cannot reach it: the training does not notice, W&B does."""

from __future__ import annotations

import http.server
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.test_wandb_runs import assert_as_in_the_folder
from tests.faults.launching import FAULTY, ROOT, TINY, Finished, alone, exit_record, faulty, torchrun
from tests.wandb_records import recorded, without_account

pytest.importorskip("wandb")

pytestmark = pytest.mark.full

OPTIONS = (*TINY, "train.steps=6", "report.every=2", "train.eval_every=3", "run_dir=run")
OFFLINE, ONLINE = (*OPTIONS, "report.wandb=offline"), (*OPTIONS, "report.wandb=online")
KEY = "5ecret" * 7
"""No real one; as long as W&B's."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    without_account(monkeypatch, home)
    return home


def of_wandb(finished: Finished) -> list[str]:
    """What is said by or about it; "wandb" alone may be part of a path."""
    return [line for line in finished.output.splitlines() if "W&B" in line or "wandb:" in line]


def assert_no_key(*folders: Path) -> None:
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path


def test_a_dead_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _home: Path) -> None:
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    finished = torchrun(*ONLINE, cwd=tmp_path, environment=environment)
    assert finished.code == 0, finished.output
    finished.assert_quick(45)
    (said,) = of_wandb(finished)
    assert said.startswith("W&B: ") and "; recorded offline, upload with: wandb sync " in said
    (start,) = recorded(tmp_path / "run")[-1:]
    assert str(start.folder) == said.rpartition("wandb sync ")[2]
    assert_as_in_the_folder(tmp_path / "run", [start])
    assert start.exit_code == 0
    assert_no_key(tmp_path / "run", _home)
    assert not list(_home.iterdir())


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a server that knows no key."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b'{"errors": [{"message": "user is not logged in"}]}'
            self.send_response(401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_wrong_key(tmp_path: Path, _home: Path, refusing: str) -> None:
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": refusing}
    finished = torchrun(*ONLINE, cwd=tmp_path, environment=environment)
    assert finished.code == 0, finished.output
    (said,) = of_wandb(finished)
    assert "; recorded offline, upload with: wandb sync " in said
    assert_as_in_the_folder(tmp_path / "run", recorded(tmp_path / "run")[-1:])
    assert_no_key(tmp_path / "run", _home)


def test_nobody_is_asked_to_log_in(tmp_path: Path, _home: Path) -> None:
    finished = alone(*ONLINE, cwd=tmp_path, terminal=True)
    assert finished.code == 0, finished.output
    (said,) = of_wandb(finished)
    assert "No API key configured" in said and "recorded offline" in said
    assert_as_in_the_folder(tmp_path / "run", recorded(tmp_path / "run"))
    assert not list(_home.iterdir())


def test_no_package(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    finished = torchrun(*ONLINE, cwd=tmp_path, environment={"PYTHONPATH": f"{tmp_path / 'without'}:{ROOT}"})
    assert finished.code == 0, finished.output
    assert of_wandb(finished) == ["W&B: not recorded: No module named 'wandb'; pip install 'dist_ckpt[wandb]'"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    arguments = [*faulty("sigkill", rank=rank, step=4), *OFFLINE, "train.save_every=2"]
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY, max_restarts=1)
    assert finished.code == 0, finished.output
    starts = recorded(tmp_path / "run")
    assert_as_in_the_folder(tmp_path / "run", starts)
    assert [list(start.rows) for start in starts] == [[1, 2, 3], [4, 5, 6]], "step 3 was done twice"
    assert [start.exit_code for start in starts] == [1, 0]
    assert not of_wandb(finished)


@pytest.mark.parametrize(
    ("fault", "code"), [("sigterm", 143), ("cpu_allocation", 3), ("mistake", 2), ("boom", 1), ("sigint", 1)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_that_a_run_has_is_the_one_that_it_has_there(tmp_path: Path, rank: int, fault: str, code: int) -> None:
    finished = torchrun(*faulty(fault, rank=rank, step=4), *OFFLINE, cwd=tmp_path, script=FAULTY)
    finished.assert_quick(30)
    assert exit_record(tmp_path / "run")["code"] == code
    (start,) = recorded(tmp_path / "run")
    assert start.exit_code == code
    assert_as_in_the_folder(tmp_path / "run", [start])
    assert start.rows[max(start.rows)].get("memory/num_ooms", 0) == (code == 3)
    assert not of_wandb(finished)


def test_out_of_memory_in_the_first_step(tmp_path: Path) -> None:
    finished = torchrun(*faulty("cpu_allocation", rank=1, step=1), *OFFLINE, cwd=tmp_path, script=FAULTY)
    finished.assert_quick(30)
    (start,) = recorded(tmp_path / "run")
    assert (start.rows, start.exit_code) == ({1: {"memory/num_ooms": 1}}, 3)
