"""Pages in a real Chromium: nothing is complained of, nothing is asked for, and what can be clicked works."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Locator, Page, Route, expect

from autoprof.base import units
from autoprof.cli import open
from autoprof.cli.open import Server
from autoprof.report import build, html
from autoprof.report.html import PERFETTO
from autoprof.report.model import RunFigures
from autoprof.rundir import runs
from tests.support import report_pages, report_runs
from tests.support.browsing import Watched, chromium
from tests.support.report_pages import HOSTILE

Show = Callable[..., Watched]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    yield made
    made.close()


@pytest.fixture
def show(context: BrowserContext, tmp_path: Path) -> Iterator[Show]:
    """Opens the page of figures from the disk. Nothing may be said, and nothing asked for besides."""
    shown: list[tuple[Watched, str]] = []

    def open_page(figures: RunFigures) -> Watched:
        path = tmp_path / f"{len(shown)}.html"
        html.write(figures, path)
        watched = Watched(context)
        watched.page.goto(path.as_uri())
        shown.append((watched, path.as_uri()))
        return watched

    yield open_page
    for watched, url in shown:
        assert watched.said == []
        # A link inside of the page is no request.
        assert {each.split("#")[0] for each in watched.asked} == {each for _, each in shown}, url


def chart(page: Page, name: str) -> Locator:
    """A chart that is visible."""
    place = page.locator(f'[data-chart="{name}"]')
    place.scroll_into_view_if_needed()
    expect(place).to_be_visible()
    return place


def key(page: Page, name: str) -> list[str]:
    """The colours in the key of a chart with rows."""
    return [text.strip() for text in chart(page, name).locator(".key li").all_text_contents()]


def test_a_run_with_planted_causes(show: Show, tmp_path: Path) -> None:
    run = tmp_path / "20261122-010203-abcdef"
    report_runs.write(run, captured=5, slow_tool=5, slow_rank=9)
    page = show(build.figures(runs.read(run))).page
    assert page.title() == "20261122-010203-abcdef · autoprof"
    assert (page.locator(".about").text_content() or "").count("python\xa03.12.3, verl\xa00.9.1") == 1
    steps = chart(page, "run")
    # The hover text of a bar lists the stages of the step.
    assert steps.locator(".tall rect").count() == 12
    title = steps.locator(".tall rect title").nth(8).text_content() or ""
    assert title.startswith("step 9 (regular): ")
    assert "\nupdate_actor: " in title
    assert steps.locator(".area .mark.captured").count() == 1
    assert steps.locator(".area .mark.slow").count() == 1
    assert key(page, "lanes-5")[:3] == ["generation", "reward", "scoring"]
    labels = page.locator('[data-chart="lanes-5"] .who').all_text_contents()
    assert labels[:3] == ["trainer", "actor rank 0", "actor rank 1"]
    # Names are inside of their bars.
    assert chart(page, "lanes-5").get_by_text("compute_log_prob").first.is_visible()
    assert key(page, "samples-5") == ["generation", "reward", "tools", "no stage, waiting"]
    assert chart(page, "samples-5").get_by_title("tool python: 15.0 s, 1 time").count() == 1
    chart(page, "done-5")
    finding = page.locator("#findings li").filter(has_text="rank 5")
    finding.get_by_text("Evidence").click()
    assert finding.locator("details li").count() >= 1


def test_bars_are_on_paper(show: Show) -> None:
    page = show(report_pages.figures()).page
    page.emulate_media(media="print")
    for name in ("run", "lanes-12", "samples-12"):
        place = chart(page, name)
        assert (
            place.locator("[class^=fill-]").first.evaluate("(bar) => getComputedStyle(bar).printColorAdjust") == "exact"
        )
    assert page.locator("#theme, .filter, .zoom").filter(visible=True).count() == 0


def test_names_stay_text(show: Show) -> None:
    page = show(report_pages.figures(named=HOSTILE, compared=True)).page
    assert page.title().startswith("20261122-010203-abcdef</script>")
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    for name in ("run", "lanes-12", "samples-12", "done-12"):
        chart(page, name)
    assert "gen</script>" in (page.locator('[data-chart="run"] rect title').first.text_content() or "")
    assert page.locator('[data-chart="lanes-12"] .who').first.text_content() == units.short(f"trainer{HOSTILE}", 34)
    assert page.locator(".calls button").first.text_content() == f"actor.update_actor{HOSTILE}"
    assert page.locator("img, a[href*='//'], svg a").count() == 0
    assert page.locator("script").count() == 3
    assert page.title().startswith("20261122-010203-abcdef</script>")


def test_the_search_shows_what_has_all_words(show: Show) -> None:
    figures = report_pages.figures(details=3)
    (finding,) = figures.findings
    other = msgspec.structs.replace(finding, kind="slow_rank", text="step 11: actor rank 3 was slow", step=11)
    figures = msgspec.structs.replace(figures, findings=[finding, other])
    page = show(figures).page
    found, steps = page.locator("#findings > .findings > li"), page.locator("#steps > .step")
    search, said = page.get_by_role("searchbox"), page.locator("#filter output")
    search.fill("RANK 3 slow")
    assert found.filter(visible=True).all_text_contents() == [found.nth(1).text_content()]
    search.fill("step 11")
    assert steps.filter(visible=True).evaluate_all("(all) => all.map((each) => each.id)") == ["step-11"]
    expect(said).to_have_text("1 of 2 findings, 1 of 3 steps")
    search.fill("")
    expect(said).to_have_text("")
    page.get_by_role("combobox", name="Kind").select_option("slow_tool")
    assert [found.nth(0).is_visible(), found.nth(1).is_visible()] == [True, False]


def test_the_lanes_become_wider(show: Show) -> None:
    page = show(report_pages.figures()).page
    place = chart(page, "lanes-12")
    rows = place.locator(".rows")
    before = rows.evaluate("(rows) => rows.clientWidth")
    place.get_by_role("button", name="wider").click()
    assert rows.evaluate("(rows) => rows.clientWidth") == pytest.approx(2 * before, abs=2)
    place.get_by_role("button", name="narrower").click()
    assert rows.evaluate("(rows) => rows.clientWidth") == before


def test_a_flame_graph_is_enlarged_by_a_click(show: Show) -> None:
    page = show(report_pages.figures()).page
    capture = page.locator("#step-12 .capture").filter(has_text="update_actor")
    capture.locator("summary").first.click()
    calls = capture.locator(".calls button")
    names = ["actor.update_actor", "aten::op0", "train.py(7): loss", "aten::op1"]
    assert [title.split(": ")[-1] for title in calls.evaluate_all("(all) => all.map((each) => each.title)")] == [
        "900 ms",
        "600 ms",
        "200 ms",
        "100 ms",
    ]
    assert calls.all_text_contents() == names
    calls.nth(2).click()
    assert calls.all_text_contents() == ["actor.update_actor", "train.py(7): loss", "aten::op1"]
    widths = calls.evaluate_all("(all) => all.map((each) => each.style.width)")
    assert widths == ["100%", "100%", "50%"]
    calls.nth(0).click()
    assert calls.all_text_contents() == names


def test_a_flame_graph_is_saved_for_speedscope(show: Show) -> None:
    page = show(report_pages.figures()).page
    capture = page.locator("#step-12 .capture").filter(has_text="update_actor")
    capture.locator("summary").first.click()
    with page.expect_download() as saved:
        capture.get_by_role("button", name="Download for speedscope").click()
    assert saved.value.suggested_filename == "12.actor.update_actor.rank0.n1.pid200.speedscope.json"
    content = json.loads(saved.value.path().read_text())
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    (profile,) = content["profiles"]
    names = [frame["name"] for frame in content["shared"]["frames"]]
    stacks = [[names[frame] for frame in stack] for stack in profile["samples"]]
    assert stacks[3] == ["actor.update_actor", "train.py(7): loss", "aten::op1"]
    # Own times: what the callees of a call take is not in its weight.
    assert profile["weights"] == [1e5, 6e5, 1e5, 1e5]
    assert (profile["type"], profile["unit"], profile["endValue"]) == ("sampled", "microseconds", 9e5)


def test_a_page_on_the_disk_has_the_command_to_copy(show: Show) -> None:
    figures = report_pages.figures()
    step = show(figures).page.locator("#step-12")
    expect(step.get_by_text(f"autoprof open {figures.path} --step 12")).to_be_visible()
    expect(step.get_by_role("button", name="in Perfetto")).to_be_hidden()


def test_tables_sort_by_click_and_by_key(show: Show) -> None:
    page = show(report_pages.figures(compared=True)).page
    table = page.locator("#comparison table")

    def column(number: int) -> list[str]:
        return table.locator(f"tbody tr > :nth-child({number})").all_text_contents()

    change = table.get_by_role("columnheader", name="change", exact=True)
    change.get_by_role("button").click()
    assert change.get_attribute("aria-sort") == "descending"
    assert column(6) == ["+5.00 s", "+500 ms", "-900 ms", "-680 /s"]
    change.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert change.get_attribute("aria-sort") == "ascending"
    assert column(6) == ["-680 /s", "-900 ms", "+500 ms", "+5.00 s"]
    # Rows without a value come last in both orders.
    side = table.get_by_role("columnheader", name="run a")
    for order in ("descending", "ascending"):
        side.get_by_role("button").press("Space")
        assert (side.get_attribute("aria-sort"), column(4)[-1]) == (order, "-")
    assert change.get_attribute("aria-sort") is None
    name = table.get_by_role("columnheader", name="name")
    name.get_by_role("button").click()
    assert (name.get_attribute("aria-sort"), column(2)) == ("ascending", ["gen", "ref", "testing", "tokens"])


def looks(page: Page) -> tuple[str, str]:
    """The page's ground, and the colour of the first bar."""
    bar = chart(page, "run").locator("path").first
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return ground, bar.evaluate("(path) => getComputedStyle(path).fill")


