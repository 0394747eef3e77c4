"""Several addresses of one store: whom to ask and when, and wrong bytes that never reach a batch."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from loader import CorruptObjectError, DataUnavailableError, GenesisDataset
from loader.fetch.mirrors import Mirrors
from manifests import SEGMENT_SHARDS, packed_key, sha256_hex, shard_key
from tests.support.fault_proxy import FaultProxy, Reply, Request
from tests.support.serve_process import genesis_serve
from tests.support.token_store import TokenStore, take

KEY = shard_key(0)
BODY = random.Random(3).randbytes(200_000)
Serve = Callable[[Callable[[Request], Reply]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves whatever a function answers; gives the address."""
    with ExitStack() as stack:

        def start(answer: Callable[[Request], Reply]) -> str:
            return f"http://127.0.0.1:{stack.enter_context(FaultProxy(1, answer=answer)).port}"

        yield start


class Server:
    """Gives its replies one after the other, the last one again and again, and counts."""

    def __init__(self, *replies: Reply) -> None:
        self.asked = 0
        self._replies = replies

    def __call__(self, _: Request) -> Reply:
        self.asked += 1
        return self._replies[min(self.asked, len(self._replies)) - 1]


def too_many(retry_after: str) -> Reply:
    return Reply(429, headers=(("Retry-After", retry_after),))


def whole(body: bytes) -> bytes:
    return body


