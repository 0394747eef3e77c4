"""Whatever a network does, the batches are those of an undisturbed folder: real servers, a proxy with seeded faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loader import GenesisDataset
from tests.support.batches import digest, take
from tests.support.cdn_servers import nginx_cdn, varnish_cdn
from tests.support.fault_proxy import FAST_FAULTS, READ_FAULTS, Fault, FaultProxy
from tests.support.s3_servers import rclone_s3
from tests.support.serve_process import genesis_serve
from tests.support.token_store import TokenStore

SHARD_TOKENS = 20_000
SHARD_BYTES = 161_577
OPTIONS: dict[str, Any] = {
    "seq_len": 64,
    "batch_size": 4,
    "count": 30,
    # Two shards and no more, so that every shard is fetched again whenever its turn comes.
    "cache_bytes": 2 * SHARD_BYTES,
}
EVERYTHING = (*READ_FAULTS, Fault.BIT_FLIP, Fault.STALE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Thirty shards of 78 batches each."""
    return TokenStore.of(tmp_path_factory.mktemp("faults") / "bucket" / "store", 30, shard_tokens=SHARD_TOKENS)


@pytest.fixture(scope="module")
def undisturbed(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    dataset = GenesisDataset(store.url, "node-a", cache_dir=tmp_path_factory.mktemp("calm"), **OPTIONS)
    found: list[str] = []

    def first(count: int) -> list[str]:
        found.extend(take(dataset, count - len(found)) if count > len(found) else [])
        return found[:count]

    return first


def train(dataset: GenesisDataset, count: int) -> list[str]:
    """Asks for the newest manifest now and then, which a proxy may answer with an old one."""
    found = []
    for step, batch in enumerate(itertools.islice(dataset, count)):
        if step % 300 == 299:
            assert dataset.refresh() == 30
        found.append(digest(batch))
    return found


@contextmanager
def disturbed(port: int, faults: tuple[Fault, ...], rate: float) -> Iterator[FaultProxy]:
    with FaultProxy(port, seed=11, rate=rate, faults=faults) as proxy:
        yield proxy
        assert proxy.total_injected > 0


@pytest.mark.slow
def test_a_thousand_batches(store: TokenStore, undisturbed: Callable[[int], list[str]], tmp_path: Path) -> None:
    faults = (*FAST_FAULTS, Fault.BIT_FLIP, Fault.STALE, Fault.DRIP)
    with genesis_serve(store.folder) as server, disturbed(server.port, faults, 0.4) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        with closing(GenesisDataset(address, "node-a", cache_dir=tmp_path, **OPTIONS)) as dataset:
            assert train(dataset, 1_000) == undisturbed(1_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_batches(store: TokenStore, undisturbed: Callable[[int], list[str]], tmp_path: Path) -> None:
    with genesis_serve(store.folder) as server, disturbed(server.port, EVERYTHING, 0.6) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        with closing(GenesisDataset(address, "node-a", cache_dir=tmp_path, **OPTIONS)) as dataset:
            assert train(dataset, 10_000) == undisturbed(10_000)
        assert set(proxy.injected) == set(EVERYTHING)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["folder", "s3", "serve", "nginx", "varnish"])
def test_every_kind_of_store(
    store: TokenStore,
    undisturbed: Callable[[int], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    with ExitStack() as stack:
        if kind == "folder":
            address = store.url
        elif kind == "s3":
            s3 = stack.enter_context(rclone_s3(store.folder.parents[1]))
            proxy = stack.enter_context(disturbed(s3.port, EVERYTHING, 0.3))
            for name, value in s3.environment(proxy.port).items():
                monkeypatch.setenv(name, value)
            address = "s3://bucket/store"
        else:
            url = stack.enter_context(genesis_serve(store.folder)).url
            if kind != "serve":
                url = stack.enter_context({"nginx": nginx_cdn, "varnish": varnish_cdn}[kind](url))
            proxy = stack.enter_context(disturbed(int(url.rpartition(":")[2]), EVERYTHING, 0.3))
            address = f"http://127.0.0.1:{proxy.port}"
        dataset = stack.enter_context(closing(GenesisDataset(address, "node-a", cache_dir=tmp_path, **OPTIONS)))
        assert train(dataset, 2_500) == undisturbed(2_500)
