"""Which manifest is believed, and which was seen: signatures, rollbacks, mirrors that lag or lie, and no network."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loader import (
    DataUnavailableError,
    GenesisDataset,
    LoaderUsageError,
    ManifestRollbackError,
    ManifestSignatureError,
)
from loader.fetch.known_store import KnownStore, ManifestMemory, RememberedManifest, TrustedManifest
from manifests import MANIFEST_KEY, generate_private_key, public_key_pem, sha256_hex
from tests.loader.fetch.conftest import OpenSession
from tests.support.fault_proxy import FaultProxy, Reply, Request
from tests.support.serve_process import genesis_serve
from tests.support.small_store import PRIVATE_KEY
from tests.support.token_store import TokenStore, take


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 3, private_key=PRIVATE_KEY)


def alter_manifest(store: TokenStore, **fields: Any) -> None:
    """Changes fields behind the signature's back."""
    value = json.loads((store.folder / MANIFEST_KEY).read_bytes())
    store.put(MANIFEST_KEY, json.dumps({**value, **fields}).encode())


def test_the_pinned_key_and_one_that_signs_no_more(store, open_session, public_key):
    assert sequence_at(open_session, store.url, public_key=public_key) == 1
    for _ in range(2):  # One of them is missed, which is no break.
        store.grow(1)
    assert sequence_at(open_session, store.url, public_key=public_key) == 3
    # What was believed before is no reason to go on beside a store that someone else now writes.
    open_session(store.url, public_key=public_key)
    store.private_key = generate_private_key()
    store.grow(1)
    with pytest.raises(ManifestSignatureError):
        open_session(store.url, public_key=public_key)


def test_another_key_and_keys_that_are_none(store: TokenStore, open_session: OpenSession, tmp_path: Path) -> None:
    key = tmp_path / "other.pub"
    with pytest.raises(LoaderUsageError, match="public-key"):
        open_session(store.url, public_key=key)
    key.write_bytes(b"-----BEGIN NONSENSE-----")
    with pytest.raises(LoaderUsageError, match="public-key"):
        open_session(store.url, public_key=key)
    key.write_bytes(public_key_pem(generate_private_key().public_key()))
    with pytest.raises(ManifestSignatureError, match="is signed by key"):
        open_session(store.url, public_key=key)


@pytest.mark.parametrize(
    "fields",
    [
        *({"sequence": 7}, {"updated_at": "2027-01-01T00:00:00Z"}, {"surplus": 1}, {"tokenizer_version": "bpe_v2"}),
        *({"signature": {"value": value}} for value in ("", "AAAA", "ä" * 88, "x" * 1_000_000)),
    ],
)
def test_tampered(store: TokenStore, open_session: OpenSession, public_key: Path, fields: dict[str, Any]) -> None:
    signature = json.loads((store.folder / MANIFEST_KEY).read_bytes())["signature"]
    alter_manifest(store, **{**fields, "signature": {**signature, **fields.get("signature", {})}})
    message = None if "signature" in fields else "changed after it was signed"
    with pytest.raises(ManifestSignatureError, match=message):
        open_session(store.url, public_key=public_key)


def test_a_key_that_is_pinned_later(store: TokenStore, open_session: OpenSession, public_key: Path) -> None:
    store.private_key = None
    store.grow(1)
    assert sequence_at(open_session, store.url) == 2
    for age_s in (600.0, 0.0):
        with pytest.raises(ManifestSignatureError, match="is not signed" if not age_s else None):
            open_session(store.url, public_key=public_key, manifest_max_age_s=age_s)


@pytest.mark.slow
def test_without_one_the_loader_says_so_once_and_of_a_folder_of_this_machine_not_at_all(store, open_session, caplog):
    for url in (store.url, store.folder.as_uri()):
        open_session(url)
    assert "nothing vouches" not in caplog.text
    with genesis_serve(store.folder) as server:
        for _ in range(3):
            open_session(server.url)
    assert caplog.text.count("nothing vouches for this store") == 1
    assert "data.public_key" in caplog.text, "a run file has no --public-key"


def test_an_older_one_is_passed_over(store, open_session, caplog):
    old = (store.folder / MANIFEST_KEY).read_bytes()
    store.grow(1)
    honest = (store.folder / MANIFEST_KEY).read_bytes()
    assert sequence_at(open_session, store.url) == 2
    store.put(MANIFEST_KEY, old)
    session = open_session(store.url)
    assert session.catalog.manifest.sequence == 2
    assert session.catalog.manifest.total_shards == 4
    assert "going on with the manifest" in caplog.text
    assert "expected a manifest of sequence 2 or later, as seen before, found 1" in caplog.text
    with pytest.raises(ManifestRollbackError, match="sequence 2 or later"):
        session.newest_catalog()
    # The honest history goes on, and is taken again.
    store.put(MANIFEST_KEY, honest)
    store.grow(2)
    assert sequence_at(open_session, store.url) == 3


