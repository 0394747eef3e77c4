"""Real CDNs before the server: nginx with the documented configuration, varnish with its built-in rules."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from genesis.store import CachePolicy, FolderStore
from tests.genesis.serve.conftest import make_store
from tests.support.cdn_servers import CdnClock, nginx_cdn, varnish_cdn
from tests.support.serve_process import ServeProcess, genesis_serve, request


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


@pytest.fixture(params=[nginx_cdn, varnish_cdn], ids=["nginx", "varnish"])
def front(request, tmp_path: Path, contents) -> Iterator[Front]:
    store = make_store(tmp_path / "store", contents)
    with genesis_serve(tmp_path / "store") as origin, request.param(origin.url) as url:
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
    _not_modified(front)
    _private(front)
    _published_later(front)
    _many_at_once(front)


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


def _not_modified(front):
    etag = front.get("manifest.json").headers["etag"]
    before = front.asked("manifest")
    again = front.get("manifest.json", if_none_match=etag)
    assert (again.status_code, again.content, again.headers["x-cache-status"]) == (304, b"", "HIT")
    assert front.asked("manifest") == before


def _private(front):
    for key in ("checkpoints.json", ".genesis.lock", "%2e%2e/store-outside/shard_8.pt", "shard_9.pt"):
        found = front.get(key)
        assert found.status_code in (400, 404)
        assert b"lease" not in found.content


def _published_later(front):
    assert front.get("shard_50.pt").status_code == 404
    front.store.put("shard_50.pt", b"now it is there", cache=CachePolicy.IMMUTABLE)
    assert front.get("shard_50.pt").content == b"now it is there"


def _many_at_once(front):
    """Of eight that ask at the same time for what is not cached yet, one goes through."""
    body = bytes(range(256)) * 40_000
    front.store.put("shard_60.pt", body, cache=CachePolicy.IMMUTABLE)
    before = front.asked("shard")
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: front.get("shard_60.pt").content == body, range(8)))
    assert front.asked("shard") == before + 1


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
