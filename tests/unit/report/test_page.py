"""The report's page as text: it needs nothing else, and names stay text in it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.base import units
from autoprof.report import charts, html
from autoprof.report.model import DeviceShares, Lane, SpanRow, StepFigures
from tests.support import report_pages
from tests.support.report_pages import HOSTILE

TEMPLATES = Path(html.__file__).parent / "templates"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Read(HTMLParser):
    """The parts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._open[-1:] != ["style"]:
            self.text += data

    @property
    def charts(self) -> set[str]:
        return {str(a["data-chart"]) for _, a in self.elements if "data-chart" in a}

    @property
    def flames(self) -> dict[str, Any]:
        (content,) = [text for kind, text in self.scripts if kind == "application/json"]
        return json.loads(content)


@pytest.fixture(scope="module")
def usual() -> Read:
    return Read(html.page(report_pages.figures(compared=True, details=2)))


@pytest.fixture(scope="module")
def hostile() -> Read:
    return Read(html.page(report_pages.figures(named=HOSTILE, compared=True)))


def test_it_loads_nothing(usual: Read, hostile: Read) -> None:
    for read in (usual, hostile):
        links = [(tag, a.get("href") or a.get("src")) for tag, a in read.elements if a.keys() & {"href", "src"}]
        assert {tag for tag, _ in links} == {"a", "link"}
        assert {to for _, to in links if to and not to.startswith("#")} == {"data:,"}
        assert not [(tag, a) for tag, a in read.elements if any(name.startswith("on") for name in a)]


def test_its_policy_lets_its_own_scripts_run_and_nothing_load(usual: Read) -> None:
    (policy,) = [a["content"] for tag, a in usual.elements if a.get("http-equiv") == "Content-Security-Policy"]
    parts = dict(part.strip().split(" ", 1) for part in (policy or "").split(";"))
    assert (parts["default-src"], parts["base-uri"], parts["form-action"]) == ("'none'", "'none'", "'none'")
    # `autoprof open` serves traces beside the page.
    assert (parts["connect-src"], parts["img-src"]) == ("'self'", "data:")
    code = [text for kind, text in usual.scripts if kind is None]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert parts["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert parts.keys() == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "connect-src",
        "base-uri",
        "form-action",
    }


def test_names_stay_text(usual: Read, hostile: Read) -> None:
    assert {tag for tag, _ in hostile.elements} == {tag for tag, _ in usual.elements}
    assert len(hostile.scripts) == 3
    assert f"Run 20261122-010203-abcdef{HOSTILE}" in hostile.text
    assert f"tool python took 15.0 s in prompt 9, rollout 2{HOSTILE}" in hostile.text
    assert any(HOSTILE[:20] in str(a.get("title")) for tag, a in hostile.elements if tag == "i")
    assert HOSTILE in json.dumps(hostile.flames).replace('\\"', '"')


@pytest.mark.parametrize("content", ["</script>", "<!--<script>", "]]>", "\u2028", "&lt;", '"\\'])
def test_embedded_json_can_not_end_its_element(content: str) -> None:
    made = html.embedded({"x": [content, {content: 1}]})
    assert not set(made) & set("<>&\u2028")
    assert json.loads(made) == {"x": [content, {content: 1}]}


