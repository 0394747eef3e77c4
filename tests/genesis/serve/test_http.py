"""What comes over the wire: a server process, real sockets, and real CDNs before it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from genesis.store import CachePolicy, FolderStore
from tests.genesis.serve.conftest import LARGE_BYTES, PRIVATE, SECRET, make_store
from tests.support.cdn_servers import CdnClock, nginx_cdn
from tests.support.serve_process import ServeProcess, genesis_serve, request

LARGE = "/shard_7.pt"
SHORT = {"manifest.json", "tokenizer.json", "hf", "tiktoken"}


@pytest.mark.slow
def test_every_object_with_its_headers_and_an_etag_of_its_own(server, store_folder, contents):
    for key, body in contents.items():
        found = server.get(f"/{key}")
        assert found.status_code == 200, key
        assert found.content == body
        expected = CachePolicy.SHORT if key.split("/")[0] in SHORT else CachePolicy.IMMUTABLE
        assert found.headers["cache-control"] == expected.value, key
        assert found.headers["content-length"] == str(len(body))
        assert found.headers["accept-ranges"] == "bytes"
        assert found.headers["etag"].startswith('"')
        modified = parsedate_to_datetime(found.headers["last-modified"]).timestamp()
        assert modified == int((store_folder / key).stat().st_mtime)
        assert found.headers["content-type"].startswith(
            "application/json" if key.endswith(".json") else "application/oct"
        )
        assert "content-encoding" not in found.headers
    tags = {key: server.request("HEAD", f"/{key}").headers["etag"] for key in contents}
    assert len(set(tags.values())) == len(tags)
    assert {key: server.request("HEAD", f"/{key}").headers["etag"] for key in contents} == tags


def test_head_is_get_without_the_body(server, contents):
    for key in contents:
        got, asked = server.get(f"/{key}"), server.request("HEAD", f"/{key}")
        assert asked.content == b""
        assert _lasting(asked) == _lasting(got)
        assert asked.status_code == got.status_code
    found = server.request("HEAD", LARGE, range="bytes=0-9")
    assert (found.status_code, found.headers["content-length"]) == (200, str(LARGE_BYTES))


def _lasting(response):
    return {name: value for name, value in response.headers.items() if name != "date"}


NOT_PUBLIC: dict[str, list[bytes]] = {
    "private": [f"/{name}".encode() for name in PRIVATE],
    "links": [b"/shard_8.pt", b"/shard_9.pt", b"/tiktoken/escape.json"],
    "a folder, a pipe that must not be waited for, nothing": [
        b"/shard_10.pt",
        b"/shard_11.pt",
        b"/shard_12.pt",
        b"/index/",
    ],
    "absolute": [b"//manifest.json", b"//etc/passwd", b"/etc/passwd", b"http://localhost/checkpoints.json"],
    "other forms": [b"file:///etc/passwd", b"*", b"\\..\\checkpoints.json", b"/manifest.json/", b"/./checkpoints.json"],
    "climbing": [b"/../checkpoints.json", b"/../store-outside/shard_8.pt", b"/index/../checkpoints.json"],
    "climbing out": [b"/index/../../store-outside/shard_8.pt", b"/" + b"../" * 3_000 + b"etc/passwd"],
    "escaped": [b"/%2e%2e/store-outside/shard_8.pt", b"/%2e%2e%2fstore-outside%2fshard_8.pt", b"/%63heckpoints.json"],
    "twice": [b"/..%2fstore-outside/shard_8.pt", b"/%252e%252e/checkpoints.json", b"/checkpoints.json%20"],
    "half": [b"/manifest.json%00", b"/manifest.json%0d%0aX-Injected:%201", b"/%ff%fe", b"/%", b"/%zz"],
    "near": [b"/checkpoints.json?x=/manifest.json", b"/CHECKPOINTS.JSON", b"/" + b"a" * 10_000],
}


@pytest.mark.parametrize("path", [path for paths in NOT_PUBLIC.values() for path in paths])
def test_nothing_else_gets_out(server, path):
    with server.connect() as client:
        status, headers, body = client.ask(path).answer()
    assert status == 404
    assert SECRET not in body
    assert headers["cache-control"] == "no-store"
    assert "x-injected" not in headers


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /manifest.json\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # A TLS client.
        b"GET /manifest.json HTTP/1.1\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server, request_bytes):
    with server.connect() as client:
        client.send(request_bytes)
        try:
            status, _ = client.head()
        except ConnectionError:
            status = 400  # Closed while the rest of it was still coming.
        assert status == 400
    assert server.get("/healthz").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"])
def test_only_reading(server, contents, method):
    found = server.request(method, "/manifest.json")
    assert (found.status_code, found.headers["allow"]) == (405, "GET, HEAD")
    assert server.get("/manifest.json").content == contents["manifest.json"]


def test_conditions(server, contents):
    first = server.get("/manifest.json")
    for condition in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = server.get("/manifest.json", if_none_match=condition)
        assert (again.status_code, again.content) == (304, b"")
        for name in ("etag", "cache-control", "last-modified"):
            assert again.headers[name] == first.headers[name]
    assert server.request("HEAD", "/manifest.json", if_none_match=first.headers["etag"]).status_code == 304
    assert server.get("/manifest.json?no=cache", if_none_match='"x"').content == contents["manifest.json"]
    first = server.request("HEAD", LARGE).headers
    assert server.get(LARGE, if_modified_since=first["last-modified"]).status_code == 304
    assert server.get(LARGE, if_match='"x"').status_code == 412
    assert server.get(LARGE, range="bytes=0-1", if_none_match=first["etag"]).status_code == 304
    etag = server.get("/manifest.json").headers["etag"].encode()
    with server.connect() as client:
        assert client.ask(b"/manifest.json", b'If-None-Match: "x"', b"If-None-Match: " + etag).answer()[0] == 304
        status, _, body = client.ask(LARGE.encode(), b"Range: bytes=0-1", b"Range: bytes=4-5").answer()
        assert (status, len(body)) == (200, LARGE_BYTES)


def test_ranges(server, contents):
    whole = contents["shard_7.pt"]
    etag = server.request("HEAD", LARGE).headers["etag"]
    for header, first, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=262143-262144", 262_143, 262_145),
        (f"bytes={LARGE_BYTES - 1}-", LARGE_BYTES - 1, LARGE_BYTES),
        ("bytes=-5", LARGE_BYTES - 5, LARGE_BYTES),
    ):
        found = server.get(LARGE, range=header, if_range=etag)
        assert (found.status_code, found.content) == (206, whole[first:end])
        assert found.headers["content-range"] == f"bytes {first}-{end - 1}/{len(whole)}"
        assert found.headers["content-length"] == str(end - first)
        assert found.headers["cache-control"] == CachePolicy.IMMUTABLE.value
    for path, header in ((LARGE, f"bytes={LARGE_BYTES}-"), ("/shard_1000.pt", "bytes=0-")):
        found = server.get(path, range=header)
        assert found.status_code == 416
        assert found.headers["content-range"] == f"bytes */{len(contents[path[1:]])}"
        assert found.headers["cache-control"] == "no-store"
    for header, other in (
        ("bytes=5-2", etag),
        ("bytes=0-1,3-4", etag),
        ("bytes=9-19", '"x"'),
        ("bytes=9999999-", '"x"'),
    ):
        found = server.get(LARGE, range=header, if_range=other)
        assert (found.status_code, found.content == whole) == (200, True)


def test_requests_on_one_connection(server, contents):
    keys = sorted(contents)
    with server.connect() as client:
        client.send(b"".join(f"GET /{key} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for key in keys))
        assert [client.answer()[2] for _ in keys] == [contents[key] for key in keys]


def test_connections_that_end(server, contents):
    with server.connect() as client:
        status, headers, body = client.ask(b"/manifest.json", b"Content-Length: 1000000").answer()
        assert (status, headers["connection"], body) == (200, "close", contents["manifest.json"])
        assert client.is_closed()
    with server.connect() as client:
        client.ask(LARGE.encode())
        client.socket.shutdown(1)
        assert client.answer()[2] == contents["shard_7.pt"]
        assert client.is_closed()
    with server.connect() as client:
        client.send(b"GET /manifest.json HTTP/1.0\r\n\r\n")
        assert client.answer()[2] == contents["manifest.json"]
        assert client.is_closed()


@pytest.mark.slow
def test_an_object_replaced_while_it_is_sent_is_sent_as_it_was(tmp_path, contents):
    old, new = b"o" * 30_000_000, b"n" * 30_000_000
    store = make_store(tmp_path / "store", contents | {"shard_0.pt": old})
    with genesis_serve(tmp_path / "store") as server, server.connect(receive_buffer_bytes=65_536) as client:
        _, headers = client.ask(b"/shard_0.pt").head()
        begun = client.read(100_000)
        store.put("shard_0.pt", new, cache=CachePolicy.IMMUTABLE)
        assert begun + client.read(len(old) - len(begun)) == old
        status, changed, body = client.ask(
            b"/shard_0.pt", b"Range: bytes=0-9", b"If-Range: " + headers["etag"].encode()
        ).answer()
        assert (status, body == new) == (200, True)
        assert changed["etag"] != headers["etag"]
        assert server.get("/shard_0.pt", if_none_match=headers["etag"]).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("change", ["overwritten", "truncated"])
def test_an_object_changed_in_place_is_cut_short(tmp_path, contents, change):
    old = b"o" * 30_000_000
    make_store(tmp_path / "store", contents | {"shard_0.pt": old})
    with genesis_serve(tmp_path / "store") as server, server.connect(receive_buffer_bytes=65_536) as client:
        client.ask(b"/shard_0.pt").head()
        begun = client.read(100_000)
        with (tmp_path / "store" / "shard_0.pt").open("r+b") as file:
            if change == "truncated":
                file.truncate(1_000)
            else:
                file.write(b"n" * len(old))
        rest = client.read(len(old) - len(begun))
        assert len(begun) + len(rest) < len(old)
        assert set(begun + rest) == {ord("o")}
        assert server.metric("genesis_serve_cut_connections_total", reason="changed") == 1
    assert any("was written into" in line for line in server.errors)
    assert not any("Traceback" in line for line in server.errors)


@dataclass
class Front:
    """A CDN, and what is behind it."""

    url: str
    origin: ServeProcess
    store: FolderStore

    def get(self, key: str, **headers: str) -> httpx.Response:
        return request("GET", f"{self.url}/{key}", **headers)

    def asked(self, kind: str, status: int = 200) -> float:
        """How many GETs of that kind came through to the origin."""
        return self.origin.metric("genesis_serve_requests_total", method="GET", status=str(status), kind=kind)


@pytest.fixture
def front(tmp_path: Path, contents) -> Iterator[Front]:
    store = make_store(tmp_path / "store", contents)
    with genesis_serve(tmp_path / "store") as origin, nginx_cdn(origin.url) as url:
        yield Front(url, origin, store)


@pytest.mark.slow
def test_a_cdn_before_it(front, contents):
    """One server start for all of it: what a CDN must do with what the origin says."""
    for key, body in contents.items():
        first, second = front.get(key), front.get(key)
        assert first.content == second.content == body, key
        assert (first.headers["x-cache-status"], second.headers["x-cache-status"]) == ("MISS", "HIT"), key
        assert second.headers["etag"] == first.headers["etag"] == front.origin.get(f"/{key}").headers["etag"]
    _ranges(front, contents)
    etag = front.get("manifest.json").headers["etag"]
    before = front.asked("manifest")
    again = front.get("manifest.json", if_none_match=etag)
    assert (again.status_code, again.content, again.headers["x-cache-status"]) == (304, b"", "HIT")
    assert front.asked("manifest") == before
    for key in ("checkpoints.json", ".genesis.lock", "%2e%2e/store-outside/shard_8.pt", "shard_9.pt"):
        found = front.get(key)
        assert found.status_code in (400, 404)
        assert b"lease" not in found.content
    assert front.get("shard_50.pt").status_code == 404
    front.store.put("shard_50.pt", b"now it is there", cache=CachePolicy.IMMUTABLE)
    assert front.get("shard_50.pt").content == b"now it is there"
    # Of eight that ask at the same time for what is not cached yet, one goes through.
    body = bytes(range(256)) * 40_000
    front.store.put("shard_60.pt", body, cache=CachePolicy.IMMUTABLE)
    before = front.asked("shard")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: front.get("shard_60.pt").content == body, range(8)))
    assert front.asked("shard") == before + 1


def _ranges(front, contents):
    for key in ("shard_7.pt", "packed/shard_7.zst"):
        part = front.get(key, range="bytes=1000-1999")
        assert (part.status_code, part.content) == (206, contents[key][1000:2000])
        assert part.headers["x-cache-status"] == "HIT"
        assert front.get(key, range="bytes=999999999-").status_code == 416
    etag = front.get("shard_7.pt", range="bytes=0-0").headers["etag"]
    resumed = front.get("shard_7.pt", range="bytes=2000000-", if_range=etag)
    assert (resumed.status_code, resumed.content) == (206, contents["shard_7.pt"][2_000_000:])
    other = front.get("shard_7.pt", range="bytes=2000000-", if_range='"x"')
    assert (other.status_code, other.content) == (200, contents["shard_7.pt"])


@pytest.mark.slow
def test_a_manifest_is_asked_for_again_when_its_time_is_up(tmp_path, contents):
    store = make_store(tmp_path / "store", contents)
    clock = CdnClock(tmp_path)
    with genesis_serve(tmp_path / "store") as origin, nginx_cdn(origin.url, clock=clock) as url:
        front = Front(url, origin, store)
        old = contents["manifest.json"]
        assert [_state(front.get("manifest.json"), old) for _ in range(2)] == ["MISS", "HIT"]
        clock.advance(50)
        assert _state(front.get("manifest.json"), old) == "HIT"
        clock.advance(11)
        assert _state(front.get("manifest.json"), old) == "REVALIDATED"
        assert (front.asked("manifest", 200), front.asked("manifest", 304)) == (1, 1)
        assert _state(front.get("manifest.json"), old) == "HIT"
        new = old.replace(b'"sequence":3', b'"sequence":4')
        store.put("manifest.json", new, cache=CachePolicy.SHORT)
        assert _state(front.get("manifest.json"), old) == "HIT"
        clock.advance(61)
        assert _state(front.get("manifest.json"), new) == "EXPIRED"
        # What never changes does not expire.
        front.get("shard_7.pt")
        clock.advance(30 * 86_400)
        assert _state(front.get("shard_7.pt"), contents["shard_7.pt"]) == "HIT"
        # The operator's page stays inside.
        assert front.get("metrics").status_code == 404
        assert front.get("healthz").status_code == 200


def _state(response: httpx.Response, body: bytes) -> str:
    assert (response.status_code, response.content) == (200, body)
    return response.headers["x-cache-status"]
