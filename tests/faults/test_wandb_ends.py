"""Runs with Weights & Biases that end in any way, or cannot reach it: the training does not notice, W&B does."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from pathlib import Path

import pytest

from tests.faults.launching import FAULTY, ROOT, TINY, Finished, alone, exit_record, faulty, torchrun
from tests.wandb_records import assert_as_in_the_folder, recorded, without_account

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


def test_a_dead_server(tmp_path: Path, _home: Path) -> None:
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


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """In place of W&B's: opens runs, and stops them as after a click on "Stop run"; or knows no key."""

    daemon_threads = True

    def __init__(self, knows_keys: bool = True, stops: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.knows_keys, self.stops = knows_keys, stops
        self.opened = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answers(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.server.knows_keys:
            self._answer({"errors": [{"message": "user is not logged in"}]}, 401)
        elif self.path.endswith("/file_stream"):
            self._answer({"stopped": self.server.stops})
        elif b"RunResumeStatus" in asked:
            self._answer({"data": {"model": {"bucket": None}}})
        elif b"UpsertBucket" in asked:
            project = {"name": "tests", "entity": {"name": "me"}}
            run = {"id": "1", "name": json.loads(asked)["variables"]["name"], "config": "{}", "project": project}
            self._answer({"data": {"upsertBucket": {"bucket": run, "inserted": True}}})
            self.server.opened.set()
        else:
            self._answer({"errors": [{"message": "unknown"}]})

    do_GET = do_POST

    def _answer(self, answer: object, code: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_wrong_key(tmp_path: Path, _home: Path) -> None:
    with Server(knows_keys=False) as server:
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        finished = torchrun(*ONLINE, cwd=tmp_path, environment=environment)
        server.shutdown()
    assert finished.code == 0, finished.output
    (said,) = of_wandb(finished)
    assert "; recorded offline, upload with: wandb sync " in said
    assert_as_in_the_folder(tmp_path / "run", recorded(tmp_path / "run")[-1:])
    assert_no_key(tmp_path / "run", _home)


def server_that_goes() -> Server:
    """One that is there until a run has been opened."""
    server = Server()

    def end() -> None:
        server.opened.wait()
        server.shutdown()
        server.server_close()

    threading.Thread(target=end, daemon=True).start()
    return server


def test_an_outage_in_the_middle(tmp_path: Path, _home: Path) -> None:
    server = server_that_goes()
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    finished = torchrun(*ONLINE, "report.profile_step=2", cwd=tmp_path, environment=environment)
    assert server.opened.is_set()
    assert finished.code == 0, finished.output
    finished.assert_quick(90)
    (said,) = of_wandb(finished)
    assert "not all was uploaded in time; the rest with: wandb sync " in said
    (start,) = recorded(tmp_path / "run")
    assert str(start.folder) == said.rpartition("wandb sync ")[2]
    assert_as_in_the_folder(tmp_path / "run", [start])
    assert start.exit_code == 0
    assert_no_key(tmp_path / "run", _home)


def test_an_outage_in_a_run_that_fails(tmp_path: Path) -> None:
    server = server_that_goes()
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
    arguments = (*faulty("boom", rank=1, step=150), *ONLINE, "train.steps=200")  # W&B has connected by then
    finished = torchrun(*arguments, cwd=tmp_path, script=FAULTY, environment=environment)
    assert server.opened.is_set()
    finished.assert_quick(45)
    assert exit_record(tmp_path / "run")["code"] == 1
    (said,) = of_wandb(finished)
    assert "not all was uploaded in time; the rest with: wandb sync " in said
    (start,) = recorded(tmp_path / "run")
    assert str(start.folder) == said.rpartition("wandb sync ")[2]
    assert_as_in_the_folder(tmp_path / "run", [start])
    assert start.exit_code == 1


def test_a_run_that_is_stopped_on_its_page_saves_its_state(tmp_path: Path) -> None:
    with Server(stops=True) as server:
        environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        finished = torchrun(*ONLINE, "train.steps=100000", cwd=tmp_path, environment=environment)
        server.shutdown()
    assert "stopped by SIGTERM after step" in finished.output
    assert exit_record(tmp_path / "run")["code"] == 143
    assert len(list((tmp_path / "run" / "states").iterdir())) == 1


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
