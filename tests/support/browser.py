"""A real browser: Debian's chromium without a window, driven by playwright, which also checks pages with axe-core.

    with browsing() as browser, browser.open(url, width=400, is_dark=True) as page:
        page.tab.get_by_role("heading", name="Global LLM Status").wait_for()
        page.check()  # No error in the console, no request to elsewhere, nothing that axe-core finds.

Where chromium is not installed, its package and the libraries it needs are unpacked below a cache folder, as
`tests.support.cdn_servers` does for nginx. The browser resolves no name and reaches 127.0.0.1 only: each request to
elsewhere fails, and is noted. playwright's loop runs while `browsing` lasts: no asyncio.run in the same thread then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.cdn_servers import unpacked

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
_STARTS_WITHIN_MS = 240_000
_WAITS_MS = 240_000
_AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_OWN_SCHEMES = ("data", "blob", "about")


@dataclass(frozen=True, slots=True)
class WatchedPage:
    """A tab, and what went wrong in it so far."""

    tab: Any
    """playwright's `Page`."""
    console: list[str] = field(default_factory=list)
    """Errors and warnings in the console, breaches of the Content-Security-Policy among them, and uncaught errors."""
    foreign: list[str] = field(default_factory=list)
    """Requests to any other place than the page came from."""

    def wait_for(self, selector: str, *, timeout_s: float = _WAITS_MS / 1000) -> None:
        """Waits until an element is in the document. A policy without eval forbids playwright's wait_for_function."""
        self.tab.locator(selector).first.wait_for(state="attached", timeout=1000 * timeout_s)

    def breaches(self, *, exclude: tuple[str, ...] = ()) -> list[str]:
        """What axe-core finds: its rule and the elements. ``exclude``: CSS selectors of what is not looked at."""
        from axe_playwright_python.sync_playwright import Axe

        context = {"exclude": [[selector] for selector in exclude]} if exclude else None
        found = Axe().run(self.tab, context, {"runOnly": {"type": "tag", "values": _AXE_TAGS}}).response
        return [
            f"{rule['id']}: {rule['help']}: {[node['html'][:200] for node in rule['nodes'][:5]]} "
            f"{rule['nodes'][0]['failureSummary'][:300]}"
            for rule in found["violations"]
        ]

    def check(self, *, exclude: tuple[str, ...] = ()) -> None:
        """Fails for anything in the console, any foreign request, any breach of accessibility, or a wide page."""
        assert self.console == []
        assert self.foreign == []
        assert self.breaches(exclude=exclude) == []
        assert self.is_within_width(), "the page is wider than its window"

    def is_within_width(self) -> bool:
        return bool(self.tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def screenshot(self, path: Path, *, full: bool = True) -> Path:
        self.tab.screenshot(path=str(path), full_page=full, animations="disabled")
        return path


@dataclass(frozen=True, slots=True)
class Browser:
    started: Any
    """playwright's `Browser`."""

    @contextmanager
    def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        is_dark: bool = False,
        headers: dict[str, str] | None = None,
        wait_until: str = "load",
    ) -> Iterator[WatchedPage]:
        """A page in a profile of its own; ``url`` may be a file's."""
        context = self.started.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if is_dark else "light",
            reduced_motion="reduce",
            extra_http_headers=headers,
            # axe-core comes in by evaluation, which the protocol allows under any policy; pages keep theirs.
            bypass_csp=False,
        )
        context.set_default_timeout(_WAITS_MS)
        watched = WatchedPage(context.new_page())
        _watch(watched, url)
        try:
            watched.tab.goto(url, wait_until=wait_until)
            yield watched
        finally:
            context.close()


def _watch(page: WatchedPage, url: str) -> None:
    home = urlsplit(url)

    def asked(request: Any) -> None:
        there = urlsplit(request.url)
        if there.scheme not in _OWN_SCHEMES and (there.scheme, there.netloc) != (home.scheme, home.netloc):
            page.foreign.append(request.url[:500])

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            page.console.append(f"{message.type}: {message.text[:1_000]}")

    page.tab.on("request", asked)
    page.tab.on("console", said)
    page.tab.on("pageerror", lambda error: page.console.append(f"uncaught: {str(error)[:1_000]}"))


@contextmanager
def browsing() -> Iterator[Browser]:
    """Starts a browser with an empty profile, and ends it."""
    program, environment = _chromium()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        # It writes into $HOME and $XDG_CONFIG_HOME beside its profile.
        own = {**os.environ, **environment, "HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
        with playwright.sync_playwright() as driver:
            started = driver.chromium.launch(
                executable_path=str(program), args=_FLAGS, headless=True, timeout=_STARTS_WITHIN_MS, env=own
            )
            try:
                yield Browser(started)
            finally:
                started.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser for one test; import it into a conftest.py."""
    with browsing() as started:
        yield started


def _chromium() -> tuple[Path, dict[str, str]]:
    """The browser's program and what it needs in its environment."""
    if installed := shutil.which("chromium"):
        return Path(installed), {}
    tree = unpacked("chromium", "chromium-common", "fontconfig-config", "fonts-dejavu-core", with_dependencies=True)
    fonts = tree.root / "fonts.conf"
    if not fonts.is_file():
        folders = f"<dir>{tree.root}/usr/share/fonts</dir><cachedir prefix='xdg'>fontconfig</cachedir>"
        fonts.write_text(f"<?xml version='1.0'?><fontconfig>{folders}</fontconfig>")
    return tree.root / "usr/lib/chromium/chromium", {**tree.environment(), "FONTCONFIG_FILE": str(fonts)}