class Clock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time between the turns of `Mirrors`; within a turn the stores have the real one."""
    clock = Clock()
    monkeypatch.setattr("loader.fetch.mirrors.time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    monkeypatch.setattr("loader.fetch.mirrors._PAUSE_S", 1.0)
    return clock


def test_a_server_that_asks_for_more_time_is_left_alone_while_others_are_asked(serve: Serve, clock: Clock) -> None:
    server = Server(too_many("700"))
    with pytest.raises(DataUnavailableError, match=r"within 600 s.*answered 429"):
        Mirrors([serve(server)], 600.0).fetch(KEY, 100, whole)
    assert (server.asked, clock.slept) == (1, [])
    server = Server(too_many("400"), Reply(200, BODY))
    assert Mirrors([serve(server)], 600.0).fetch(KEY, len(BODY), whole) == BODY
    assert (server.asked, clock.slept) == (2, [400.0])
    resting, other = Server(too_many("400"), Reply(200, BODY)), Server(Reply(404))
    assert Mirrors([serve(resting), serve(other)], 600.0).fetch(KEY, len(BODY), whole) == BODY
    assert resting.asked == 2
    assert other.asked > 10
    assert 800 <= clock.now < 830


def test_the_training_s_own_random_numbers_are_left_alone(serve: Serve, clock: Clock) -> None:
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    found = []
    server = Server(*[Reply(404)] * 2, Reply(200, BODY))
    for _ in range(3):
        Mirrors([serve(server)], 600.0).fetch(KEY, len(BODY), whole)
        found.append(random.random())
    assert found == expected
    assert clock.slept


@pytest.mark.slow
def test_a_turn_ends_where_nothing_worth_the_name_comes_and_not_before(serve, monkeypatch):
    # 100 kB/s, and a turn of a second where the object takes two; asked again it would begin anew.
    monkeypatch.setattr("loader.fetch.mirrors._LONE_TURN_S", 1.0)
    server = Server(Reply(200, BODY, (("ETag", '"x"'),), piece_bytes=10_000, pause_s=0.1))
    assert Mirrors([serve(server)], 20.0).fetch(KEY, len(BODY), whole) == BODY
    assert server.asked == 1
    monkeypatch.setattr("loader.fetch.mirrors._TURN_S", 1.0)
    dripping = Server(Reply(200, BODY, (("ETag", '"x"'),), piece_bytes=100, pause_s=0.05))
    mirrors = Mirrors([serve(dripping), serve(Server(Reply(200, BODY)))], 20.0)
    assert mirrors.fetch(KEY, len(BODY), whole) == BODY
    assert dripping.asked >= 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [503, 404])
def test_the_shard_itself_is_asked_for_only_where_there_is_none(tmp_path, open_session, status):
    """What hangs or is overloaded would hang for eight times the bytes, too."""
    store = TokenStore.of(tmp_path / "store", 2)
    asked: set[str] = set()

    def no_packed(request: Request) -> Reply | None:
        asked.add(request.path)
        return Reply(status) if "packed" in request.path else None

    with genesis_serve(store.folder) as server, FaultProxy(server.port, answer=no_packed) as proxy:
        session = open_session(f"http://127.0.0.1:{proxy.port}", timeout_s=1.5)
        if status == 404:
            assert session.open_shard(1).ids.tolist() == store.ids(1).tolist()
        else:
            with pytest.raises(DataUnavailableError, match=packed_key(1)):
                session.open_shard(1)
    assert (f"/{shard_key(1)}" in asked) == (status == 404)


@pytest.mark.parametrize("location", ["http://a..b/x", f"http://{'a' * 64}.example/x", "http://[::1/x", "ftp://h/x"])
def test_a_redirect_that_leads_nowhere(serve: Serve, location: str) -> None:
    lost = Server(Reply(302, headers=(("Location", location),)))
    mirrors = Mirrors([serve(lost), serve(Server(Reply(200, BODY)))], 20.0)
    assert mirrors.fetch(KEY, len(BODY), whole) == BODY
    assert lost.asked == 1


SEGMENTS = 3
SHARDS = SEGMENTS * SEGMENT_SHARDS


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 2)


@pytest.fixture
def expected(store: TokenStore, tmp_path: Path) -> list[str]:
    """Batches of both shards, more than one epoch."""
    return take(GenesisDataset(store.url, "node-a", seq_len=64, batch_size=4, cache_dir=tmp_path / "other"), 20)


def spoil(path: Path, position: int = -500) -> str:
    """Flips a bit in place; returns the digest of what is there now.

    Writing the file anew would cut it to nothing first, under the eyes of whoever has it mapped: that ends a process.
    """
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    return sha256_hex(path.read_bytes())


def spoil_all(folder: Path) -> None:
    for path in [*folder.glob("shard_*"), *folder.glob("packed/shard_*")]:
        spoil(path)


SPOILT: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "a bit": lambda body, _: body[:-500] + bytes([body[-500] ^ 4]) + body[-499:],
    "shorter": lambda body, _: body[:-1],
    "longer": lambda body, _: body + b"x",
    "empty": lambda *_: b"",
    "another shard": lambda _, other: other,
    "missing": lambda *_: None,
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_the_next_mirror_has_it_right_or_has_it_at_all(store, open_store, expected, tmp_path, caplog, spoilt):
    shutil.copytree(store.folder, tmp_path / "bad")
    for key in (shard_key, packed_key):
        bodies = [(tmp_path / "bad" / key(shard)).read_bytes() for shard in range(2)]
        for shard in range(2):
            (tmp_path / "bad" / key(shard)).unlink()
            if (body := SPOILT[spoilt](bodies[shard], bodies[1 - shard])) is not None:
                (tmp_path / "bad" / key(shard)).write_bytes(body)
    assert take(open_store(str(tmp_path / "bad"), store.url), 20) == expected
    if spoilt == "a bit":
        assert str(tmp_path / "bad") in caplog.text
        assert "expected sha256" in caplog.text


def test_corrupt_everywhere_names_the_object_and_both_digests(store, open_store, tmp_path):
    shutil.copytree(store.folder, tmp_path / "second")
    for folder in (store.folder, tmp_path / "second"):
        spoil_all(folder)
    dataset = open_store(store.url, str(tmp_path / "second"))
    shard = dataset.shards[0]
    found = sha256_hex((store.folder / shard_key(shard)).read_bytes())
    with pytest.raises(CorruptObjectError) as caught:
        next(iter(dataset))
    message = str(caught.value)
    for part in (shard_key(shard), store.entries[shard].sha256, found, store.url, str(tmp_path / "second")):
        assert part in message
    assert "\n" not in message
    assert dataset.state_dict()["step"] == 0


@pytest.mark.parametrize("damage", [spoil, Path.unlink], ids=["spoilt", "missing"])
def test_a_packed_form_that_cannot_be_had_is_made_up_for(store, open_store, expected, caplog, damage):
    for shard in range(2):
        damage(store.folder / packed_key(shard))
    assert take(open_store(store.url), 20) == expected
    assert f"fetching {shard_key(0)} instead" in caplog.text


@pytest.mark.parametrize("position", [0, 300, 704, 9_000, -1])
def test_a_cached_file_that_was_damaged_is_fetched_again(store, open_store, expected, tmp_path, caplog, position):
    assert take(open_store(store.url), 20) == expected
    for path in (tmp_path / "cache").glob("shard_*"):
        spoil(path, position)
    assert take(open_store(store.url), 20) == expected
    assert "damaged" in caplog.text
    assert all(
        sha256_hex(path.read_bytes()) == store.entries[int(path.name.split("_")[1].split("-")[0])].sha256
        for path in (tmp_path / "cache").glob("shard_*")
    )
    if position == -1:  # Nor is it taken where there is no network.
        for path in (tmp_path / "cache").glob("shard_*"):
            spoil(path)
        store.folder.rename(tmp_path / "gone")
        with pytest.raises(DataUnavailableError):
            take(open_store(store.url, timeout_s=1.0), 1)


@pytest.mark.slow
def test_an_answer_larger_than_the_shard_is_not_read(store, open_store, expected):
    """A server cannot make a node read more than what the index says there is."""
    sent: list[int] = []

    def swollen(request: Request, reply: Reply) -> Reply:
        if "shard_" not in request.path:
            return reply
        sent.append(reply.status)
        return Reply(200, reply.body + bytes(8 << 20), (("ETag", '"x"'),))

    with genesis_serve(store.folder) as server, FaultProxy(server.port, alter=swollen) as proxy:
        dataset = open_store(f"http://127.0.0.1:{proxy.port}", server.url)
        assert take(dataset, 20) == expected
        assert sent
        assert dataset.received_bytes < 200_000
