"""Pages of runs: what they say, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from dist_ckpt.errors import ReportError
from dist_ckpt.memory.profile.step_profile import KINDS, StepProfile
from dist_ckpt.memory.records import MemoryReport, RankMemory, in_bytes
from dist_ckpt.plan import Plan, Region, SaveRule
from dist_ckpt.report.glossary import KIND_MEANINGS
from dist_ckpt.report.html import deep_step, figures, page
from dist_ckpt.report.html.charts import shown_profiles, thinned
from dist_ckpt.report.html.compare import names_of
from dist_ckpt.report.html.page import render
from dist_ckpt.report.html.parts import Bytes, Chart, Section, Share, Table
from dist_ckpt.report.html.plan_tree import plan_differences, plan_tree
from dist_ckpt.report.html.report import comparison_page, run_page, write_report
from dist_ckpt.report.run_data import read_run
from dist_ckpt.report.run_layout import of_rank
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.exits import ExitCode
from dist_ckpt.trainer.report_program import main
from dist_ckpt.trainer.reporting import write_start
from dist_ckpt.trainer.run_folder import RunFolder
from tests.unit.report_runs import MIB, plan, profile, write_run


class Page(HTMLParser):
    """Tables of a page, by caption: for each row the text and exact bytes of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.exact: dict[str, list[list[int | None]]] = {}
        self._caption = self._text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._text = ""
        if tag == "tr":
            for rows in (self.tables, self.exact):
                rows[self._caption].append([])  # type: ignore[attr-defined]
        elif tag == "td":
            nbytes = dict(attributes).get("data-bytes")
            self.exact[self._caption][-1].append(None if nbytes is None else int(nbytes))

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._caption = self._text.partition(",")[0]
            self.tables[self._caption], self.exact[self._caption] = [], []
        elif tag in ("td", "th"):
            self.tables[self._caption][-1].append(self._text)


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their 5 MB of scripts."""
    monkeypatch.setattr(page, "_plotly", lambda: "")


def test_a_page_escapes_what_it_shows_and_names_every_color(without_plotly: None) -> None:
    table = Table("sizes", ("rank", "what", "peak"), ((0, "<b>&", Bytes(3 * MIB)), (1, "x", Bytes(None))))
    chart = Chart("t", "s", figures.stacked_bars(["</script>"], {"params": [1]}, axis="rank"), table)
    section = Section("a", "A", (chart,))
    text = render("sections.html.j2", title="</title><script>", lead=[], sections=[section])
    assert "</title><script>" not in text and "&lt;b&gt;&amp;" in text
    assert "\\u003c/script\\u003e" in text
    shown = Page(text)
    assert shown.tables["sizes"][1] == ["0", "<b>&", "3.000"] and shown.tables["sizes"][2][2] == "-"
    assert shown.exact["sizes"][1] == [None, None, 3 * MIB] and shown.exact["sizes"][2] == [None] * 3
    styles = text[: text.index("</style>")]
    for theme in styles.split("@media screen"):
        assert all(f"--{kind}:" in theme for kind in (*KINDS, "other", "ink", "card", "soft", "line", "grid"))


def luminance(color: str) -> float:
    parts = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_color_can_be_read_in_both_themes() -> None:
    css = (Path(page.__file__).parent / "templates" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", theme)) for theme in css.split("@media screen"))
    assert set(light) == set(dark)
    for theme in (light, dark):
        for name in theme.keys() - {"paper", "card", "line", "grid"}:
            one, other = sorted((luminance(theme[name]), luminance(theme["card"])))
            assert (other + 0.05) / (one + 0.05) >= 4.5, (name, "WCAG 2 asks for 4.5 : 1")


def test_cells_are_shown_in_one_unit_and_with_what_they_mean() -> None:
    table = Table("t", ("a", "b"), ((Bytes(2**30), Bytes(2**20)), (None, 0.123456)))
    assert table.unit == "GiB" and [table.shown(cell) for cell in table.rows[0]] == ["1.000", "0.001"]
    assert [table.shown(cell) for cell in (None, 0.123456, 12345.6, 12345, 2e-9, Share(0.256), "x")] == [
        "-", "0.1235", "12,346", "12,345", "2.000e-09", "25.6%", "x",
    ]  # fmt: skip


def test_the_page_has_every_figure_of_every_rank(tmp_path: Path, without_plotly: None) -> None:
    run = write_run(tmp_path / "run", [profile(rank, weight=1 + rank) for rank in range(3)])
    found = Page(run_page(read_run(run)))
    deep = json.loads((run / "memory.jsonl").read_text().splitlines()[0])
    head = found.tables["memory at the peak"][0]
    for rank, texts, exact in zip(
        deep["ranks"], found.tables["memory at the peak"][1:], found.exact["memory at the peak"][1:], strict=True
    ):
        shown = dict(zip(head, exact, strict=True))
        assert texts[:2] == [str(rank["rank"]), "backward"] and shown["peak"] == rank["peak"]
        assert {kind: shown[kind] for kind in KINDS} == {kind: rank["at_peak"][kind] for kind in KINDS}
        assert sum(rank["at_peak"][kind] for kind in KINDS) == shown["peak"]
    caption = "every rank at the boundary of step 6"
    head = found.tables[caption][0]
    for rank, exact in zip(deep["ranks"], found.exact[caption][1:], strict=True):
        shown = dict(zip(head, exact, strict=True))
        del shown["rank"], shown["device"]
        assert shown == {name: rank[name] for name in shown}
        assert {"live", "unattributed", "accounted", "params", "grads", "optimizer", "other"} <= shown.keys()


def test_a_run_without_a_deep_step_shows_its_last_report(tmp_path: Path, without_plotly: None) -> None:
    text = run_page(read_run(write_run(tmp_path / "run", ranks=2)))
    found = Page(text)
    assert [row[1] for row in found.exact["memory by category"][1:]] == [40 * MIB] * 2
    assert "report.profile_step=N records it" in text and 'id="step"' not in text


def test_ranks_that_are_left_out_are_said(tmp_path: Path, without_plotly: None) -> None:
    profiles = [profile(rank, stage=rank // 20, weight=1 + rank % 20) for rank in range(80)]
    run = write_run(tmp_path / "run", profiles, stages=4)
    text = run_page(read_run(run))
    assert "The 64 heaviest of 80 ranks, heaviest first; the table has all." in text
    assert f"16 of 80 ranks are here, the heaviest of each stage and of all; the other 64 are in {run}/profile" in text
    assert len(Page(text).tables["memory at the peak"]) == 81
    panels = re.findall(r'data-panel="(\d+), stage (\d)', text)
    assert len(panels) == 16 and {stage for _, stage in panels} == {"0", "1", "2", "3"}
    assert len(text) < 3_000_000


def test_the_heaviest_of_each_stage_come_before_the_heaviest_of_all() -> None:
    light = profile(0, stage=1)
    profiles = [light, *(profile(rank, stage=0, weight=rank) for rank in (2, 3, 4))]
    assert [one.rank for one in shown_profiles(profiles, 3)] == [4, 3, 0]
    assert [one.rank for one in shown_profiles(profiles, 1)] == [4]


def test_a_thinned_curve_keeps_its_peak_and_its_ends() -> None:
    one = profile(0, moments=100)
    moments = deep_step.kept_moments(one, 50)
    totals = [sum(values) for values in zip(*one.timeline.values(), strict=True)]
    assert len(moments) <= 50 and all(a < b for a, b in pairwise(moments))
    assert (moments[0], moments[-1]) == (0, len(totals) - 1)
    assert max(totals[n] for n in moments) == one.peak_bytes == max(totals)
    assert deep_step.kept_moments(one, 10_000) == tuple(range(len(totals)))


def test_areas_of_the_timeline_and_of_the_peak_sum_to_what_was_measured() -> None:
    one = profile(0)
    drawn = deep_step.timeline(one)["data"]
    areas = [trace for trace in drawn if trace.get("stackgroup")]
    heights = [sum(values) for values in zip(*(trace["y"] for trace in areas), strict=True)]
    assert max(heights) * MIB == pytest.approx(one.peak_bytes, rel=1e-5)
    [everything] = [trace for trace in drawn if trace["name"] == "all"]
    assert everything["y"] == pytest.approx(heights, rel=1e-5)
    assert "backward 0: recompute of layers.3" in everything["text"]
    tiles = deep_step.at_peak(one)["data"][0]
    whole = dict(zip(tiles["ids"], tiles["values"], strict=True))
    assert whole["all"] == one.peak_bytes
    assert sum(nbytes for name, nbytes in whole.items() if name.count("/") == 1) == one.peak_bytes
    assert whole["all/activations"] == one.at_peak["activations"]


def test_micro_batches_in_flight_are_counted_from_the_end_of_forward_to_the_end_of_backward() -> None:
    one = profile(0)
    phases = [dataclasses.replace(p, start_s=n, end_s=n + 1) for n, p in enumerate(one.phases)]
    order = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    phases = [dataclasses.replace(p, name=name, micro_batch=m) for p, (name, m) in zip(phases, order, strict=False)]  # type: ignore[arg-type]
    curve = deep_step.in_flight_curve(dataclasses.replace(one, phases=tuple(phases), duration_s=5.0))
    assert curve == ((0.0, 0), (1, 1), (2, 2), (3, 1), (4, 0), (5.0, 0))


def test_a_capacity_is_drawn_where_it_is_in_sight_and_else_said(tmp_path: Path, without_plotly: None) -> None:
    stacks = {"params": [100 * MIB]}
    near = figures.stacked_bars(["0"], stacks, axis="rank", capacity=200 * MIB)["layout"]
    assert near["shapes"][0]["y0"] == 200.0 and near["yaxis"]["range"][1] > 200
    assert "shapes" not in figures.stacked_bars(["0"], stacks, axis="rank", capacity=2000 * MIB)["layout"]
    run = write_run(tmp_path / "run", [profile(0)])
    lines = [json.loads(line) for line in (run / "memory.jsonl").read_text().splitlines()]
    lines[0]["ranks"][0]["capacity"] = 80 * 2**30
    (run / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page(read_run(run))
    assert "capacity, 80.000 GiB, lies above the chart" in text
    assert "Headroom" in text


def test_a_stage_shows_what_was_predicted_beside_what_was_seen(tmp_path: Path, without_plotly: None) -> None:
    profiles = [profile(rank, stage=rank // 2, weight=2 - rank // 2) for rank in range(4)]
    found = Page(run_page(read_run(write_run(tmp_path / "run", profiles, stages=2))))
    _, *rows = found.exact["stages"]
    saved = found.tables["stages"][0].index("saved, predicted")
    assert [row[saved] for row in rows] == [190 * MIB, 95 * MIB]
    assert found.tables["stages"][1][:5] == ["0", "0, 1", "10,000,000", "2", "1"]
    head, *rows = found.tables["activations that wait for backward"]
    measured = [row[head.index("measured")] for row in found.exact["activations that wait for backward"][1:]]
    assert measured == [101 * MIB, 103 * MIB], "of the stage's heaviest rank"
    assert rows[1][head.index("recomputed FLOPs")] == "+8.3%"


def test_the_typical_step_leaves_out_the_first_ones_and_the_deep_one(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [profile(0)]))
    assert [line["step"] for line in run.timed_steps] == [3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert run.step_s == pytest.approx(0.258) and run.samples == 8
    assert run.samples_per_s == pytest.approx(8 / 0.258)
    assert run.samples_per_s_gib == pytest.approx(8 / 0.258 / (run.profiles[0].peak_bytes / 2**30))


def test_a_loss_that_is_no_number_is_left_out_of_the_curve(tmp_path: Path, without_plotly: None) -> None:
    run = write_run(tmp_path / "run")
    line = {"step": 13, "loss": math.nan, "grad_norm": math.inf, "lr": 0, "tokens": 1, "tokens_per_s": 1, "step_s": 1}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    found = Page(run_page(read_run(run)))
    assert found.tables["Loss"][-1] == ["13", "nan"]


def test_runs_are_compared_by_what_means_the_same(tmp_path: Path, without_plotly: None) -> None:
    one = write_run(tmp_path / "one", [profile(0)])
    two = write_run(tmp_path / "two", [profile(0, weight=2)], mode="full")
    plain = write_run(tmp_path / "plain", mode="none")
    text = comparison_page([read_run(path) for path in (one, two, plain)])
    said = "Not in the chart: fsdp2 · none. A run has a measured peak on an accelerator"
    assert text.count(said) == 2, "beside the peaks of others, what is accounted would look like a gain"
    _, *rows = Page(text).exact["runs"]
    columns = Page(text).tables["runs"][0]
    assert [row[columns.index("peak")] for row in rows] == [
        profile(0).peak_bytes,
        profile(0, weight=2).peak_bytes,
        None,
    ]
    assert Page(text).tables["options that differ"][1] == ["ckpt", "selective", "full", "none"]


def test_runs_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name / "run")) for name in "ab"] + [read_run(write_run(tmp_path / "c"))]
    assert names_of(runs) == ("fsdp2 · selective (run), 1", "fsdp2 · selective (run), 2", "fsdp2 · selective (c)")


def test_a_choice_is_beaten_by_one_that_is_as_good_and_better_in_one() -> None:
    trades = [figures.Trade(str(n), *place) for n, place in enumerate([(1, 5), (2, 5), (2, 4), (2, 4), (3, 1), (4, 2)])]
    assert figures.pareto_front(trades) == (0, 2, 3, 4)
    same = [figures.Trade("slow", 2, 5), figures.Trade("fast", 1, 5), figures.Trade("large", 1, 6)]
    assert figures.pareto_front(same) == (1,)


def test_plans_differ_block_by_block() -> None:
    segments = Plan(plan().blocks, (Region(("layers.0", "layers.1")),), unmatched=("layers.2", "layers.3"))
    table = plan_differences(["a", "b"], [plan(), segments])
    kept = "[save matmul, save attention if present]"
    assert table.rows == (
        ("layers.{0-1}", f"recomputed {kept}", "recomputed as one of 2 [keep inputs only]"),
        ("layers.2", f"recomputed {kept}", "kept whole"),
        ("layers.3", "kept whole", "kept whole"),
    )


def test_a_plan_is_a_tree_of_kinds_of_regions() -> None:
    inner = Region(("layers.0.mlp",), SaveRule())
    nested = Plan(
        ("layers.0", "layers.1"), (Region(("layers.0", "layers.1"), inner=(inner,)),), policy={"mode": "nested"}
    )
    [root] = plan_tree(nested)
    [segment] = root.inner
    assert root.tags == ("1 region", "2 blocks")
    assert segment.text == "recomputed, 2 blocks as one: layers.{0-1}"
    assert [node.text for node in segment.inner] == ["recomputed: layers.0.mlp"]
    assert [node.text.partition(":")[0] for node in plan_tree(plan(stages=2))] == ["stage 0", "stage 1"]


def test_some_of_many_keep_the_first_and_the_last() -> None:
    assert thinned(3, 5, "steps", "f") == (range(3), "")
    kept, note = thinned(1000, 5, "steps", "metrics.jsonl")
    assert list(kept) == [0, 249, 499, 749, 999]
    assert note == "5 of 1,000 steps are shown, evenly spread; all are in metrics.jsonl."


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [profile(rank) for rank in range(11)]))
    assert run.profiles == tuple(profile(rank) for rank in range(11)), "by rank, not by name of file"
    assert isinstance(run.profiles[0], StepProfile) and run.plan == plan()


def test_a_last_line_may_be_cut_short_and_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"step": 13, "lo')
    assert len(read_run(run).steps) == 12
    metrics.write_text('{"step"\n' + whole)
    with pytest.raises(ReportError, match=r"metrics\.jsonl: line 1 is no JSON"):
        read_run(run)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("plan.json", "{}", "plan.json: not a plan of schema"),
        ("config.yaml", "a: [", "config.yaml: cannot be read"),
        ("exit.json", "[1]", "exit.json: cannot be read"),
        ("cost.json", '[{"stage": 0}]', "cost.json: cannot be read"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl: has no field 'loss'"),
        (
            "memory.jsonl",
            '{"step": 1, "ranks": [{"rank": 0, "colour": 1}]}\n',
            "memory.jsonl: cannot be read: .*colour",
        ),
        ("profile/rank_0.json", "{}", "rank_0.json: has no field 'holdings'"),
    ],
)
def test_what_cannot_be_read_is_a_mistake_that_names_the_file(
    tmp_path: Path, file: str, text: str, message: str
) -> None:
    run = write_run(tmp_path / "run", [profile(0)])
    (run / file).write_text(text)
    with pytest.raises(ReportError, match=message):
        read_run(run)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_a_folder_without_a_run_is_a_mistake(tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == ExitCode.MISTAKE
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'run'}: ")


def test_the_program_writes_into_the_run_or_where_it_is_told(
    tmp_path: Path, without_plotly: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (str(write_run(tmp_path / name)) for name in ("one", "two"))
    assert main([one]) == main([one, two]) == main([one, two, "--out", "new/page.html"]) == ExitCode.DONE
    assert [path.name for path in tmp_path.rglob("*.html")] and (tmp_path / "one" / "report.html").exists()
    assert (tmp_path / "comparison.html").read_text() == (tmp_path / "new" / "page.html").read_text()
    (tmp_path / "file").write_text("")
    assert main([one, "--out", "file/page.html"]) == ExitCode.MISTAKE
    assert "file/page.html: cannot be written to" in capsys.readouterr().err


def test_the_end_of_a_run_is_told_as_it_is_recorded(tmp_path: Path, without_plotly: None) -> None:
    run = write_run(tmp_path / "run")
    for record, said in (
        (None, "(no end recorded)"),
        ({"code": 0}, "on 2 ranks, done."),
        ({"code": 3}, "ended with exit code 3."),
        ({"code": 2, "reason": "a typo"}, "ended with exit code 2: a typo."),
    ):
        (run / "exit.json").unlink(missing_ok=True)
        if record is not None:
            (run / "exit.json").write_text(json.dumps(record))
        write_report([run], tmp_path / "page.html")
        assert said in (tmp_path / "page.html").read_text()


def test_a_run_out_of_memory_says_where_what_filled_it_is_told(tmp_path: Path, without_plotly: None) -> None:
    run = write_run(tmp_path / "run")
    (run / "exit.json").write_text('{"code": 3}')
    write_report([run], tmp_path / "page.html")
    assert f"in a new page: python launch/report.py {run}" in (tmp_path / "page.html").read_text()
    (run / "oom").mkdir()
    record = {"rank": 1, "stage": None, "phase": "forward", "module": "layers.0", "requested_bytes": 5 * MIB}
    (run / "oom" / "rank_1.json").write_text(json.dumps(record))
    found = Page(run_page(read_run(run)))
    assert found.tables["ranks that ran out of memory"][1][:4] == ["1", "-", "forward", "layers.0"]
    assert found.exact["ranks that ran out of memory"][1][4] == 5 * MIB


def test_ranks_with_the_same_leak_stand_together(tmp_path: Path, without_plotly: None) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "memory.jsonl").read_text().splitlines()]
    for rank in lines[-1]["ranks"]:
        rank["leak"] = "grows by 3 MiB a report"
    (run / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page(read_run(run))
    assert text.count("grows by 3 MiB a report") == 1 and "rank 0, 1" in text


def test_the_deep_step_of_another_policy_is_set_aside(tmp_path: Path) -> None:
    """A run that goes on with another policy in the same folder shows no deep step that this one never had."""
    folder = RunFolder(write_run(tmp_path / "run", [profile(0), profile(1)]))
    sections = ["engine=ddp", "train.steps=20"]
    for arguments, kept in ((sections, False), (sections, True), ([*sections, "train.micro_batch=2"], False)):
        folder.profiles.mkdir(exist_ok=True)
        for one in (profile(0), profile(1)):
            of_rank(folder.profiles, one.rank).write_text(json.dumps(one.to_dict()))
        assert read_run(folder.path).memory == read_run(folder.path).reports[0]
        write_start(load_config(arguments), folder, plan(), (), after_step=7)
        run = read_run(folder.path)
        assert len(run.profiles) == (2 if kept else 0)
        assert run.memory == run.reports[0 if kept else -1]
        assert len(list((folder.profiles / "until_step_7").glob("rank_*.json"))) == 2


def test_the_words_of_the_page_are_explained(tmp_path: Path, without_plotly: None) -> None:
    assert set(KIND_MEANINGS) == set(KINDS)
    text = run_page(read_run(write_run(tmp_path / "run", [profile(0)])))
    found = Page(text)
    assert f"Gray: smaller ones, {in_bytes(profile(0).rest_bytes)}." in text
    assert {row[0] for row in found.tables["what the words mean"][1:]} >= {*KINDS, "accounted", "live", "other"}


def test_phases_and_kinds_have_colors_of_their_own() -> None:
    css = (Path(page.__file__).parent / "templates" / "page.css").read_text()
    for theme in css.split("@media screen"):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        for phase in ("forward", "backward", "loss", "optimizer-step"):
            red, green, blue = (int(colors[phase][n : n + 2], 16) for n in (1, 3, 5))
            assert max(red, green, blue) - min(red, green, blue) < 32, "a gray, as kinds are not"
            assert colors[phase] not in {colors[kind] for kind in KINDS}


def test_steps_are_whole_numbers_on_axes() -> None:
    few, many = (
        figures.lines({"loss": (range(1, count), [1.0] * (count - 1))}, x="step", y="nats")["layout"]["xaxis"]
        for count in (5, 500)
    )
    assert few["dtick"] == 1 and "dtick" not in many and few["tickformat"] == many["tickformat"] == ",d"


def test_throughput_is_not_given_by_the_gib_where_a_rank_holds_little(tmp_path: Path, without_plotly: None) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert run.samples_per_s_gib is not None and "a GiB of the heaviest rank" in run_page(run)
    small = (MemoryReport(12, (RankMemory(0, "cpu", 12, MIB, MIB, MIB, 0, MIB),)),)
    assert "GiB of the heaviest rank" not in run_page(dataclasses.replace(run, reports=small))
