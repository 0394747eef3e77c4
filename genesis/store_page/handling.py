"""The page's requests inside ``genesis serve``: what is answered, in which threads, and how much at once.

The work is done in two threads of its own, so objects are served as if there were no page. Of one address at most eight
requests wait, of all at most sixty-four; a further one is told 503. Nothing is read before somebody asks for the page:
an origin that nobody looks at costs what it did. Then one more thread reads the index, and yields between segments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

from starlette.responses import PlainTextResponse, Response

from genesis.errors import GenesisError, ObjectNotFoundError, StoreError, TokenizerError, UsageError
from genesis.pages.page import SECURITY_HEADERS
from genesis.snapshot import StoreEmptyError
from genesis.store import FolderStore
from genesis.store_page.page import STORE_PAGE
from genesis.store_page.routes import BY_PATH, Route, openapi, parse_query
from genesis.store_page.service import StoreView
from genesis.store_page.shard_reading import FolderShards
from genesis.store_page.shard_table import ShardTable
from genesis.verification import VerifyReport
from manifests import ContractError, SourcesFile

logger = logging.getLogger(__name__)

_THREADS: Final = 2
_MAX_WAITING: Final = 64
_MAX_WAITING_OF_HOST: Final = 8
_MAX_QUERY_BYTES: Final = 4_096
_MAX_PATH_BYTES: Final = 256
_ABSOLUTE_FORM: Final = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_PAUSE_S: Final = 0.005
"""Between two segments of the index, for whoever waits for the interpreter."""
_LOOK_EVERY_S: Final = 0.5

_ANSWERED: Final = {**SECURITY_HEADERS, "cache-control": "no-store"}
_RETRY: Final = {**_ANSWERED, "retry-after": "2"}


class StorePageHandler:
    """Answers the page's requests; see `genesis.serve.app.PageHandler`."""

    def __init__(self, view: StoreView, root: Path) -> None:
        self._view = view
        self._root = str(root)
        self._waiting: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="genesis-page")
        self._indexing: threading.Thread | None = None
        self._closing = threading.Event()

    def kind_of(self, raw_path: bytes) -> str | None:
        """The label of a request for the page: ``page`` or ``api``; None: it is for something else."""
        path = _path_of(raw_path)
        if path is None:
            return None
        if path in ("/", "/index.html") or path.startswith("/static/"):
            return "page"
        return "api" if path in BY_PATH or path == "/openapi.json" else None

    async def answer(self, raw_path: bytes, query: bytes, headers: Mapping[str, str], host: str) -> Response:
        """The answer to a GET or HEAD for which `kind_of` gave a label.

        Args:
            raw_path: of the request.
            query: of the request, still escaped.
            headers: of the request, by lower-case name.
            host: the client's address.
        """
        path = _path_of(raw_path) or ""
        if path == "/openapi.json":
            return _json(self._openapi)
        route = BY_PATH.get(path)
        if route is None:
            name = "" if path == "/index.html" else path.removeprefix("/")
            return STORE_PAGE.answer(name, headers) or _refusal(404, "no such file of the page")
        if len(query) > _MAX_QUERY_BYTES:
            return _refusal(400, f"expected a query of at most {_MAX_QUERY_BYTES} bytes")
        if self._waiting[host] >= _MAX_WAITING_OF_HOST or self._waiting.total() >= _MAX_WAITING:
            return _refusal(503, "too many requests at once; try again", _RETRY)
        self._waiting[host] += 1
        try:
            self._start_indexing()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._work, route, query.decode("latin-1"))
        finally:
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]

    def close(self) -> None:
        """Ends the threads; what they are doing is finished first."""
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._indexing is not None:
            self._indexing.join()

    def _work(self, route: Route, query: str) -> Response:
        try:
            found = route.work(self._view, parse_query(route, query))
        except UsageError as error:
            return _refusal(400, self._public(error))
        except (StoreEmptyError, ObjectNotFoundError) as error:
            return _refusal(404, self._public(error))
        except StoreError as error:
            return _refusal(503, self._public(error), _RETRY)
        except (ContractError, TokenizerError) as error:
            return _refusal(409, self._public(error))
        except GenesisError as error:
            return _refusal(500, self._public(error))
        return _json(found.model_dump_json().encode())

    def _public(self, error: Exception) -> str:
        """What went wrong, without where the store's folder is."""
        return " ".join(str(error).split()).replace(f"{self._root}/", "").replace(self._root, "the store")[:1_000]

    @cached_property
    def _openapi(self) -> bytes:
        return json.dumps(openapi()).encode()

    def _start_indexing(self) -> None:
        if self._indexing is None:
            self._indexing = threading.Thread(target=self._index, name="genesis-page-index", daemon=True)
            self._indexing.start()

    def _index(self) -> None:
        """Reads what of the index is new, until `close`; a store that cannot be read now is tried again."""
        while not self._closing.is_set():
            try:
                has_read = self._view.read_index()
            except Exception:
                logger.exception("the page's index cannot be read; the page shows what was read so far")
                return
            self._closing.wait(_PAUSE_S if has_read else _LOOK_EVERY_S)


def store_page(folder: Path, sources: SourcesFile, report: VerifyReport | None = None) -> StorePageHandler:
    """The page of a folder.

    Args:
        folder: the store's.
        sources: gives the targets.
        report: of ``genesis verify``, whose findings are shown.

    Raises:
        UsageError: the report is not of this store.
    """
    table = ShardTable()
    view = StoreView(FolderStore(folder), folder.name, sources, table, FolderShards(folder, table.note_check))
    if report is not None:
        view.give_report(report)
    return StorePageHandler(view, folder)


def _path_of(raw_path: bytes) -> str | None:
    absolute = _ABSOLUTE_FORM.match(raw_path)
    raw_path = raw_path[absolute.end() :] if absolute else raw_path
    if len(raw_path) > _MAX_PATH_BYTES:
        return None
    try:
        return unquote_to_bytes(raw_path).decode("ascii")
    except UnicodeDecodeError:
        return None


def _json(body: bytes) -> Response:
    return Response(body, headers={**_ANSWERED, "content-type": "application/json"})


def _refusal(status: int, reason: str, headers: Mapping[str, str] = _ANSWERED) -> Response:
    return PlainTextResponse(f"{reason}\n", status, dict(headers))
