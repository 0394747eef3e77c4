"""Reading through real caches, nginx and varnish before ``genesis serve``, over connections that are cut."""

from __future__ import annotations

import random
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from genesis.store import CachePolicy, FolderStore
from genesis.store.http import HttpStore
from tests.genesis.store.conftest import QUICK
from tests.support.cdn_servers import nginx_cdn, varnish_cdn
from tests.support.fault_proxy import FaultProxy, Reply, Request

BODY = random.Random(12).randbytes(3_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("cdn", [nginx_cdn, varnish_cdn])
def test_a_cache_between(cdn, web_server, web_folder):
    """Cut answers are gone on with by ranges out of the cache; an unchanged object is a 304 of the cache's own."""
    FolderStore(web_folder).put("shard_800.pt", BODY, cache=CachePolicy.IMMUTABLE)
    requests: list[Request] = []

    def cut(request: Request, reply: Reply) -> Reply:
        requests.append(request)
        return replace(reply, cut_after=1_000_000)

    with cdn(web_server.endpoint) as url:
        port = urlsplit(url).port
        assert port is not None
        with FaultProxy(port, alter=cut) as proxy:
            store = HttpStore(f"http://127.0.0.1:{proxy.port}", policy=QUICK)
            found = store.get("shard_800.pt", max_bytes=len(BODY))
            assert found.body == BODY
            assert store.get_if_changed("shard_800.pt", found.etag) is None
            assert store.received_bytes == len(BODY)
            store.close()
    assert [request.header("range") for request in requests] == [None, "bytes=1000000-", "bytes=2000000-", None]
