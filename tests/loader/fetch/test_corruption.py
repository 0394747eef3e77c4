"""Wrong bytes, wherever they come from, never reach a batch: fetched again, elsewhere, or refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import CorruptObjectError, DataUnavailableError, GenesisDataset
from manifests import packed_key, sha256_hex, shard_key
from tests.loader.fetch.conftest import OpenDataset
from tests.support.batches import take
from tests.support.fault_proxy import FaultProxy, Reply, Request
from tests.support.serve_process import genesis_serve
from tests.support.token_store import TokenStore


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


def test_the_next_mirror_has_it_right_or_has_it_at_all(
    store: TokenStore, open_store: OpenDataset, expected: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(store.folder, tmp_path / "bad")
    spoil_all(tmp_path / "bad")
    assert take(open_store(str(tmp_path / "bad"), store.url), 20) == expected
    assert str(tmp_path / "bad") in caplog.text
    assert "expected sha256" in caplog.text
    shutil.copytree(store.folder, tmp_path / "bare", ignore=shutil.ignore_patterns("shard_*"))
    assert take(open_store(str(tmp_path / "bare"), store.url), 20) == expected


@pytest.mark.parametrize("spoilt", ["shorter", "longer", "empty", "another shard"])
def test_other_sizes(
    store: TokenStore, open_store: OpenDataset, expected: list[str], tmp_path: Path, spoilt: str
) -> None:
    shutil.copytree(store.folder, tmp_path / "bad")
    for key in (shard_key, packed_key):
        bodies = [(tmp_path / "bad" / key(shard)).read_bytes() for shard in range(2)]
        for shard in range(2):
            body = {
                "shorter": bodies[shard][:-1],
                "longer": bodies[shard] + b"x",
                "empty": b"",
                "another shard": bodies[1 - shard],
            }[spoilt]
            (tmp_path / "bad" / key(shard)).write_bytes(body)
    assert take(open_store(str(tmp_path / "bad"), store.url), 20) == expected


def test_corrupt_everywhere_names_the_object_and_both_digests(
    store: TokenStore, open_store: OpenDataset, tmp_path: Path
) -> None:
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
def test_a_packed_form_that_cannot_be_had_is_made_up_for(
    store: TokenStore,
    open_store: OpenDataset,
    expected: list[str],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
) -> None:
    for shard in range(2):
        damage(store.folder / packed_key(shard))
    assert take(open_store(store.url), 20) == expected
    assert f"fetching {shard_key(0)} instead" in caplog.text


@pytest.mark.parametrize("position", [0, 300, 704, 9_000, -1])
def test_a_cached_file_that_was_damaged_is_fetched_again(
    store: TokenStore,
    open_store: OpenDataset,
    expected: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    position: int,
) -> None:
    assert take(open_store(store.url), 20) == expected
    for path in (tmp_path / "cache").glob("shard_*"):
        spoil(path, position)
    assert take(open_store(store.url), 20) == expected
    assert "damaged" in caplog.text
    assert all(
        sha256_hex(path.read_bytes()) == store.entries[int(path.name.split("_")[1].split("-")[0])].sha256
        for path in (tmp_path / "cache").glob("shard_*")
    )


def test_a_cached_file_that_was_damaged_and_no_network(
    store: TokenStore, open_store: OpenDataset, tmp_path: Path
) -> None:
    dataset = open_store(store.url, timeout_s=1.0)
    take(dataset, 20)
    dataset.close()
    for path in (tmp_path / "cache").glob("shard_*"):
        spoil(path)
    store.folder.rename(tmp_path / "gone")
    with pytest.raises(DataUnavailableError):
        take(open_store(store.url, timeout_s=1.0), 1)


@pytest.mark.slow
def test_an_answer_larger_than_the_shard_is_not_read(
    store: TokenStore, open_store: OpenDataset, expected: list[str]
) -> None:
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


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_transfer_form(store: TokenStore, open_store: OpenDataset) -> None:
    with genesis_serve(store.folder) as server:
        dataset = open_store(server.url)
        take(dataset, 20)
        packed = sum(entry.packed.size_bytes for entry in store.entries if entry.packed is not None)
        other = sum(path.stat().st_size for path in [*store.folder.glob("index/*"), store.folder / "manifest.json"])
        assert packed <= dataset.received_bytes <= packed + other
