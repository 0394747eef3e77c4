"""The page's routes: HTML, modules and styles; its figures and curves as JSON; who may read them.

    GET /               the page         GET /api/page          `PageView`; 304 while nothing has changed
    GET /static/…       its files        GET /api/page/course   `CourseView` in a range
    POST /read-token    a form; sets the cookie of who has the token

With a token (`ApiConfig.read_token`) everything but the form and /healthz asks for it: as ``Authorization: Bearer …``,
or by the cookie that the form sets. The cookie has a digest of the token and not the token, is for this site and no
script; both are compared in constant time, and neither is logged. POST /api/shutdown keeps its own rules beside that.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import html
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Annotated, Final
from urllib.parse import parse_qs

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from genesis.pages import Asset, Page, page_routes
from genesis.pages.page import SECURITY_HEADERS
from trainer.monitor.pages.course import MAX_POINTS, Axis, CourseRange, CourseView
from trainer.monitor.pages.page_view import PageView

VIEW_PATH: Final = "/api/page"
COURSE_PATH: Final = "/api/page/course"
TOKEN_PATH: Final = "/read-token"
COOKIE: Final = "genesis_read"

CHART_SCRIPTS: Final = (
    Asset("trainer.monitor.pages", "static/before_plotly.js"),
    Asset("plotly", "package_data/plotly.min.js"),
)
"""Classic scripts, in this order; only where the extra ``page`` is installed."""
CHART_MODULES: Final = (
    Asset("trainer.monitor.pages", "static/charts.js"),
    Asset("trainer.monitor.pages", "static/swarm.js"),
    Asset("trainer.monitor.pages", "static/rounds.js"),
    Asset("trainer.monitor.pages", "static/sections.js"),
)
"""What draws, from plain data; they import dom.js and each other only."""
STYLES: Final = (Asset("trainer.monitor.pages", "static/run.css"),)

_LIBRARY_MARK: Final = b"<!-- page:library -->"
_MAX_FORM_BYTES: Final = 4_096
_MAX_TOKEN: Final = 1_024
_MAX_COURSES: Final = 32
_COURSE_FRESH_S: Final = 5.0
_OPEN_PATHS: Final = frozenset({TOKEN_PATH, "/healthz"})


def has_charts() -> bool:
    """Whether plotly is installed."""
    return find_spec("plotly") is not None


class _LivePage(Page):
    """The page with the addresses of the chart library in it, which its script loads once the figures are shown."""

    @cached_property
    def html(self) -> bytes:
        """The document that is served."""
        paths = " ".join(_library()) if has_charts() else ""
        return super().html.replace(_LIBRARY_MARK, f'<meta name="chart-library" content="{paths}">'.encode())


@lru_cache(maxsize=1)
def live_page() -> Page:
    """The page that asks its server again and again."""
    return _LivePage(
        template=Asset("trainer.monitor.pages", "static/run.html"),
        modules=(*CHART_MODULES, Asset("trainer.monitor.pages", "static/run.js")),
        stylesheets=STYLES,
    )


@lru_cache(maxsize=1)
def _library() -> dict[str, tuple[bytes, bytes]]:
    """The chart library's files as they are and compressed (0.2 s once), by their path, which names their content."""
    found = {}
    for asset in CHART_SCRIPTS:
        text = asset.read().encode()
        digest = hashlib.sha256(text).hexdigest()[:16]
        found[f"chart-library/{digest}/{asset.name}"] = (text, gzip.compress(text, 6))
    return found