def test_headings_are_in_order(usual: Read) -> None:
    levels = [int(tag[1]) for tag, _ in usual.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_there_is_a_chart_of_each_kind(usual: Read) -> None:
    assert {name.split("-")[0] for name in usual.charts} == {"run", "lanes", "samples", "done"}
    numbers = [
        float(number)
        for _, a in usual.elements
        for number in re.findall(r"(?:left|width|bottom):([^%;]+)%", str(a.get("style") or ""))
    ]
    assert numbers
    assert all(0 <= number <= 100.5 for number in numbers)


def test_every_colour_is_in_the_style_sheet(usual: Read) -> None:
    style = (TEMPLATES / "page.css").read_text()
    themes = [set(re.findall(r"--([a-z]+):", block)) for block in re.findall(r":root[^{]*\{([^}]*)\}", style)]
    assert len(themes) == 3
    assert themes[0] == themes[1] == themes[2]
    used = {name[5:] for _, a in usual.elements for name in str(a.get("class") or "").split() if name[:5] == "fill-"}
    assert used <= charts.TITLES.keys()
    assert charts.TITLES.keys() <= themes[0]
    assert {f".fill-{name} {{" for name in charts.TITLES} <= set(re.findall(r"\.fill-\w+ \{", style))
    assert set(re.findall(r"var\(--([a-z]+)\)", style)) <= themes[0] | {"side", "who"}


@pytest.mark.parametrize("theme", [0, 1])
def test_text_is_easy_to_read(theme: int) -> None:
    style = (TEMPLATES / "page.css").read_text()
    block = re.findall(r":root[^{]*\{([^}]*)\}", style)[theme]
    values = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))

    def light(name: str) -> float:
        parts = [int(values[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for text in ("text", "soft", "accent", "warn", "good"):
        for ground in ("page", "panel"):
            dark, bright = sorted((light(text), light(ground)))
            # WCAG 2.2, 1.4.3, level AA.
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
    # Names in bars.
    values["black"] = "#14181d"
    for name in charts.TITLES:
        dark, bright = sorted((light("ink" if name == "generation" else "black"), light(name)))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, name


def test_a_kind_has_one_colour_in_all_charts() -> None:
    names = ["old_log_prob", "ref", "values", "compute_ref_log_prob"]
    assert {charts.family(name) for name in names} == {"scoring"}
    kinds = {"my_update": "update_actor", "gen": "generate"}
    row = msgspec.structs.replace(report_pages.figures(steps=1).steps[0], stages={"my_update": 3.0, "gen": 5.0})
    assert charts.steps_chart([row], kinds).key == ["generation", "training"]
    span = SpanRow(name="my_update", kind="stage", start_s=0, end_s=50)
    lanes = [Lane(label="a", role="r", host="n1", pid=1, spans=[span], busy_s=50, idle_s=0, file="journal/x")]
    for run_kinds, each in ((kinds, lanes), ({}, [_with_kind(lanes[0], "update_actor")])):
        assert charts.lanes_chart(step(each), run_kinds).key == ["training"]
    # Each of the ten colours has one entry in a key, however many stages there are.
    many = [f"stage {number}" for number in range(20)] + list(kinds) + ["tool a", "tool b", "other"]
    assert charts.key_of(charts.family(name) for name in many) == ["generation", "tool", "more", "idle"]


def _with_kind(lane: Lane, kind: str) -> Lane:
    return msgspec.structs.replace(lane, spans=[msgspec.structs.replace(each, stage_kind=kind) for each in lane.spans])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 %"), (0.0002, "< 0.1 %"), (0.0123, "1.2 %"), (0.996, "100 %"), (-0.046, "-4.6 %"), (None, "-")],
)
def test_shares_as_people_read_them(value: float | None, shown: str) -> None:
    assert units.share(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"),
        (4.2e-6, "4.20 µs"),
        (0.00123, "1.23 ms"),
        (0.9996, "1.00 s"),
        (11.23, "11.2 s"),
        (119.6, "2 min 0 s"),
        (7199.7, "2 h 0 min"),
        (-3.0, "-3.00 s"),
        (None, "-"),
    ],
)
def test_seconds_as_people_read_them(value: float | None, shown: str) -> None:
    assert units.seconds(value) == shown


def test_a_run_without_steps_has_a_page() -> None:
    read = Read(html.page(report_pages.figures(steps=0, details=0)))
    assert read.charts == set()
    assert "No step has ended, so there is nothing to judge." in read.text


def test_the_page_is_whole_or_not_there(tmp_path: Path) -> None:
    html.write(report_pages.figures(named="\udcff"), tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_a_page_is_small() -> None:
    """The page has no library in it."""
    assert len(html.page(report_pages.figures())) < 200_000
    figures = report_pages.figures(steps=10_000, samples=4096, ranks=64)
    assert len(html.page(figures)) < 1_500_000
    chart = charts.steps_chart(figures.steps, {stage.name: stage.kind for stage in figures.stages})
    assert len(chart.hovers) <= charts.MAX_BARS
    assert all(path.d.count("M") <= charts.MAX_BARS for path in chart.paths)
    slow_steps = [step for step in figures.steps if step.slow]
    assert 0 < sum(mark.kind == "slow" for mark in chart.marks) <= charts.MAX_MARKS < len(slow_steps)
    lanes = charts.lanes_chart(figures.details[0], {})
    assert sum(len(row.bars) for row in lanes.rows) < 1500
    assert len(html.rows(figures.steps)) == html.MAX_ROWS


def lane(label: str, spans: list[tuple[str, float, float]], kind: str = "stage", busy: float = 1.0) -> Lane:
    made = [SpanRow(name=name, kind=kind, start_s=start, end_s=end) for name, start, end in spans]
    return Lane(label=label, role="r", host="n1", pid=1, spans=made, busy_s=busy, idle_s=0, file="journal/x")


def step(lanes: list[Lane]) -> StepFigures:
    return StepFigures(
        number=1,
        start_ns=0,
        seconds=100,
        stages={},
        lanes=lanes,
        gaps=[],
        samples=None,
        skews=[],
        weight_sync_s=0,
        path=[],
        captures=[],
        findings=[],
    )


def drawn(lanes: list[Lane]) -> dict[str, list[tuple[float, float, int]]]:
    """Bars by name: from when on, for how long, in which line."""
    bars: dict[str, list[tuple[float, float, int]]] = {}
    for row in charts.lanes_chart(step(lanes), {}).rows:
        for bar in row.bars:
            bars.setdefault(bar.name, []).append((bar.left, bar.width, bar.row))
    return bars


def test_a_span_inside_of_another_stands_below_it() -> None:
    bars = drawn([lane("trainer", [("step", 0, 100), ("gen", 1, 40), ("update", 40, 90)])])
    assert bars == {"step": [(0, 100, 0)], "gen": [(1, 39, 1)], "update": [(40, 50, 1)]}


def test_what_is_not_drawn_is_counted() -> None:
    deep = lane("trainer", [(f"t{at}", at, 100 - at) for at in range(6)])
    cut = msgspec.structs.replace(lane("agents", [("a", 0, 50)], kind="sample"), left_out=3)
    chart = charts.lanes_chart(step([deep, cut]), {})
    assert [[bar.name for bar in row.bars] for row in chart.rows] == [["t0", "t1", "t2", "t3"], ["samples"]]
    assert chart.left_out == 2 + 3
    assert chart.rows[1].bars[0].title.startswith("samples: 1 or more at a time")


def test_spans_too_narrow_to_be_seen_are_drawn_together() -> None:
    many = [("mini", at * 0.01, at * 0.01 + 0.005) for at in range(1000)]
    bars = drawn([lane("actor", [*many, ("mini", 50, 60)])])
    assert bars["mini"] == [(0, pytest.approx(9.995), 0), (50, 10, 0)]


def test_many_samples_are_shown_by_how_many_go_on() -> None:
    bars = drawn([lane("agents", [("a", 0, 50), ("a", 0, 100), ("b", 25, 50)], kind="sample")])
    assert bars == {"samples": [(0, 25, 0), (25, 25, 0), (50, 50, 0)]}


@pytest.mark.parametrize(
    ("top", "shown"),
    [(0, [0]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (37.9, [0, 10, 20, 30]), (0.042, [0, 0.01, 0.02, 0.03, 0.04])],
)
def test_an_axis_has_round_numbers(top: float, shown: list[float]) -> None:
    assert charts.ticks(top) == pytest.approx(shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 5: weight sync took 17 s", "Step 5: weight sync took 17 s"),
        ("step 5 took 50 s", "Step 5 took 50 s"),
        ("generation waited", "Step 5: generation waited"),
        ("step 55 took 9 s", "Step 5: step 55 took 9 s"),
    ],
)
def test_a_finding_names_its_step_once(text: str, shown: str) -> None:
    figures = report_pages.figures(steps=5, details=1)
    finding = msgspec.structs.replace(figures.findings[0], text=text, step=5)
    read = Read(html.page(msgspec.structs.replace(figures, findings=[finding])))
    assert shown in read.text
    links = {a["href"] for tag, a in read.elements if tag == "a"}
    assert "#step-5" in links
    # A step without its own section gets no link.
    read = Read(html.page(msgspec.structs.replace(figures, findings=[finding], details=[])))
    assert shown in read.text
    assert "#step-5" not in {a["href"] for tag, a in read.elements if tag == "a"}


def test_a_death_names_its_step_once() -> None:
    figures = report_pages.figures(steps=5, details=1)
    text = "actor rank 0 was killed by SIGTERM in update_actor of step 5"
    finding = msgspec.structs.replace(figures.findings[0], kind="death", text=text, step=5)
    read = Read(html.page(msgspec.structs.replace(figures, findings=[finding])))
    assert "Actor rank 0 was killed by SIGTERM in update_actor of step 5" in read.text


def test_a_finding_shows_its_remedy_and_its_command() -> None:
    figures = report_pages.figures()
    (finding,) = figures.findings
    fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
    more = {"remedy": f"raise the number of workers {HOSTILE}", "command": "AUTOPROF_WHEN='gen>2x' python train.py"}
    kind = msgspec.defstruct("Remedied", [*fields, *(name for name in more if name not in fields)], frozen=True)
    remedied = kind(**(fields | more))
    read = Read(html.page(msgspec.structs.replace(figures, findings=[remedied])))
    for text in more.values():
        assert text in read.text


def test_small_changes_are_neither_better_nor_worse() -> None:
    figures = report_pages.figures(compared=True)
    comparison = figures.comparison
    assert comparison is not None
    change = [msgspec.structs.replace(row, a=10.0, change=0.4, worse=True) for row in comparison.rows[:1]]
    figures = msgspec.structs.replace(figures, comparison=msgspec.structs.replace(comparison, rows=change))
    assert not {"better", "worse"} & {a.get("class") for _, a in Read(html.page(figures)).elements}
    change = [msgspec.structs.replace(change[0], change=0.6, kind="operator")]
    figures = msgspec.structs.replace(figures, comparison=msgspec.structs.replace(comparison, rows=change))
    read = Read(html.page(figures))
    assert "worse" in {a.get("class") for _, a in read.elements}
    assert "1 operators and kernels of the captures" in read.text


def test_a_device_s_shares_are_those_of_its_time() -> None:
    """Copies beside kernels take none of it, and nothing is stretched or squeezed to fit."""
    device = DeviceShares(device="GPU 0", seconds=10, compute=0.7, communication=0.2, copy=0.3, idle=0.1, overlap=0.5)
    found = {share.name: share.share for share in html.device_shares(device)}
    assert found == pytest.approx(
        {"compute": 0.7, "communication without compute": 0.1, "copy alone": 0.1, "idle": 0.1}
    )


def test_nothing_is_said_to_hold_what_nobody_knows() -> None:
    figures = report_pages.figures()
    samples = figures.details[0].samples
    assert samples is not None
    assert samples.tail is not None
    for count in (1, 3):
        tail = msgspec.structs.replace(samples.tail, count=count, held_by="")
        step = msgspec.structs.replace(figures.details[0], samples=msgspec.structs.replace(samples, tail=tail))
        read = Read(html.page(msgspec.structs.replace(figures, details=[step])))
        (said,) = re.findall(r"The batch waited.*?prompt 9", read.text, re.DOTALL)
        assert "held by" not in said


def test_every_link_leads_somewhere(usual: Read) -> None:
    ids = {a["id"] for _, a in usual.elements if "id" in a}
    assert {str(a["href"])[1:] for tag, a in usual.elements if tag == "a"} <= ids
