"""A Hub on 127.0.0.1: one dataset repository, a local folder, as the real `huggingface_hub` client asks for it.

Files are at a CDN that is another origin (a second port), at signed addresses that can expire. Faults come from a
scripted list or a seeded schedule; every request is logged with the bytes that left.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True, slots=True)
class Fault:
    status: int = 0
    """Answer this status and nothing else (0: answer properly)."""
    headers: tuple[tuple[str, str], ...] = ()
    cut_after: int | None = None
    """Close the connection after this many bytes of the body."""
    delay_s: float = 0.0
    """Wait before answering."""
    ignore_range: bool = False
    """Send the whole file with status 200."""


@dataclass(frozen=True, slots=True)
class Request:
    place: str
    """``api``, ``resolve`` or ``cdn``."""
    method: str
    path: str
    range: str
    status: int
    sent_bytes: int
    authorized: bool


class SeededFaults:
    """A fault now and then, the same ones for the same seed and order of requests."""

    KINDS = (
        Fault(status=429, headers=(("Retry-After", "0"),)),
        Fault(status=500),
        Fault(status=503),
        Fault(cut_after=1000),
        Fault(cut_after=0),
    )

    def __init__(self, seed: int, probability: float, kinds: tuple[Fault, ...] = KINDS) -> None:
        self._random = random.Random(seed)
        self._probability = probability
        self._kinds = kinds

    def next(self) -> Fault | None:
        return self._random.choice(self._kinds) if self._random.random() < self._probability else None


@dataclass
class HubServer:
    """The served repository, its faults and its log; thread-safe."""

    folder: Path
    repo: str = "someone/texts"
    commit: str = COMMIT
    page_size: int = 1000
    gated_token: str = ""
    """Where set, requests without this token are refused as for a gated dataset."""
    commits: dict[str, Path] = field(default_factory=dict)
    """Older commits and the folders they hold."""
    seeded: SeededFaults | None = None
    endpoint: str = ""
    cdn: str = ""
    log: list[Request] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    """Places of the requests that came, answered or not."""
    _scripted: deque[tuple[str, Fault]] = field(default_factory=deque)
    _signature: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(self, place: str, *faults: Fault) -> None:
        with self._lock:
            self._scripted.extend((place, fault) for fault in faults)

    def clear_faults(self) -> None:
        with self._lock:
            self._scripted.clear()

    def expire_addresses(self) -> None:
        """Every signed CDN address handed out so far answers 403."""
        with self._lock:
            self._signature += 1

    def requests(self, place: str) -> list[Request]:
        with self._lock:
            return [request for request in self.log if request.place == place]

    def sent_bytes(self, place: str) -> int:
        return sum(request.sent_bytes for request in self.requests(place))

    def fault(self, place: str) -> Fault | None:
        with self._lock:
            for number, (at, fault) in enumerate(self._scripted):
                if at == place:
                    del self._scripted[number]
                    return fault
            return self.seeded.next() if self.seeded is not None else None

    def record(self, request: Request) -> None:
        with self._lock:
            self.log.append(request)

    @property
    def signature(self) -> str:
        with self._lock:
            return f"s{self._signature}"

    def tree(self, revision: str) -> Path | None:
        return self.folder if revision in ("main", self.commit) else self.commits.get(revision)

    def sha(self, revision: str) -> str:
        return self.commit if revision == "main" else revision


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer
    place: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.place = "cdn" if url.path.startswith("/cdn/") else "resolve" if "/resolve/" in url.path else "api"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.begun.append(self.place)
        self.active = self.hub.fault(self.place) or Fault()
        if self.active.delay_s:
            time.sleep(self.active.delay_s)
        if self.active.status:
            self._send(self.active.status, b"injected fault", dict(self.active.headers))
        elif self.hub.gated_token and self.place != "cdn" and not self._authorized():
            self._error(403, "GatedRepo", "Access to this dataset is restricted")
        elif self.place == "cdn":
            self._cdn(url.path, parse_qs(url.query))
        elif self.place == "resolve":
            self._resolve(url.path)
        else:
            self._api(url.path, parse_qs(url.query), body)

    do_HEAD = do_POST = do_GET

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.gated_token}"

    def _api(self, path: str, query: Mapping[str, list[str]], body: bytes) -> None:
        prefix = f"/api/datasets/{self.hub.repo}"
        if not (path == prefix or path.startswith(prefix + "/")):
            self._error(404, "RepoNotFound", "Repository not found")
            return
        verb, _, rest = path[len(prefix) :].lstrip("/").partition("/")
        revision, _, inner = rest.partition("/")
        revision = unquote(revision) or "main"
        folder = self.hub.tree(revision)
        if folder is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif verb in ("", "revision"):
            self._info(revision, folder)
        elif verb == "tree":
            self._tree(folder, unquote(inner), query)
        elif verb == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            self._json([_entry(folder, folder / name) for name in asked if name and (folder / name).exists()])
        else:
            self._error(404, "EntryNotFound", "Entry not found")

    def _info(self, revision: str, folder: Path) -> None:
        siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in _files(folder)]
        info = {"_id": "1", "id": self.hub.repo, "sha": self.hub.sha(revision), "private": False, "gated": False}
        self._json({**info, "disabled": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings})

    def _tree(self, folder: Path, inner: str, query: Mapping[str, list[str]]) -> None:
        top = folder / inner
        if not top.is_dir():
            self._error(404, "EntryNotFound", f"{inner} does not exist")
            return
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = [_entry(folder, path) for path in sorted(top.rglob("*") if recursive else top.iterdir())]
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.hub.page_size
        headers = {}
        if end < len(entries):
            following = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive={str(recursive).lower()}&cursor={end}"
            headers["Link"] = f'<{following}>; rel="next"'
        self._json(entries[start:end], headers)

    def _resolve(self, path: str) -> None:
        found = re.fullmatch(rf"/datasets/{re.escape(self.hub.repo)}/resolve/([^/]+)/(.+)", path)
        if found is None:
            self._error(404, "RepoNotFound", "Repository not found")
            return
        revision, name = unquote(found[1]), unquote(found[2])
        folder = self.hub.tree(revision)
        if folder is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif not (folder / name).is_file():
            self._error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": self.hub.sha(revision)})
        else:
            data = (folder / name).read_bytes()
            address = f"{self.hub.cdn}/cdn/{self.hub.sha(revision)}/{quote(name)}?signature={self.hub.signature}"
            headers = {
                "X-Repo-Commit": self.hub.sha(revision),
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "Location": address,
            }
            self._send(302, b"", headers)

    def _cdn(self, path: str, query: Mapping[str, list[str]]) -> None:
        if query.get("signature") != [self.hub.signature]:
            self._send(403, b"<Error><Code>AccessDenied</Code></Error>", {})
            return
        _, _, commit, name = path.split("/", 3)
        folder = self.hub.tree(commit)
        data = (folder / unquote(name)).read_bytes() if folder is not None else b""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if wanted is None or self.active.ignore_range:
            self._send(200, data, headers)
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        if start > end:
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        self._send(206, data[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"})

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        known = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        self._send(status, json.dumps({"error": message}).encode(), known)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        cut = self.active.cut_after
        sent = body if self.command != "HEAD" else b""
        if cut is not None:
            sent = sent[:cut]
        # Logged before it leaves, so that a client that has its answer finds it in the log.
        authorized = "Authorization" in self.headers
        wanted = self.headers.get("Range", "")
        self.hub.record(Request(self.place, self.command, self.path, wanted, status, len(sent), authorized))
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
        if cut is not None:
            self.close_connection = True


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
    data = path.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    entry = {"type": "file", "oid": oid, "size": len(data), "path": name}
    return entry if path.suffix == ".md" else {**entry, "lfs": large}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # A client that hangs up in the middle of an answer is what faults are for.


@contextmanager
def hub_server(folder: Path, **options: object) -> Iterator[HubServer]:
    hub = HubServer(folder, **options)  # type: ignore[arg-type]
    servers = [_Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) for _ in range(2)]
    hub.endpoint, hub.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(timeout=10)
            server.server_close()