def test_the_theme_is_the_systems_or_the_readers(show: Show) -> None:
    page = show(report_pages.figures()).page
    light = looks(page)
    assert light == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(20, 24, 29)")
    dark = looks(page)
    assert dark == ("rgb(20, 24, 29)", "rgb(75, 166, 222)")
    button = page.get_by_role("button", name="Theme: system")
    button.click()
    assert page.locator("#theme").text_content() == "Theme: light"
    assert looks(page) == light
    page.locator("#theme").click()
    page.emulate_media(color_scheme="light")
    assert page.locator("#theme").text_content() == "Theme: dark"
    assert looks(page) == dark


def test_a_link_unfolds_its_step(show: Show) -> None:
    page = show(report_pages.figures(details=3)).page
    opened = page.locator("details.step[open]")
    assert opened.evaluate_all("(all) => all.map((each) => each.id)") == ["step-12"]
    page.get_by_role("link", name="step 11", exact=True).click()
    chart(page, "lanes-11")
    assert page.locator("#step-11").get_attribute("open") is not None


@pytest.mark.parametrize("width", [1280, 700, 390])
def test_nothing_runs_out_of_the_screen(show: Show, width: int) -> None:
    page = show(report_pages.figures(named="x" * 300, compared=True)).page
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_large_runs(show: Show) -> None:
    page = show(report_pages.figures(steps=10_000, samples=4096, ranks=64)).page
    for name in ("run", "lanes-10000", "samples-10000", "done-10000"):
        chart(page, name)
    assert page.locator(".chart *").count() < 5_000
    table = page.locator("#run details table")
    page.locator("#run details summary").click()
    table.get_by_role("columnheader", name="took").get_by_role("button").click()
    assert table.locator("tbody tr").count() == html.MAX_ROWS


