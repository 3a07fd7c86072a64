"""Pages of runs in a browser: what it draws, asks for and complains about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")
pytest.importorskip("playwright")

from playwright import sync_api

from dist_ckpt.report.html.report import write_report
from tests.unit.report_runs import MIB, profile, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

READERS: tuple[dict[str, Any], ...] = (
    {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container has no user namespaces for the sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Reader:
    """One page in a browser, with what it has asked for and what the console has said."""

    def __init__(self, browser: Any, file: Path, **reader: Any) -> None:
        self.page = browser.new_page(**reader)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.file = file
        self.page.goto(file.as_uri())

    def check(self) -> None:
        """Nothing but the file was asked for, nothing complained about, all was drawn, nothing sticks out."""
        assert self.asked == [self.file.as_uri()] and self.said == []
        undrawn = (
            "[...document.querySelectorAll('[data-chart]')].filter(c => c.offsetParent && !c.querySelector('svg'))"
        )
        assert self.page.evaluate(f"{undrawn}.length") == 0
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert self.page.evaluate("document.documentElement.lang") == "en" and self.page.title()

    def bars(self) -> dict[str, Any]:
        """Of the first chart, for each kind the heights of its bars, and its color as drawn."""
        return self.page.evaluate(
            "Object.fromEntries(document.querySelector('#memory [data-chart]').data.filter(t => t.type === 'bar')"
            ".map(t => [t.name, {y: t.y, color: t.marker.color}]))"
        )

    def color(self, name: str) -> str:
        return self.page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")


def test_a_page_shows_what_was_recorded(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [profile(rank, weight=1 + rank) for rank in range(2)])
    write_report([run], tmp_path / "page.html")
    reader = Reader(browser, tmp_path / "page.html", **READERS[0])
    reader.check()
    recorded = json.loads((run / "memory.jsonl").read_text().splitlines()[0])["ranks"]
    bars = reader.bars()
    for kind in ("params", "activations", "temporary", "unattributed"):
        assert [height * MIB for height in bars[kind]["y"]] == [rank["at_peak"][kind] for rank in recorded]
    assert all(bars[kind]["color"] == reader.color(kind) for kind in bars)
    panels = reader.page.locator("#step [data-panel]")
    assert [panel.is_visible() for panel in panels.all()] == [True, False]
    assert panels.first.get_attribute("data-panel").startswith("1:"), "the heaviest"
    reader.page.select_option("#step select", index=1)
    assert [panel.is_visible() for panel in panels.all()] == [False, True]
    reader.check()


# The page's own policy forbids Playwright's way of waiting, which evaluates text.
_DRAWN_AGAIN = """(color) => new Promise((done) => {
  const chart = document.querySelector("#memory [data-chart]");
  const look = (frames) => {
    const same = chart.data.find((trace) => trace.name === "params").marker.color === color;
    if (same || frames === 0) done(same); else requestAnimationFrame(() => look(frames - 1));
  };
  look(300);
})"""


@pytest.mark.full
def test_charts_follow_the_readers_preference_and_paper_is_light(browser: Any, tmp_path: Path) -> None:
    write_report([write_run(tmp_path / "run", [profile(0)])], tmp_path / "page.html")
    reader = Reader(browser, tmp_path / "page.html", **READERS[0])
    light = reader.color("params")
    for media, scheme, is_light in (("screen", "dark", False), ("print", "dark", True), ("screen", "light", True)):
        reader.page.emulate_media(media=media, color_scheme=scheme)
        color = reader.color("params")
        assert (color == light) is is_light
        assert reader.page.evaluate(_DRAWN_AGAIN, color)
    reader.check()


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(READERS)))
def test_every_kind_of_page_for_every_reader(browser: Any, tmp_path: Path, number: int) -> None:
    deep = write_run(tmp_path / "deep", [profile(rank) for rank in range(4)])
    pipe = write_run(tmp_path / "pipe", [profile(rank, stage=rank // 2) for rank in range(4)], stages=2)
    plain = write_run(tmp_path / "plain")
    for runs in ([deep], [pipe], [plain], [deep, pipe, plain]):
        write_report(runs, tmp_path / "page.html")
        reader = Reader(browser, tmp_path / "page.html", **READERS[number])
        reader.check()
        reader.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        reader.check()


@pytest.mark.full
def test_512_ranks_are_a_page_of_less_than_10_mb(browser: Any, tmp_path: Path) -> None:
    profiles = [profile(rank, stage=rank // 64, weight=1 + rank % 7, moments=20) for rank in range(512)]
    write_report([write_run(tmp_path / "run", profiles, stages=4)], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10_000_000
    reader = Reader(browser, tmp_path / "page.html", **READERS[0])
    reader.check()
    assert reader.page.locator("#memory details tbody tr").count() == 512
