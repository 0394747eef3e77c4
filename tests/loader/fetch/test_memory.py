"""Which manifest was seen last: under every address, in spite of mirrors that lag or lie, and of folders that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from loader import DataUnavailableError, GenesisDataset, LoaderError, ManifestRollbackError
from loader.fetch.known_store import KnownStore, ManifestMemory, RememberedManifest, TrustedManifest
from manifests import MANIFEST_KEY
from tests.loader.fetch.conftest import OpenSession
from tests.support.batches import take
from tests.support.small_store import PRIVATE_KEY
from tests.support.token_store import TokenStore

FORGED_AT = "2027-01-01T00:00:00Z"


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """Of two manifests; the first is `old`."""
    store = TokenStore.of(tmp_path / "store", 3, private_key=PRIVATE_KEY)
    shutil.copytree(store.folder, tmp_path / "stale")
    store.grow(1)
    return store


@pytest.fixture
def stale(store: TokenStore, tmp_path: Path) -> str:
    """The address of a mirror that shows the first manifest."""
    return str(tmp_path / "stale")


@pytest.fixture
def forged(store: TokenStore, tmp_path: Path) -> str:
    """The address of a mirror of another history: its second manifest is another one."""
    mirror = TokenStore(tmp_path / "forged", private_key=PRIVATE_KEY, entries=store.entries)
    mirror.publish(sequence=2, updated_at=FORGED_AT)
    return mirror.url


def sequence_at(open_session: OpenSession, *addresses: str, **options: Any) -> int:
    return open_session(*addresses, **options).catalog.manifest.sequence


class TestAddresses:
    def test_what_was_seen_under_one_is_seen_under_all(
        self, store: TokenStore, stale: str, open_session: OpenSession, tmp_path: Path
    ) -> None:
        assert sequence_at(open_session, store.url, stale) == 2
        shutil.move(store.folder, tmp_path / "gone")
        for addresses in ((stale,), (stale, store.url), (store.url, stale)):
            assert sequence_at(open_session, *addresses) == 2

    @pytest.mark.parametrize("forged_comes_first", [True, False])
    @pytest.mark.parametrize("other", ["stale", "gone"])
    def test_one_of_another_history_does_not_keep_a_node_from_starting(
        self,
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

    def test_all_of_another_history_do(self, store: TokenStore, forged: str, open_session: OpenSession) -> None:
        assert sequence_at(open_session, store.url, forged) == 2
        shutil.copytree(forged, store.folder, dirs_exist_ok=True)
        with pytest.raises(ManifestRollbackError, match="found another"):
            open_session(store.url, forged)


class TestRefresh:
    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("another history", ManifestRollbackError),
            ("a rollback", ManifestRollbackError),
            ("none", DataUnavailableError),
        ],
    )
    def test_it_says_what_went_wrong_and_the_stream_goes_on(
        self, store: TokenStore, stale: str, forged: str, tmp_path: Path, kind: str, error: type[LoaderError]
    ) -> None:
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

    def test_nothing_older_than_what_is_in_use_where_nothing_can_be_kept(
        self, store: TokenStore, stale: str, open_session: OpenSession, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        session = open_session(store.url, cache_dir=tmp_path / "file" / "cache")
        honest = (store.folder / MANIFEST_KEY).read_bytes()
        shutil.copy(Path(stale) / MANIFEST_KEY, store.folder)
        with pytest.raises(ManifestRollbackError, match="sequence 2 or later"):
            session.newest_catalog()
        store.put(MANIFEST_KEY, honest)
        store.grow(1)
        assert session.newest_catalog().manifest.sequence == 3


class TestKeeping:
    def test_a_newer_one_of_another_process_is_not_overwritten(
        self, store: TokenStore, stale: str, tmp_path: Path
    ) -> None:
        memory = ManifestMemory([KnownStore.of(tmp_path / "cache", address) for address in (store.url, stale)])
        old, new = (TrustedManifest.of((Path(url) / MANIFEST_KEY).read_bytes()) for url in (stale, store.url))
        for manifest in (new, old):
            memory.remember(RememberedManifest(manifest, 0.0, {}, None), lambda _: True)
            recalled = memory.recall(lambda _: True)
            assert recalled is not None
            assert recalled.manifest == new

    def test_what_a_pinned_key_has_not_signed_neither_hides_nor_stays(
        self, store: TokenStore, stale: str, open_session: OpenSession, tmp_path: Path, public_key: Path
    ) -> None:
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

    def test_a_manifest_that_cannot_be_spelled_again(self, store: TokenStore, open_session: OpenSession) -> None:
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