def test_the_page_can_not_reach_anything(show: Show) -> None:
    watched = show(report_pages.figures())
    asked: list[object] = []
    with Server(0) as server:
        server.process_request = lambda *_: asked.append("a request")  # type: ignore[method-assign,assignment]
        fetched = watched.page.evaluate(f"fetch('{server.url()}').then(() => 'fetched', () => 'refused')")
        ran = watched.page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "window.ran = true";
                document.body.append(script);
                return Boolean(window.ran);
            }"""
        )
        server.timeout = 0
        server.handle_request()
    assert (fetched, ran, asked) == ("refused", False, [])
    said = list(watched.said)
    watched.said.clear()
    assert said
    assert all("Content Security Policy" in each for each in said)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    """Serve a run as `autoprof open` does, on a free port."""
    run = tmp_path / "20261122-010203-abcdef"
    report_runs.write(run, steps=3, captured=3)
    with Server(0) as server:
        assert open.fill(server, runs.read(run), None)
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# Stand-in for Perfetto's handler of messages (ui/src/frontend/post_message_handler.ts).
STAND_IN = """<title>perfetto</title><script>
addEventListener("message", ({ data, source, origin }) => {
  if (data === "PING") {
    source.postMessage("PONG", origin);
  } else {
    window.opened = [data.perfetto.title, Array.from(new Uint8Array(data.perfetto.buffer.slice(0, 2))), origin,
      data.perfetto.buffer.byteLength];
  }
});
</script>"""


def elsewhere(context: BrowserContext, origin: str, page: str = "<title>x</title>") -> None:
    def answer(route: Route) -> None:
        # Its page may have been closed meanwhile, by the button of a trace that is gone.
        with contextlib.suppress(Error):
            route.fulfill(status=200, content_type="text/html", body=page)

    context.route(f"{origin}/**", answer)


def test_the_button_hands_the_trace_to_perfetto(context: BrowserContext, served: Server, tmp_path: Path) -> None:
    elsewhere(context, PERFETTO, STAND_IN)
    watched = Watched(context)
    watched.page.goto(served.url())
    with context.expect_page() as opened:
        watched.page.get_by_role("button", name="Open step 3 in Perfetto").click()
    opened.value.wait_for_function("window.opened")
    title, magic, origin, size = opened.value.evaluate("window.opened")
    (merged,) = tmp_path.glob("*/global_step_000003/merged.pt.trace.json.gz")
    assert (title, magic, size) == ("20261122-010203-abcdef, step 3", [0x1F, 0x8B], merged.stat().st_size)
    assert origin == f"http://127.0.0.1:{served.server_port}"
    expect(watched.page.get_by_role("status")).to_have_text("Perfetto has the trace.")
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith((served.url(), PERFETTO, "data:"))] == []


def test_a_trace_that_is_gone_is_said(context: BrowserContext, served: Server) -> None:
    elsewhere(context, PERFETTO, STAND_IN)
    watched = Watched(context)
    watched.page.goto(served.url())
    served.make = lambda name: None
    for name in [name for name in served.contents if name.endswith(".gz")]:
        del served.contents[name]
    watched.page.get_by_role("button").click()
    expect(watched.page.get_by_role("status")).to_contain_text("could not be read (404)")


def test_perfettos_page_may_read_the_trace_and_others_may_not(context: BrowserContext, served: Server) -> None:
    other = "https://ui.perfetto.dev.evil.example"
    (name,) = [name for name in served.contents if name.endswith(".gz")]
    read = f"fetch('{served.url(name)}').then((a) => a.arrayBuffer()).then((b) => b.byteLength, () => 'refused')"
    found = {}
    context.grant_permissions(["local-network-access"])
    for origin in (PERFETTO, other):
        elsewhere(context, origin)
        page = context.new_page()
        page.goto(f"{origin}/")
        found[origin] = page.evaluate(read)
    file = served.contents[name].file
    assert file is not None
    assert found == {PERFETTO: file.stat().st_size, other: "refused"}
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_the_report_is_served_too(context: BrowserContext, served: Server) -> None:
    watched = Watched(context)
    watched.page.goto(served.url())
    watched.page.get_by_role("link", name="The report").click()
    expect(watched.page).to_have_title("20261122-010203-abcdef · autoprof")
    chart(watched.page, "run")
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith((served.url(), "data:"))] == []


def test_the_report_opens_each_of_its_steps_in_perfetto(
    context: BrowserContext, served: Server, tmp_path: Path
) -> None:
    """Step 1 was not captured: its trace is made from the timeline, when the button asks for it."""
    elsewhere(context, PERFETTO, STAND_IN)
    watched = Watched(context)
    (run,) = tmp_path.glob("2026*")
    figures = build.figures(runs.read(run), [1, 3])
    html.write(figures, run / "report.html")
    watched.page.goto(served.url("report.html"))
    for number in (3, 1):
        step = watched.page.locator(f"#step-{number}")
        step.evaluate("(step) => (step.open = true)")
        expect(step.get_by_text("autoprof open")).to_be_hidden()
        with context.expect_page() as opened:
            step.get_by_role("button", name=f"Open step {number} in Perfetto").click()
        opened.value.wait_for_function("window.opened")
        title, magic, *_ = opened.value.evaluate("window.opened")
        assert (title, magic) == (f"20261122-010203-abcdef, step {number}", [0x1F, 0x8B])
        expect(step.get_by_role("status")).to_have_text("Perfetto has the trace.")
    assert len([name for name in served.contents if name.endswith(".gz")]) == 2
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith((served.url(), PERFETTO, "data:"))] == []