@pytest.mark.parametrize("kind", ["same sequence", "other predecessor"])
def test_another_history_is_refused(store: TokenStore, open_session: OpenSession, kind: str) -> None:
    store.grow(1)
    honest = (store.folder / MANIFEST_KEY).read_bytes()
    assert sequence_at(open_session, store.url) == 2
    if kind == "same sequence":
        store.publish(sequence=2, updated_at="2027-01-01T00:00:00Z")
    else:
        store.publish(sequence=3, previous=sha256_hex(b"another"))
    with pytest.raises(ManifestRollbackError, match="if the store was made anew, remove"):
        open_session(store.url)
    # The honest history goes on, and is taken again.
    store.put(MANIFEST_KEY, honest)
    store.grow(2)
    assert sequence_at(open_session, store.url) == 3


def test_the_next_mirror_is_asked(store, open_session, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shutil.copytree(store.folder, tmp_path / "stale")
    store.grow(1)
    mirrors = (str(tmp_path / "stale"), store.url)
    assert sequence_at(open_session, *mirrors) == 1
    shutil.copytree(store.folder, tmp_path / "stale", dirs_exist_ok=True)
    assert sequence_at(open_session, *mirrors) == 2
    store.put(MANIFEST_KEY, b"{}")
    shutil.rmtree(tmp_path / "stale")
    assert sequence_at(open_session, *mirrors) == 2
    assert "cannot" in caplog.text or "expected a store" in caplog.text


def test_a_known_manifest_that_is_damaged(store, open_session, tmp_path, caplog):
    open_session(store.url)
    (known,) = (tmp_path / "cache" / "stores").glob(f"*/{MANIFEST_KEY}")
    honest = known.read_bytes()
    for damage in (b"", b"{}", honest[:-1], b"[" * 100_000, honest.replace(b'"alpha"', b'"delta"')):
        known.write_bytes(damage)
        assert sequence_at(open_session, store.url, manifest_max_age_s=600.0) == 1
    assert "damaged" in caplog.text


@pytest.mark.slow
def test_etags_spare_the_manifest(store: TokenStore, open_session: OpenSession) -> None:
    statuses: list[tuple[str, int]] = []

    def note(request: Request, reply: Reply) -> Reply:
        statuses.append((request.path, reply.status))
        return reply

    with genesis_serve(store.folder) as server, FaultProxy(server.port, alter=note) as proxy:
        address = f"http://127.0.0.1:{proxy.port}"
        assert [sequence_at(open_session, address) for _ in range(3)] == [1, 1, 1]
        assert statuses == [("/manifest.json", 200), ("/manifest.json", 304), ("/manifest.json", 304)]
        open_session(address, manifest_max_age_s=600.0)
        assert len(statuses) == 3
        store.grow(1)
        assert sequence_at(open_session, address) == 2
        assert statuses[3:] == [("/manifest.json", 200)]
        # Every mirror has its own.
        assert sequence_at(open_session, server.url, address) == 2


@pytest.mark.slow
def test_a_network_that_is_gone(store: TokenStore, open_session: OpenSession, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "cache_dir": tmp_path / "cache", "timeout_s": 0.5}
    with genesis_serve(store.folder) as server, closing(GenesisDataset(server.url, "node-a", **options)) as dataset:
        address = server.url
        expected = take(dataset, 50)
        state = dataset.state_dict(step=20)
    # Within the manifest's age, and behind it.
    with closing(GenesisDataset(address, "node-a", **options)) as warm:
        warm.load_state_dict(state)
        assert take(warm, 30) == expected[20:]
        assert sequence_at(open_session, address, timeout_s=0.5) == 1
        with pytest.raises(DataUnavailableError):
            warm.refresh()
        assert take(warm, 5) == take(GenesisDataset(store.url, "node-a", **options), 55)[50:]
    for path in (tmp_path / "cache").glob("shard_*"):
        path.unlink()
    with (
        closing(GenesisDataset(address, "node-a", **options)) as cold,
        pytest.raises(DataUnavailableError, match="shard_"),
    ):
        next(iter(cold))
    shutil.rmtree(tmp_path / "cache" / "stores")
    with pytest.raises(DataUnavailableError):
        GenesisDataset(address, "node-a", **options)


FORGED_AT = "2027-01-01T00:00:00Z"


@pytest.fixture
def stale(store: TokenStore, tmp_path: Path) -> str:
    """The address of a mirror that shows the first manifest; the store has a second one."""
    shutil.copytree(store.folder, tmp_path / "stale")
    store.grow(1)
    return str(tmp_path / "stale")


@pytest.fixture
def forged(stale: str, store: TokenStore, tmp_path: Path) -> str:
    """The address of a mirror of another history: its second manifest is another one."""
    mirror = TokenStore(tmp_path / "forged", private_key=PRIVATE_KEY, entries=store.entries)
    mirror.publish(sequence=2, updated_at=FORGED_AT)
    return mirror.url


def sequence_at(open_session: OpenSession, *addresses: str, **options: Any) -> int:
    return open_session(*addresses, **options).catalog.manifest.sequence


def test_what_was_seen_under_one_is_seen_under_all(store, stale, open_session, tmp_path):
    assert sequence_at(open_session, store.url, stale) == 2
    shutil.move(store.folder, tmp_path / "gone")
    for addresses in ((stale,), (stale, store.url), (store.url, stale)):
        assert sequence_at(open_session, *addresses) == 2


@pytest.mark.parametrize("forged_comes_first", [True, False])
@pytest.mark.parametrize("other", ["stale", "gone"])
def test_one_of_another_history_does_not_keep_a_node_from_starting(
    store: TokenStore,
    stale: str,
    forged: str,
    open_session: OpenSession,
    tmp_path: Path,
    other: str,
    forged_comes_first: bool,
) -> None:
    second = stale if other == "stale" else str(tmp_path / "gone")
    addresses = (forged, second) if forged_comes_first else (second, forged)
    assert sequence_at(open_session, store.url, *addresses) == 2
    shutil.move(store.folder, tmp_path / "gone-too")
    session = open_session(*addresses)
    assert session.catalog.manifest.sequence == 2
    assert session.catalog.manifest.updated_at != FORGED_AT
    with pytest.raises(ManifestRollbackError, match="found another"):
        session.newest_catalog()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("another history", ManifestRollbackError),
        ("a rollback", ManifestRollbackError),
        ("none", DataUnavailableError),
    ],
)
def test_it_says_what_went_wrong_and_the_stream_goes_on(store, stale, forged, tmp_path, kind, error):
    options: dict[str, Any] = {"seq_len": 64, "batch_size": 4, "cache_dir": tmp_path / "cache", "timeout_s": 1.0}
    expected = take(GenesisDataset(store.url, "node-a", **options), 12)
    dataset = GenesisDataset(store.url, "node-a", **options)
    found = take(dataset, 5)
    if kind == "none":
        (store.folder / MANIFEST_KEY).unlink()
    else:
        shutil.copy(Path(stale if kind == "a rollback" else forged) / MANIFEST_KEY, store.folder)
    with pytest.raises(error, match="expected" if kind != "a rollback" else "rollback"):
        dataset.refresh()
    assert found + take(dataset, 7) == expected


