"""What of an index is kept on this machine, and how large a vocabulary may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from loader import DataUnavailableError
from manifests import SEGMENT_SHARDS, sha256_hex, vocabulary_key
from tests.loader.fetch.conftest import OpenSession
from tests.support.token_store import TokenStore, fixed_ids, vocabulary_of

SEGMENTS = 3
SHARDS = SEGMENTS * SEGMENT_SHARDS


@pytest.fixture
def large(tmp_path: Path) -> TokenStore:
    """Of several segments and two sources; every shard has the same bytes, and none is ever read."""
    store = TokenStore(tmp_path / "store", shard_tokens=65, packed=False)
    entry = store.add(fixed_ids(0, 65))
    store.entries = [
        entry.model_copy(update={"id": number, "source": ("alpha", "beta")[number % 2]}) for number in range(SHARDS)
    ]
    store.publish()
    return store


def kept_segments(cache: Path) -> int:
    return sum("segment" in path.name for path in (cache / "stores").glob("*/*"))


@pytest.mark.parametrize("segments_of_a_small_store", [SEGMENTS, SEGMENTS - 1])
def test_of_a_large_store_only_the_segments_of_shards_that_are_read_are_kept(
    large: TokenStore,
    open_session: OpenSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    segments_of_a_small_store: int,
) -> None:
    monkeypatch.setattr("loader.fetch.catalog._KEPT_SEGMENTS", segments_of_a_small_store)
    is_small = segments_of_a_small_store == SEGMENTS
    catalog = open_session(large.url).catalog
    by_source = catalog.shards_by_source(SHARDS - 1)
    assert {name: list(ids) for name, ids in by_source.items()} == {
        "alpha": list(range(0, SHARDS - 1, 2)),
        "beta": list(range(1, SHARDS - 1, 2)),
    }
    assert kept_segments(tmp_path / "cache") == (SEGMENTS if is_small else 0)
    assert catalog.entry(SEGMENT_SHARDS + 1).source == "beta"
    assert kept_segments(tmp_path / "cache") == (SEGMENTS if is_small else 1)


@pytest.mark.parametrize("surplus_bytes", [60_000, 200_000])
def test_a_vocabulary_larger_than_its_ids_can_make_it(
    open_session: OpenSession, tmp_path: Path, surplus_bytes: int
) -> None:
    store = TokenStore.of(tmp_path / "store", 1)
    body = vocabulary_of().to_json() + b" " * surplus_bytes
    digest = sha256_hex(body)
    store.put(vocabulary_key(digest), body)
    assert store.tokenizer is not None
    reference = store.tokenizer.model_copy(update={"key": vocabulary_key(digest), "sha256": digest})
    store.publish(tokenizer=reference)
    catalog = open_session(store.url).catalog
    if surplus_bytes < 2**16:
        assert catalog.vocabulary() == vocabulary_of()
    else:
        with pytest.raises(DataUnavailableError, match="at most"):
            catalog.vocabulary()
