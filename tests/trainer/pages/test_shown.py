"""The page in a real browser, without processes behind it: what it shows, how it zooms, whom it lets read."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.support.browser import Browser, WatchedPage
from tests.support.observing import Announced, Report, SeenPipeline, Step, a_worker, some_stages
from tests.support.shown_pages import ShownNode, a_node, a_view, fill, shown_node, shown_run
from tests.support.waiting import wait_until
from trainer.monitor import ApiConfig
from trainer.monitor.history import History
from trainer.monitor.pages.course import CourseRange
from trainer.monitor.run_view import AlarmStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOSTILE = "\u202e<img src=x onerror=alert(1)><script>alert(2)</script>\x1b[2J" + "x" * 10_000_000
TOKEN = "a-token-of-24-characters"


def train(node: ShownNode, first: int, last: int) -> None:
    for step in range(first, last):
        node.observer.step(Step(step=step, loss=9.0 - step / 100, num_tokens=64), num_tokens=64 * (step + 1))


def seen(node: ShownNode, step: int) -> bool:
    curve = node.page.course(CourseRange()).curves[0]
    return curve.who == "run" and curve.x[-1] == step


def text_of(page: WatchedPage, selector: str) -> str:
    return str(page.tab.locator(selector).first.inner_text())


def drawn(page: WatchedPage) -> None:
    page.wait_for("#curves[data-drawn]")
    page.tab.locator("#curves .js-plotly-plot .main-svg").first.wait_for(state="visible")


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_a_node_is_shown_and_nothing_is_wrong_with_its_page(browser: Browser, width, is_dark):
    with shown_node(max_steps=1_000) as node:
        train(node, 0, 300)
        node.observer.round(Report(dropped=(("c" * 64, "late: no part"),)), outer_step=1, state_digest="d1")
        node.observer.round_failed(1, "too few members")
        node.tracker.peers([Announced("a" * 64, "gpu-8", shards=(1,))])
        with browser.open(node.url, width=width, is_dark=is_dark) as page:
            drawn(page)
            page.check()
            assert "training, verified" in text_of(page, "#verdict")
            assert "late: no part" in text_of(page, "#rounds") and "too few members" in text_of(page, "#rounds")
            assert page.tab.locator("#nodes tbody tr").count() == 2
            assert page.tab.locator("#swarm").is_hidden() and page.tab.locator("#alarms").is_hidden()


def test_a_pipeline_is_shown_with_bans_queues_and_the_account(browser: Browser):
    workers = (a_worker("head.0.1", banned_for_s=42.0, queued=7, node_id="w-1"), a_worker("head.0.2", node_id="w-2"))
    stages = some_stages()
    stages = stages.model_copy(
        update={"stages": (stages.stages[0].model_copy(update={"workers": workers}), stages.stages[1])}
    )
    view = SeenPipeline(of_stages=stages)
    with shown_node(role="driver") as node:
        node.page.pipeline = view
        train(node, 0, 50)
        with browser.open(node.url) as page:
            drawn(page)
            page.check()
            told = text_of(page, "#swarm")
            assert "banned, 42 s" in told and "7 queued" in told and "nobody serves it" in told
            account = text_of(page, "#account")
            assert all(part in account for part in ("120", "100", "17", "3", "adds up", "unclear"))


def test_the_page_goes_on_by_itself_and_says_when_nobody_answers(browser: Browser):
    with shown_node() as node:
        train(node, 0, 10)
        with browser.open(node.url) as page:
            page.tab.get_by_text("10", exact=True).first.wait_for()
            train(node, 10, 25)
            page.tab.locator("#cards").get_by_text("25", exact=True).first.wait_for()
            assert page.console == []
            page.tab.route("**/api/page", lambda route: route.abort())
            page.tab.get_by_text("The server does not answer").wait_for()
            page.tab.unroute("**/api/page")
            page.tab.get_by_text("The server does not answer").wait_for(state="hidden")


def test_steps_are_counted_from_one_at_whole_numbers_and_each_curve_has_its_colour(browser: Browser):
    with shown_node() as node:
        for last in (2, 4):  # A look at the run after each: a curve of one point has no line.
            train(node, last - 2, last)
            wait_until(lambda last=last: seen(node, last), f"a look at the run at step {last}")
        with browser.open(node.url) as page:
            drawn(page)
            ticks = page.tab.locator("#curves .chart").first.locator(".xtick").all_text_contents()
            assert ticks and all(each.isdigit() for each in ticks)
            assert "at steps done 1," in text_of(page, "#curves figcaption") and "at 4;" in text_of(page, "#curves")
            lines = (
                page.tab.locator("#curves .chart")
                .first.locator(".legendlines path")
                .evaluate_all("found => found.map(each => each.style.stroke)")
            )
            assert len(set(lines)) == len(lines) == 2
            assert page.tab.locator("#no-charts").is_hidden()


def test_the_table_of_a_run_fits_and_has_all_columns_for_whom_asks(browser: Browser):
    known = {"memory_bytes": 10**9, "clock_offset_s": 0.1, "hours": 2.5, "num_shards": 4, "software": "1.0"}
    view = a_view([a_node(f"node-{number}", pflops=1.0, confirmed_pflops=0.9, **known) for number in range(3)])
    with History(None, "run-1") as history, shown_run(lambda: view, history) as url, browser.open(url) as page:
        page.tab.locator("#nodes tbody tr").first.wait_for()
        is_cut = page.tab.locator("#nodes .scroll").evaluate("found => found.scrollWidth > found.clientWidth")
        assert not is_cut and "memory" not in text_of(page, "#nodes thead")
        page.tab.get_by_role("button", name="all columns").focus()
        page.tab.keyboard.press("Enter")
        page.tab.get_by_role("button", name="memory").wait_for()
        assert page.tab.evaluate("document.activeElement.textContent") == "all columns"
        page.check()


def test_zooming_asks_for_the_range_and_works_by_keyboard(browser: Browser):
    with shown_node() as node:
        train(node, 0, 2_000)
        with browser.open(node.url) as page:
            drawn(page)
            zoom = page.tab.get_by_role("button", name="zoom in")
            zoom.focus()
            with page.tab.expect_response(lambda answer: "begin=" in answer.url) as asked:
                page.tab.keyboard.press("Enter")
            course = asked.value.json()
            own = next(it for it in course["curves"] if (it["who"], it["what"]) == ("self", "loss"))
            assert 450 < min(own["x"]) < 550 and 1_450 < max(own["x"]) < 1_550
            with page.tab.expect_response(lambda answer: "by=tokens" in answer.url):
                page.tab.get_by_role("group", name="x axis").get_by_role("button", name="tokens").click()
            page.tab.get_by_role("button", name="log scale").click()
            box = page.tab.locator("#curves .chart").first.bounding_box()
            assert box is not None
            with page.tab.expect_response(lambda answer: "begin=" in answer.url):
                page.tab.mouse.move(box["x"] + 300, box["y"] + 150)
                page.tab.mouse.down()
                page.tab.mouse.move(box["x"] + 600, box["y"] + 160, steps=5)
                page.tab.mouse.up()
            page.check()


def test_what_strangers_write_stays_text(browser: Browser):
    alarm = AlarmStatus(kind="quiet", subject=HOSTILE, text=HOSTILE, since="2026-11-28T00:00:00Z")
    nodes = [a_node("n", node_id=HOSTILE, doubts=(HOSTILE,), loss=float("nan"), tokens_per_s=float("inf"))]
    view = a_view(nodes, alarms=(alarm,), unverified=(HOSTILE,), run_id=HOSTILE)
    with History(None, "run-1") as history, shown_run(lambda: view, history) as url:
        fill(history, num_nodes=2, num_looks=60, every_s=60.0, end_at=time.time())
        with browser.open(url) as page:
            drawn(page)
            page.check()
            assert page.tab.locator("main img, main script").count() == 0
            assert "<img src=x" in text_of(page, "#nodes tbody th") and "⟨U+202E⟩" in text_of(page, "#alarms")
            assert page.tab.locator("#nodes tbody th bdi").count() == 1


def test_300_nodes_are_shown_as_the_api_has_them(browser: Browser):
    nodes = [a_node(f"node-{number}", pflops=float(number)) for number in range(300)]
    view = a_view(nodes)
    with History(None, "run-1") as history, shown_run(lambda: view, history) as url:
        fill(history, num_nodes=300, num_looks=60, every_s=60.0, end_at=time.time())
        with browser.open(url) as page:
            drawn(page)
            page.check()
            with urllib.request.urlopen(f"{url}/api/run", timeout=60) as answer:
                told = json.load(answer)
            assert page.tab.locator("#nodes tbody tr").count() == len(told["nodes"]) == 300
            cards = text_of(page, "#cards")
            for figure in ("3.2500", "123,456,789", "4,321", "300"):
                assert figure in cards
            first = page.tab.locator("#nodes tbody th").first
            assert first.inner_text() == "node-299"
            page.tab.get_by_role("button", name="PFLOP").click()
            assert first.inner_text() == "node-0"


def test_a_token_is_asked_for_once(browser: Browser):
    with shown_node(config=ApiConfig(port=0, read_token=TOKEN)) as node:
        train(node, 0, 20)
        with browser.open(node.url) as page:
            assert page.breaches() == []
            page.tab.get_by_label("Token").fill("not the token at all")
            page.tab.get_by_role("button", name="Show the page").click()
            page.tab.get_by_role("alert").wait_for()
            page.tab.get_by_label("Token").fill(TOKEN)
            page.tab.get_by_role("button", name="Show the page").click()
            drawn(page)
            assert page.foreign == []


def test_without_the_chart_library_there_are_tables(browser: Browser, monkeypatch):
    from trainer.monitor.pages import routes

    monkeypatch.setattr(routes, "has_charts", lambda: False)
    routes.live_page.cache_clear()
    try:
        with shown_node() as node:
            train(node, 0, 100)
            with browser.open(node.url) as page:
                page.wait_for("#curves[data-drawn]")
                assert "pip install 'genesis-training[page]'" in text_of(page, "#no-charts")
                page.tab.get_by_text("Loss as a table").click()
                assert page.tab.locator("#curves figure table").first.locator("tbody tr").count() == 12
                page.check()
    finally:
        routes.live_page.cache_clear()
