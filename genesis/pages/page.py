"""A page's files and how they are sent: `Page` loads them, `Page.answer` and `page_routes` send them.

The page itself is revalidated each time. What it loads has the digest of all of it in its path
(``static/{digest}/dom.js``), may be kept for ever, and is never of two versions at once. Paths are relative, so a page
works under any prefix that a proxy puts before it.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import PurePosixPath
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from genesis.errors import GenesisError

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""What a served page may load and do."""
SECURITY_HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Of every answer that belongs to a page, its JSON included."""

HEAD_MARK: Final = "<!-- page:head -->"
"""Where a template gets its stylesheets and scripts."""
_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='4' fill='%231f5fd0'/%3E"
    "%3Cpath d='M4 11V8m4 3V4m4 7V6' stroke='%23fff' stroke-width='2' stroke-linecap='round'/%3E%3C/svg%3E"
)
_MEDIA_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_FOR_EVER: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Asset:
    """A text file that a package ships."""

    package: str
    """Such as ``genesis.pages``."""
    path: str
    """Below the package's folder, such as ``static/dom.js``."""

    @property
    def name(self) -> str:
        """The last part of the path, by which pages and modules refer to it."""
        return PurePosixPath(self.path).name

    def read(self) -> str:
        """Its text.

        Raises:
            GenesisError: the package was installed without it.
        """
        try:
            return resources.files(self.package).joinpath(self.path).read_text(encoding="utf-8")
        except (FileNotFoundError, ModuleNotFoundError):
            raise GenesisError(
                f"expected {self.path} in the package {self.package}, found no such file; install Genesis again"
            ) from None


PAGE_CSS: Final = Asset("genesis.pages", "static/page.css")
DOM_JS: Final = Asset("genesis.pages", "static/dom.js")


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        template: an HTML document with `HEAD_MARK` inside its head; it has neither inline scripts nor styles.
        stylesheets: beside page.css, in order.
        modules: beside dom.js; they import each other by ``./NAME``. The last one is the page's own.
        classic_scripts: of libraries, run before the modules.
    """

    template: Asset
    modules: tuple[Asset, ...]
    stylesheets: tuple[Asset, ...] = ()
    classic_scripts: tuple[Asset, ...] = ()

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """The text of every file but the template, by name."""
        assets = (PAGE_CSS, *self.stylesheets, *self.classic_scripts, DOM_JS, *self.modules)
        found = {asset.name: asset.read() for asset in assets}
        if len(found) != len(assets):
            raise ValueError(f"expected files of different names, found {[asset.name for asset in assets]}")
        return found

    @property
    def style_names(self) -> tuple[str, ...]:
        """Names of the stylesheets, in order."""
        return (PAGE_CSS.name, *(asset.name for asset in self.stylesheets))

    @property
    def entry(self) -> str:
        """The name of the page's own module."""
        return self.modules[-1].name

    @cached_property
    def html(self) -> bytes:
        """The document that is served."""
        folder = f"static/{self._digest}"
        lines = [f'<link rel="stylesheet" href="{folder}/{name}">' for name in self.style_names]
        lines += [f'<script defer src="{folder}/{asset.name}"></script>' for asset in self.classic_scripts]
        lines.append(f'<script type="module" src="{folder}/{self.entry}"></script>')
        return self.document("\n".join(lines)).encode()

    def document(self, head: str, title: str | None = None) -> str:
        """The template with ``head`` and the icon in its place, and another title if one is given.

        Raises:
            ValueError: the template has not exactly one place for it.
        """
        before, mark, after = self.template.read().partition(HEAD_MARK)
        if not mark or HEAD_MARK in after:
            raise ValueError(f"{self.template.path}: expected one {HEAD_MARK}")
        if title is not None:
            opening, found, rest = before.partition("<title>")
            before = f"{opening}{found}{html.escape(title)}{rest[rest.index('</title>') :]}"
        return f'{before}<link rel="icon" href="{_ICON}">\n{head}{after}'

    def answer(self, path: str, headers: Mapping[str, str]) -> Response | None:
        """What to send for a path; None if it is not the page's.

        Args:
            path: relative to the page's address, unescaped: empty for the page itself.
            headers: of a GET or HEAD, by lower-case name.
        """
        if path == "":
            return _conditional(self.html, "text/html; charset=utf-8", "no-cache", headers)
        body = self._static.get(path)
        if body is None:
            return None
        return _conditional(body, _MEDIA_TYPES[PurePosixPath(path).suffix], _FOR_EVER, headers)

    @cached_property
    def _static(self) -> Mapping[str, bytes]:
        return {f"static/{self._digest}/{name}": text.encode() for name, text in self.texts.items()}

    @cached_property
    def _digest(self) -> str:
        parts = (f"{name}\0{text}\0" for name, text in self.texts.items())
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _conditional(body: bytes, media_type: str, cache: str, headers: Mapping[str, str]) -> Response:
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    answered = {**SECURITY_HEADERS, "cache-control": cache, "etag": etag}
    given = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
    if etag in given or given == ["*"]:
        return Response(status_code=304, headers=answered)
    return Response(body, headers={**answered, "content-type": media_type})


def page_routes(page: Page) -> list[Route]:
    """Routes of an application (Starlette, FastAPI) for the page at ``/`` and its files."""

    async def answer(request: Request) -> Response:
        found = page.answer(request.url.path.removeprefix("/"), request.headers)
        return found or PlainTextResponse("no such file of the page\n", 404, SECURITY_HEADERS)

    return [Route("/", answer, methods=["GET"]), Route("/static/{path:path}", answer, methods=["GET"])]
