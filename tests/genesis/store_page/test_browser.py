"""The store's page and its report in a real browser: figures, updates, keys, hostile documents, axe-core."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

from genesis.store import FolderStore
from genesis.store_page.report import ReportOptions, store_report
from manifests import builtin_sources, shard_key
from tests.genesis.store_page.conftest import HOSTILE
from tests.support.browser import Browser, WatchedPage, _chromium, browsing
from tests.support.serve_process import ServeProcess, genesis_serve
from tests.support.small_store import copy_small_store, manifest_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


def figure(page: WatchedPage, label: str) -> str:
    return str(page.tab.locator(".card", has_text=label).locator(".figure").first.inner_text())


def wait_for(page: WatchedPage, condition: Callable[[], bool], what: str) -> None:
    """The browser has to go on meanwhile, so its own clock is waited with."""
    for _ in range(600):
        if condition():
            return
        page.tab.wait_for_timeout(100)
    pytest.fail(f"expected {what}; the console says {page.console}")


def is_drawn(page: WatchedPage) -> bool:
    return bool(page.tab.locator(".token").count() and page.tab.locator(".tokens li").count())


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_the_page_is_sound_at_any_width(browser: Browser, tmp_path: Path, width: int, is_dark: bool) -> None:
    copy_small_store(tmp_path / "store", signed=True)
    with genesis_serve(tmp_path / "store") as server, browser.open(server.url, width=width, is_dark=is_dark) as page:
        wait_for(page, lambda: is_drawn(page), "a document and tokens of the vocabulary")
        page.tab.locator(".grid .cell").first.click()
        page.tab.locator(".shard-panel").get_by_text("sha256").wait_for()
        page.check()


def test_figures_are_those_of_the_api_and_follow_the_store(browser: Browser, tmp_path: Path) -> None:
    copy_small_store(tmp_path / "store")
    with genesis_serve(tmp_path / "store") as server, browser.open(server.url) as page:
        wait_for(page, lambda: is_drawn(page), "a document")
        check_figures(page, server)
        before = figure(page, "Shards")
        # As another process, since the browser's loop runs in this one.
        program = (
            "import sys; from pathlib import Path; from genesis.store import FolderStore; "
            "from tests.support.small_store import populate_source, write_input; "
            "folder = Path(sys.argv[1]); path = write_input(folder, 'beta'); "
            "populate_source(FolderStore(folder / 'store'), 'gamma', path)"
        )
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300, cwd=Path.cwd())
        wait_for(page, lambda: figure(page, "Shards") != before, "more shards on the page")
        wait_for(page, lambda: page.tab.locator("#sources-table tbody tr").count() == 3, "a third source")
        check_figures(page, server)
        total = manifest_of(tmp_path / "store").total_shards
        wait_for(page, lambda: page.tab.locator(".grid .cell").count() == total, f"{total} cells")
        assert page.tab.locator("#commits-table tbody tr").count() >= 2
        page.check()


def check_figures(page: WatchedPage, server: ServeProcess) -> None:
    def equal() -> bool:
        store = server.get("/api/store").json()
        shown = (figure(page, "Shards"), figure(page, "Documents"), figure(page, "Vocabulary"))
        totals = store["totals"]
        return shown == (f"{totals['shards']:,}", f"{totals['documents']:,}", f"{store['vocabulary']['ids']:,}")

    wait_for(page, equal, "the page's figures to be the API's")
    rows = page.tab.locator("#sources-table tbody tr")
    shown = {rows.nth(place).locator("th").inner_text(): rows.nth(place).inner_text() for place in range(rows.count())}
    for source in server.get("/api/store").json()["sources"]:
        assert f"{source['documents']:,}" in shown[source["name"]]


def test_a_document_of_the_page_is_the_documents_text(browser: Browser, hostile_folder: Path) -> None:
    with genesis_serve(hostile_folder) as server, browser.open(server.url) as page:
        wait_for(page, lambda: is_drawn(page), "a document")
        for ordinal in range(len(HOSTILE)):
            page.tab.get_by_label("document", exact=True).fill(str(ordinal))
            page.tab.locator(".reader-forms form").first.get_by_role("button").click()
            page.tab.get_by_text(f"hostile, document {ordinal}:").wait_for()
            answer = server.get(f"/api/document?source=hostile&ordinal={ordinal}").json()
            assert page.tab.locator(".document .token").count() == len(answer["pieces"])
            assert page.tab.locator(".document :is(script, img, b)").count() == 0
        assert page.tab.title() == "store: store"
        shown = page.tab.locator(".document").inner_text()
        assert "\u202e" not in shown
        page.check()


def test_keys_alone_reach_everything(browser: Browser, tmp_path: Path) -> None:
    copy_small_store(tmp_path / "store")
    with genesis_serve(tmp_path / "store") as server, browser.open(server.url) as page:
        wait_for(page, lambda: is_drawn(page), "a document")
        page.tab.locator('.grid [tabindex="0"]').focus()
        page.tab.keyboard.press("ArrowRight")
        page.tab.keyboard.press("ArrowRight")
        assert page.tab.locator(".grid-detail").inner_text().startswith("shard 2:")
        page.tab.keyboard.press("Enter")
        page.tab.locator(".shard-panel h3", has_text="Shard 2").wait_for()
        page.tab.locator(".document").focus()
        for _ in range(3):
            page.tab.keyboard.press("ArrowRight")
        page.tab.keyboard.press("ArrowLeft")
        current: dict[str, Any] = page.tab.evaluate("({...document.querySelector('.token.current').dataset})")
        place = int(current["place"])
        assert f"token {place + 1} of" in page.tab.locator(".token-detail").inner_text()
        page.tab.keyboard.press("Enter")
        wait_for(page, lambda: page.tab.get_by_label("text, or # and an id").input_value().startswith("#"), "a search")
        page.check()


@pytest.mark.parametrize("state", ["empty", "damaged", "foreign"])
def test_other_stores_are_shown_clearly(browser: Browser, tmp_path: Path, foreign_folder: Path, state: str) -> None:
    folder = foreign_folder if state == "foreign" else tmp_path / "store"
    folder.mkdir(exist_ok=True)
    if state == "damaged":
        (folder / "manifest.json").write_text('{"total_shards": "<b>NaN</b>"}')
    with genesis_serve(folder) as server, browser.open(server.url) as page:
        if state == "foreign":
            wait_for(page, lambda: is_drawn(page), "a document")
            assert "made elsewhere" in page.tab.locator("#vocabulary-note").inner_text()
        else:
            page.tab.locator("#problem .message").wait_for()
            assert page.tab.locator("#problem b").count() == 0
            if state == "empty":
                # Populated while it is looked at: the page comes to life.
                program = (
                    "import sys; from pathlib import Path; from genesis.store import FolderStore; "
                    "from tests.support.small_store import populate_source, write_input; folder = Path(sys.argv[1]); "
                    "populate_source(FolderStore(folder / 'store'), 'alpha', write_input(folder, 'alpha'))"
                )
                subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300, cwd=Path.cwd())
                wait_for(page, lambda: is_drawn(page), "a document")
        page.check()


def test_a_damaged_shard_is_marked_once_it_was_read(browser: Browser, tmp_path: Path) -> None:
    copy_small_store(tmp_path / "store")
    (tmp_path / "store" / shard_key(3)).write_bytes(b"x" * 10)
    with genesis_serve(tmp_path / "store") as server, browser.open(server.url) as page:
        wait_for(page, lambda: is_drawn(page), "a document")
        page.tab.get_by_label("shard", exact=True).last.fill("3")
        page.tab.locator(".reader-forms form").last.get_by_role("button").click()
        page.tab.locator("#documents .message.bad", has_text="shard_3.pt: expected").wait_for()
        wait_for(page, lambda: page.tab.locator(".cell.damaged").count() == 1, "a damaged cell")
        assert [line for line in page.console if "409" not in line] == []


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (400, True)])
def test_a_report_is_the_page_without_a_server(
    browser: Browser, tmp_path: Path, hostile_folder: Path, width: int, is_dark: bool
) -> None:
    report = store_report(FolderStore(hostile_folder), builtin_sources(), ReportOptions(documents=8, tokens=500))
    path = tmp_path / "store.html"
    path.write_text(report.html(), encoding="utf-8")
    with browser.open(path.as_uri(), width=width, is_dark=is_dark) as page:
        wait_for(page, lambda: is_drawn(page), "a document")
        assert figure(page, "Shards") == f"{report.shards.total_shards:,}"
        assert page.tab.locator(".grid .cell").count() == len(report.shards.cells)
        for place, document in enumerate(report.documents):
            page.tab.get_by_label("sampled document").select_option(str(place))
            assert page.tab.locator(".document .token").count() == len(document.pieces)
        page.tab.get_by_label("text, or # and an id").fill("script")
        page.tab.get_by_role("button", name="Look up").click()
        page.tab.get_by_text("tokens hold it").wait_for()
        page.check()


def test_report_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, environment = _chromium()
    for name, value in {**environment, "GENESIS_BROWSER": str(program)}.items():
        monkeypatch.setenv(name, value)
    copy_small_store(tmp_path / "store")
    html, pdf = tmp_path / "store.html", tmp_path / "store.pdf"
    command = [sys.executable, "-m", "genesis", "report", str(tmp_path / "store"), "--html", str(html)]
    printed = subprocess.run(
        [*command, "--pdf", str(pdf), "--json"], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert json.loads(printed)["store"]["totals"]["shards"] == manifest_of(tmp_path / "store").total_shards
    assert html.read_text().startswith("<!doctype html>") and pdf.read_bytes().startswith(b"%PDF-")
    nothing = subprocess.run(command[:-2], capture_output=True, text=True, timeout=300, check=False)
    assert nothing.returncode == 2 and "expected --html FILE" in nothing.stderr
