"""Faulty networks, shared caches and kills change no batch: real servers, seeded faults, kills."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loader import GenesisDataset
from tests.support.cdn_servers import nginx_cdn
from tests.support.fault_proxy import READ_FAULTS, Fault, FaultProxy
from tests.support.s3_servers import rclone_s3
from tests.support.serve_process import genesis_serve
from tests.support.token_store import TokenStore, digest, take

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
@pytest.mark.timeout(600)
def test_ten_thousand_batches(store: TokenStore, undisturbed: Callable[[int], list[str]], tmp_path: Path) -> None:
    with genesis_serve(store.folder) as server, disturbed(server.port, EVERYTHING, 0.6) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        with closing(GenesisDataset(address, "node-a", cache_dir=tmp_path, **OPTIONS)) as dataset:
            assert train(dataset, 10_000) == undisturbed(10_000)
        assert set(proxy.injected) == set(EVERYTHING)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["folder", "s3", "serve", "nginx"])
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
                url = stack.enter_context(nginx_cdn(url))
            proxy = stack.enter_context(disturbed(int(url.rpartition(":")[2]), EVERYTHING, 0.3))
            address = f"http://127.0.0.1:{proxy.port}"
        dataset = stack.enter_context(closing(GenesisDataset(address, "node-a", cache_dir=tmp_path, **OPTIONS)))
        assert train(dataset, 2_500) == undisturbed(2_500)


NODE_OPTIONS: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "count": 8, "timeout_s": 60.0}
BATCHES = 700
"""More than an epoch of eight shards of 78."""
_FORK = multiprocessing.get_context("fork")
"""Each process begins with torch imported, which otherwise takes longer than all it does here."""


def train_node(address: str, node_id: str, cache: Path, cache_bytes: int, work: Path, over: Path) -> None:
    """Writes a line a batch, and a state now and then; begins where the last state says, ends once `over` is there."""
    dataset = GenesisDataset(address, node_id, cache_dir=cache, cache_bytes=cache_bytes, **NODE_OPTIONS)
    state = work / f"{node_id}.state"
    if state.exists():
        dataset.load_state_dict(json.loads(state.read_text()))
    step = dataset.state_dict()["step"]
    with (work / f"{node_id}.log").open("a", buffering=1) as log:
        for batch in islice(dataset, BATCHES - step):
            log.write(f"{step} {digest(batch)}\n")
            step += 1
            if step % 10 == 0:
                new = state.with_suffix(".new")
                new.write_text(json.dumps(dataset.state_dict()))
                new.replace(state)
            time.sleep(0.001)  # A training step, so that there is something to kill.
    end = time.monotonic() + 120
    while not over.exists() and time.monotonic() < end:
        time.sleep(0.01)


def batches_of(log: Path) -> list[tuple[int, str]]:
    """Whole lines: the last one of a killed process may be cut off."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(line[0]), line[1]) for line in lines if len(line) == 2 and len(line[1]) == 24]


def kills(draw: random.Random) -> list[int]:
    """How far a node is let come before it is killed: not at all, soon after its start, and four times on its way."""
    return [-1, 0, *sorted(draw.sample(range(1, BATCHES), 4))]


def furthest(log: Path) -> int:
    """The last batch there is; -1 for none."""
    return max((step for step, _ in batches_of(log)), default=-1) if log.exists() else -1


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_kills_on_a_schedule(store: TokenStore, tmp_path: Path, seed: int) -> None:
    """Four nodes, room for two shards: whoever finds none reads from its own memory."""
    nodes = [f"node-{number}" for number in range(4)]
    expected = {
        node: take(GenesisDataset(store.url, node, cache_dir=tmp_path / "other", **NODE_OPTIONS), BATCHES)
        for node in nodes
    }
    draw, over = random.Random(seed), tmp_path / "over"
    with genesis_serve(store.folder) as server:

        def start(node: str) -> Any:
            given = (server.url, node, tmp_path / "cache", 2 * SHARD_BYTES, tmp_path, over)
            process = _FORK.Process(target=train_node, args=given)
            process.start()
            return process

        planned = {node: kills(draw) for node in nodes}
        running = {node: start(node) for node in nodes}
        try:
            end = time.monotonic() + 90
            while any(planned.values()):
                assert time.monotonic() < end, f"still to be killed: {planned}"
                for node in (node for node in nodes if planned[node]):
                    process = running[node]
                    assert process.exitcode is None, f"{node} ended by itself, with {process.exitcode}"
                    if furthest(tmp_path / f"{node}.log") < planned[node][0]:
                        continue
                    planned[node].pop(0)
                    time.sleep(draw.uniform(0.0, 0.03))  # Not always at the same point of a batch.
                    process.kill()
                    process.join(30)
                    assert process.exitcode == -signal.SIGKILL
                    running[node] = start(node)
                time.sleep(0.002)
        finally:
            over.touch()  # Until then nobody ends, however far ahead of the schedule.
        for process in running.values():
            process.join(90)
        assert [process.exitcode for process in running.values()] == [0] * 4
    for node in nodes:
        found = batches_of(tmp_path / f"{node}.log")
        assert {step for step, _ in found} == set(range(BATCHES))
        assert all(expected[node][step] == each for step, each in found)
    files = [path for path in (tmp_path / "cache").iterdir() if path.is_file() and "shard_" in path.name]
    assert sum(path.stat().st_size for path in files) <= 2 * SHARD_BYTES