def _library_file(request: Request) -> Response:
    found = _library().get(request.url.path.removeprefix("/")) if has_charts() else None
    if found is None:
        return Response("no such file of the page\n", 404, SECURITY_HEADERS, "text/plain")
    is_gzip = "gzip" in request.headers.get("accept-encoding", "")
    headers = {**SECURITY_HEADERS, "cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    headers |= {"content-encoding": "gzip"} if is_gzip else {}
    return Response(found[is_gzip], headers=headers, media_type="text/javascript")


@dataclass(slots=True)
class PageSource:
    """Where a page's figures come from; ``view`` returns None as long as there are none."""

    view: Callable[[], PageView | None]
    course: Callable[[CourseRange], CourseView]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _body: tuple[PageView, bytes, str] | None = field(default=None, init=False)
    _courses: dict[CourseRange, tuple[float, bytes]] = field(default_factory=dict, init=False)

    def body(self) -> tuple[bytes, str] | None:
        """The view as JSON and its ETag, made once a view however many ask."""
        view = self.view()
        if view is None:
            return None
        with self._lock:
            if self._body is None or self._body[0] is not view:
                body = view.model_dump_json().encode()
                self._body = (view, body, f'"{hashlib.sha256(body).hexdigest()[:24]}"')
            return self._body[1], self._body[2]

    def course_body(self, wanted: CourseRange) -> bytes:
        """A course as JSON, at most 5 s old: as many as look at once cost what one does."""
        with self._lock:
            now_s = time.monotonic()
            found = self._courses.get(wanted)
            if found is None or now_s - found[0] > _COURSE_FRESH_S:
                self._courses.pop(wanted, None)
                while len(self._courses) >= _MAX_COURSES:
                    del self._courses[next(iter(self._courses))]
                found = (now_s, self.course(wanted).model_dump_json().encode())
                self._courses[wanted] = found
            return found[1]


def add_page(app: FastAPI, source: PageSource) -> None:
    """Adds the page's routes to an application."""
    app.router.routes.extend(page_routes(live_page()))
    app.router.routes.append(Route("/chart-library/{path:path}", _library_file, methods=["GET"]))

    @app.get(
        VIEW_PATH,
        summary="What the page shows; null as long as nothing is known.",
        response_model=PageView | None,
        responses={304: {"description": "Nothing has changed."}},
    )
    def page_view(request: Request) -> Response:
        found = source.body()
        if found is None:  # No error: a browser would report one in its console each time it asks.
            return Response("null", media_type="application/json", headers=SECURITY_HEADERS)
        body, etag = found
        headers = {**SECURITY_HEADERS, "etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    @app.get(COURSE_PATH, summary="Curves in a range, at most so many points each.", response_model=CourseView)
    def page_course(
        by: Annotated[Axis, Query(description="What x is.")] = "step",
        begin: Annotated[float | None, Query(allow_inf_nan=False, description="Null: the beginning.")] = None,
        end: Annotated[float | None, Query(allow_inf_nan=False, description="Null: the end.")] = None,
        points: Annotated[int, Query(ge=10, le=MAX_POINTS)] = 600,
    ) -> Response:
        body = source.course_body(CourseRange(by=by, begin=begin, end=end, points=points))
        return Response(body, media_type="application/json", headers=SECURITY_HEADERS)


class ReadGuard:
    """Asks for the token where one is set; answers the form that takes it."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = hmac.new(self._token, b"genesis page cookie", hashlib.sha256).hexdigest().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or not self._token:
            await self._app(scope, receive, send)
            return
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        if path == TOKEN_PATH:
            answer = await self._taken(Request(scope, receive)) if method == "POST" else _form()
            await answer(scope, receive, send)
        elif path in _OPEN_PATHS or self._may_read(headers):
            await self._app(scope, receive, send)
        elif path == "/":
            await _form(401)(scope, receive, send)
        else:
            detail = "expected the token for reading, as Authorization: Bearer …, or by the form at /"
            answer = Response(f'{{"detail":"{detail}"}}', 401, SECURITY_HEADERS, "application/json")
            await answer(scope, receive, send)

    def _may_read(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Headers are read as latin-1: encoded so, they are the bytes that were sent.
        is_bearer = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return is_bearer or hmac.compare_digest(cookie.encode("latin-1", "replace"), self._cookie)

    async def _taken(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM_BYTES:
                return _form(413, "expected a token, found too much")
        try:
            given = parse_qs(body.decode("ascii"), max_num_fields=4).get("token", [""])[0]
        except ValueError:
            return _form(400, "expected a form")
        if not hmac.compare_digest(given.strip()[:_MAX_TOKEN].encode(), self._token):
            return _form(403, "that is not the token")
        answer = RedirectResponse("./", 303, SECURITY_HEADERS)
        is_https = request.url.scheme == "https"
        answer.set_cookie(
            COOKIE, self._cookie.decode(), httponly=True, samesite="strict", secure=is_https, max_age=30 * 86_400
        )
        return answer


def _form(status: int = 200, problem: str = "") -> HTMLResponse:
    said = f'<p class="message bad" role="alert">{html.escape(problem)}</p>' if problem else ""
    return HTMLResponse(_FORM.format(problem=said), status, {**SECURITY_HEADERS, "cache-control": "no-store"})


_FORM: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Token</title>
</head>
<body>
<main>
<h1>Global LLM Status</h1>
<p>This page asks for a token for reading: <code>api.read_token</code>, or <code>--token</code> of the dashboard.</p>
{problem}
<form method="post" action="read-token">
<p><label>Token <input type="password" name="token" autocomplete="current-password" required></label></p>
<p><button type="submit">Show the page</button></p>
</form>
</main>
</body>
</html>
"""