def test_nothing_older_than_what_is_in_use_where_nothing_can_be_kept(store, stale, open_session, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    session = open_session(store.url, cache_dir=tmp_path / "file" / "cache")
    honest = (store.folder / MANIFEST_KEY).read_bytes()
    shutil.copy(Path(stale) / MANIFEST_KEY, store.folder)
    with pytest.raises(ManifestRollbackError, match="sequence 2 or later"):
        session.newest_catalog()
    store.put(MANIFEST_KEY, honest)
    store.grow(1)
    assert session.newest_catalog().manifest.sequence == 3


def test_a_newer_one_of_another_process_is_not_overwritten(store: TokenStore, stale: str, tmp_path: Path) -> None:
    memory = ManifestMemory([KnownStore.of(tmp_path / "cache", address) for address in (store.url, stale)])
    old, new = (TrustedManifest.of((Path(url) / MANIFEST_KEY).read_bytes()) for url in (stale, store.url))
    for manifest in (new, old):
        memory.remember(RememberedManifest(manifest, 0.0, {}, None), lambda _: True)
        recalled = memory.recall(lambda _: True)
        assert recalled is not None
        assert recalled.manifest == new


def test_what_a_pinned_key_has_not_signed_neither_hides_nor_stays(store, stale, open_session, tmp_path, public_key):
    """Else one lie, believed while no key was pinned, would end the memory for good."""
    poison = TokenStore(tmp_path / "poison", entries=store.entries)
    poison.publish(sequence=2**53 - 1)
    assert sequence_at(open_session, store.url) == 2
    assert sequence_at(open_session, poison.url, store.url) == 2**53 - 1
    shutil.rmtree(poison.folder)
    shutil.copy(Path(stale) / MANIFEST_KEY, store.folder)
    with pytest.raises(DataUnavailableError):  # Both addresses hold the poison now, so nothing was seen.
        open_session(poison.url, public_key=public_key)
    assert sequence_at(open_session, store.url, public_key=public_key) == 1
    store.entries = store.entries[:3]
    store.grow(2)
    assert sequence_at(open_session, poison.url, store.url, public_key=public_key) == 2
    shutil.copy(Path(stale) / MANIFEST_KEY, store.folder)
    assert sequence_at(open_session, store.url, public_key=public_key) == 2
    assert sequence_at(open_session, poison.url, public_key=public_key) == 2


def test_a_manifest_that_cannot_be_spelled_again(store: TokenStore, open_session: OpenSession) -> None:
    """A field of a later revision may hold anything that JSON's readers let through."""
    store.private_key = None
    store.grow(1)
    value = json.loads((store.folder / MANIFEST_KEY).read_bytes())
    for surplus in (float("nan"), float("inf"), "\N{SNOWMAN}"):
        store.put(MANIFEST_KEY, json.dumps({**value, "sequence": 4, "surplus": surplus}).encode())
        for _ in range(2):
            assert sequence_at(open_session, store.url, cache_dir=store.folder / str(surplus)) == 4
        store.put(MANIFEST_KEY, json.dumps({**value, "sequence": 4, "surplus": [surplus]}).encode())
        with pytest.raises(ManifestRollbackError, match="found another"):
            open_session(store.url, cache_dir=store.folder / str(surplus))
