"""Pages in a real Chromium: nothing is complained of, nothing is asked for, and what can be clicked works."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, Route, expect

from autoprof.cli import open
from autoprof.cli.open import PERFETTO, Server
from autoprof.report import build, html
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


def plot(page: Page, name: str) -> object:
    """A plot, drawn."""
    place = page.locator(f'[data-plot="{name}"]')
    place.scroll_into_view_if_needed()
    expect(place.locator(".main-svg").first).to_be_visible()
    return place


def legend(page: Page, name: str) -> list[str]:
    plot(page, name)
    return page.locator(f'[data-plot="{name}"] .legendtext').all_text_contents()


def test_a_run_with_planted_causes(show: Show, tmp_path: Path) -> None:
    run = tmp_path / "20261122-010203-abcdef"
    report_runs.write(run, captured=5, slow_tool=5, slow_rank=9)
    page = show(build.figures(runs.read(run))).page
    assert page.title() == "20261122-010203-abcdef · autoprof"
    assert legend(page, "run")[:2] == ["gen", "update_actor"]
    assert {"slow step", "captured step"} <= set(legend(page, "run"))
    # One bar a step in each of the stages.
    assert page.locator('[data-plot="run"] .trace.bars').first.locator(".point").count() == 12
    assert {"samples", "requests", "compute_log_prob"} <= set(legend(page, "lanes-5"))
    labels = page.locator('[data-plot="lanes-5"] .ytick text').all_text_contents()
    assert labels[:3] == ["trainer", "actor rank 0", "actor rank 1"]
    assert {"turn", "tool python", "reward"} <= set(legend(page, "samples-5"))
    plot(page, "done-5")
    finding = page.locator("#findings li").filter(has_text="rank 5")
    finding.get_by_text("Evidence").click()
    assert finding.locator("details li").count() >= 1


def test_what_was_not_in_view_is_on_paper(show: Show) -> None:
    page = show(report_pages.figures()).page
    far = page.locator('[data-plot="samples-12"]')
    page.locator("details").evaluate_all("(all) => all.forEach((each) => (each.open = true))")
    assert far.locator(".main-svg").count() == 0
    page.pdf()
    assert far.locator(".main-svg").count() > 0


def test_names_stay_text(show: Show) -> None:
    watched = show(report_pages.figures(named=HOSTILE, compared=True))
    page = watched.page
    assert page.title().startswith("20261122-010203-abcdef</script>")
    for name in ("run", "lanes-12", "samples-12", "done-12"):
        plot(page, name)
    shown = legend(page, "run")[0]
    assert shown.startswith("gen</script><script>document.title=")
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    hover(page, "run")
    assert "gen</script>" in page.locator('[data-plot="run"] .hoverlayer').text_content()
    hover(page, "lanes-12")
    assert "trainer</script>" in page.locator('[data-plot="lanes-12"] .hoverlayer').text_content()
    assert page.locator("img, a[href*='//'], svg a").count() == 0
    assert page.locator("script").count() == 3
    assert page.title().startswith("20261122-010203-abcdef</script>")


def hover(page: Page, name: str) -> None:
    """Point at the first bar of a plot."""
    place = page.locator(f'[data-plot="{name}"]')
    place.scroll_into_view_if_needed()
    box = place.locator(".trace.bars").first.locator(".point path").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2 - 2, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(place.locator(".hoverlayer .hovertext")).to_be_visible()


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
    plot(page, "run")
    bar = page.locator('[data-plot="run"] .trace.bars .point path').first
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


def test_a_step_is_drawn_when_it_is_opened(show: Show) -> None:
    page = show(report_pages.figures(details=3)).page
    opened = page.locator("details.step[open]")
    assert opened.evaluate_all("(all) => all.map((each) => each.id)") == ["step-12"]
    closed = page.locator('[data-plot="lanes-11"]')
    assert closed.locator("svg").count() == 0
    page.get_by_role("link", name="step 11", exact=True).click()
    plot(page, "lanes-11")
    assert page.locator("#step-11").get_attribute("open") is not None


@pytest.mark.parametrize("width", [1280, 700])
def test_nothing_runs_out_of_the_screen(show: Show, width: int) -> None:
    page = show(report_pages.figures(named="x" * 300, compared=True)).page
    page.set_viewport_size({"width": width, "height": 800})
    for name in ("run", "lanes-12"):
        plot(page, name)
    page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_large_runs(show: Show) -> None:
    page = show(report_pages.figures(steps=10_000, samples=4096, ranks=64)).page
    for name in ("run", "lanes-10000", "samples-10000", "done-10000"):
        plot(page, name)
    assert page.locator(".plot svg *").count() < 20_000
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
    plot(watched.page, "run")
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith((served.url(), "data:"))] == []
