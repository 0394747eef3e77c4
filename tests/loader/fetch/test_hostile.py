"""Hostile stores whose chain of digests holds: refused while what they name is still a number or a name."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from loader import DataUnavailableError, HostileStoreError, LoaderError, UntrustedManifestError
from loader.fetch.catalog import MAX_SEGMENT_BYTES
from loader.fetch.manifest_keeper import MAX_MANIFEST_BYTES
from manifests import (
    MANIFEST_KEY,
    PackedEntry,
    SegmentRef,
    canonical_json,
    encode_shard,
    max_packed_bytes,
    packed_key,
    sha256_hex,
    shard_key,
    vocabulary_key,
)
from tests.loader.fetch.conftest import OpenDataset
from tests.support.token_store import TokenStore, fixed_ids, take, vocabulary_of


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore.of(tmp_path / "store", 3)


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    """No more of Python's memory than that."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 1e6


def cached_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def deep(levels: int) -> bytes:
    return b'{"format":1,"x":' + b"[" * levels + b"]" * levels + b"}"


MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "an index key that climbs out": lambda m: m["index"][0].update(key="../../etc/passwd"),
    "an index key of another digest": lambda m: m["index"][0].update(sha256="0" * 64),
    "a vocabulary key that climbs out": lambda m: m["tokenizer"].update(key="vocabulary/../../x"),
    "shards of a gigabyte": lambda m: (
        m.update(shard_tokens=2**27, total_tokens=3 * 2**27),
        m["sources"]["alpha"].update(tokens=3 * 2**27),
    )[-1],
    "shards beyond any bound": lambda m: m.update(shard_tokens=2**60),
    "a count with 5,000 digits": lambda m: m.update(sequence="n"),
    "a later format": lambda m: m.update(format=2),
    "half of a surrogate pair in a field of its own": lambda m: m.update(surplus={"\ud800": 1}),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_manifests(store, open_store, tmp_path, change):
    """Some of what no model lets through; `tests/manifests` has the rest."""
    value = json.loads((store.folder / MANIFEST_KEY).read_bytes())
    change(value)
    store.put(MANIFEST_KEY, json.dumps(value).encode())
    with at_most(4), pytest.raises(UntrustedManifestError):
        open_store(store.url)
    assert cached_bytes(tmp_path / "cache") == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"format":1,"sequence":' + b"9" * 5_000 + b"}",
        b'{"format":1,"sequence":NaN}',
        *(deep(levels) for levels in (200, 500, 900, 990, 1_000, 5_000, 100_000)),
    ],
    ids=lambda body: f"{bytes(body[:12])!r}-{len(body)}",
)
@pytest.mark.parametrize("pinned", [False, True])
def test_manifests_that_are_none(store, open_store, tmp_path, public_key, body, pinned):
    store.put(MANIFEST_KEY, body)
    with at_most(4), pytest.raises(UntrustedManifestError):
        open_store(store.url, public_key=public_key if pinned else None)
    assert cached_bytes(tmp_path / "cache") == 0


@pytest.mark.parametrize("levels", [*range(50, 1_000, 50), *range(960, 1_000, 4), 3_000])
@pytest.mark.parametrize("where", ["x", "index", "signature"])
def test_depth_beside_what_is_honest(store, open_store, public_key, levels, where):
    """Parsed, it would still be too deep to spell again for its signature, or to show in a message."""
    value = json.loads((store.folder / MANIFEST_KEY).read_bytes())
    key_id = sha256_hex(b"")[:16]
    signature = {"algorithm": "ed25519", "key_id": key_id, "value": "AAAA"}
    text = json.dumps({**value, "signature": signature, where: "DEEP"})
    store.put(MANIFEST_KEY, text.replace('"DEEP"', "[" * levels + "]" * levels).encode())
    for key in (None, public_key):
        try:
            open_store(store.url, public_key=key)
        except UntrustedManifestError:
            continue
        assert where == "x" and key is None  # A field that a later revision may add.


def test_manifests_segments_and_vocabularies_of_any_size(store, open_store, open_session, tmp_path):
    honest = (store.folder / MANIFEST_KEY).read_bytes()
    store.put(MANIFEST_KEY, b" " * (MAX_MANIFEST_BYTES + 1))
    with at_most(4), pytest.raises(LoaderError, match="at most"):
        open_store(store.url)
    assert cached_bytes(tmp_path / "cache") == 0
    store.put(MANIFEST_KEY, honest)
    publish_segment(store, b" " * (MAX_SEGMENT_BYTES + 1))
    with at_most(4), pytest.raises(LoaderError, match="at most"):
        open_store(store.url)
    body = vocabulary_of().to_json() + b" " * 200_000
    digest = sha256_hex(body)
    store.put(vocabulary_key(digest), body)
    store.publish(tokenizer=store.tokenizer.model_copy(update={"key": vocabulary_key(digest), "sha256": digest}))
    with at_most(4), pytest.raises(DataUnavailableError, match="at most"):
        open_session(store.url).catalog.vocabulary()


ENTRIES: dict[str, dict[str, Any]] = {
    "another number of ids": {"tokens": 1_000},
    "another size": {"size_bytes": 17_578},
    "an absurd size": {"size_bytes": 2**50},
    "a source the manifest has not": {"source": "gamma"},
    "a vocabulary beyond the store's": {"next_merge_id": 1_001},
    "an id of another shard": {"id": 2},
    "a packed form that climbs out": {"packed": {"key": "../../x", "sha256": "0" * 64, "size_bytes": 10}},
    "a packed form that is another's": {"packed": {"key": packed_key(0), "sha256": "0" * 64, "size_bytes": 10}},
    "a packed form that is the manifest": {"packed": {"key": MANIFEST_KEY, "sha256": "0" * 64, "size_bytes": 10}},
    "a packed form of an absurd size": {
        "packed": {"key": packed_key(1), "sha256": "0" * 64, "size_bytes": max_packed_bytes(2_000, 1_000) + 1}
    },
}


def publish_segment(store: TokenStore, body: bytes) -> None:
    reference = store.put_segment(0, body)
    store.publish(index=(reference,))


@pytest.mark.parametrize("change", ENTRIES.values(), ids=ENTRIES.keys())
def test_entries(store: TokenStore, open_store: OpenDataset, tmp_path: Path, change: dict[str, Any]) -> None:
    entries = [entry.model_dump(mode="json", exclude_none=True) for entry in store.entries]
    entries[1].update(change)
    publish_segment(store, canonical_json({"format": 1, "shards": entries}))
    with at_most(4), pytest.raises(HostileStoreError):
        open_store(store.url)
    assert not list((tmp_path / "cache").glob("shard_*"))


@pytest.mark.parametrize(
    "spell",
    [
        lambda entries: canonical_json({"format": 1, "shards": entries[:2]}),
        lambda entries: canonical_json({"format": 1, "shards": [*entries, {**entries[2], "id": 3}]}),
        lambda entries: canonical_json({"format": 1, "shards": [{**e, "id": e["id"] + 1_000} for e in entries]}),
        lambda entries: canonical_json({"format": 1, "shards": []}),
        lambda entries: canonical_json({"format": 2, "shards": entries}),
        lambda entries: b"not JSON",
        lambda entries: deep(100_000),
        lambda entries: b'{"format":1,"shards":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=["fewer", "more", "others", "none", "format", "no JSON", "deep", "deep shards"],
)
def test_segments(store: TokenStore, open_store: OpenDataset, spell: Callable[[list[dict[str, Any]]], bytes]) -> None:
    entries = [entry.model_dump(mode="json", exclude_none=True) for entry in store.entries]
    publish_segment(store, spell(entries))
    with at_most(4), pytest.raises(HostileStoreError):
        open_store(store.url)


def test_a_segment_that_was_right_for_another_manifest(store: TokenStore, open_store: OpenDataset) -> None:
    """What was checked once, and lies on this machine, is not what a later manifest makes of it."""
    honest = open_store(store.url)
    take(honest, 3)
    reference = store.manifest.index[0]
    totals = store.manifest.sources["alpha"]
    lies: list[dict[str, Any]] = [
        {
            "total_shards": 4,
            "total_tokens": 8_000,
            "index": (reference.model_copy(update={"shards": 4}),),
            "sources": {"alpha": totals.model_copy(update={"shards": 4, "tokens": 8_000})},
        },
        {
            "shard_tokens": 1_000,
            "total_tokens": 3_000,
            "sources": {"alpha": totals.model_copy(update={"tokens": 3_000})},
        },
        {"sources": {"beta": totals}},
    ]
    for lie in lies:
        store.publish(**{"index": (reference,), **lie})
        with pytest.raises(HostileStoreError):
            honest.refresh()
        with pytest.raises(HostileStoreError):
            open_store(store.url)


class Trap:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def saved(value: Any) -> bytes:
    body = io.BytesIO()
    torch.save(value, body)
    return body.getvalue()


def resized(body: bytes, size_bytes: int) -> bytes:
    """The same, with a comment behind the zip to be of another size."""
    if len(body) > size_bytes:
        raise ValueError("it is too large")
    padding = size_bytes - len(body)
    return body[:-2] + padding.to_bytes(2, "little") + b"z" * padding


@pytest.mark.parametrize("kind", ["pickle", "pickle behind a bomb", "int32", "float64", "matrix", "named", "zeros"])
def test_shards_of_another_form(store: TokenStore, open_store: OpenDataset, tmp_path: Path, kind: str) -> None:
    ids = torch.from_numpy(fixed_ids(0))
    size = store.entries[0].size_bytes
    trap = tmp_path / "sprung"
    body = {
        "pickle": lambda: resized(saved({"x": Trap(trap)}), size),
        "pickle behind a bomb": lambda: resized(saved({"x": Trap(trap)}), size),
        "int32": lambda: resized(saved(ids.to(torch.int32)), size),
        "float64": lambda: saved(ids.to(torch.float64))[:size].ljust(size, b"\0"),
        "matrix": lambda: saved(ids.reshape(2, 1_000))[:size].ljust(size, b"\0"),
        "named": lambda: saved({"ids": ids})[:size].ljust(size, b"\0"),
        "zeros": lambda: bytes(size),
    }[kind]()
    bomb = BOMBS["a bomb that says its size"]()
    for shard in range(3):
        packed = PackedEntry(key=packed_key(shard), sha256=store.put(packed_key(shard), bomb), size_bytes=len(bomb))
        kept = packed if kind == "pickle behind a bomb" else None
        store.change(shard, sha256=store.put(shard_key(shard), body), packed=kept)
    store.publish()
    with pytest.raises(HostileStoreError, match="vouches for it"):
        take(open_store(store.url), 1)
    assert not trap.exists()


@pytest.mark.parametrize(("position", "value"), [(0, 1_000), (1_999, 2**40), (77, -1), (5, -(2**63)), (5, 2**63 - 1)])
def test_ids_beyond_the_vocabulary(store: TokenStore, open_store: OpenDataset, position: int, value: int) -> None:
    for shard in range(3):
        ids = fixed_ids(shard)
        ids[position] = value
        store.change(shard, sha256=store.put(shard_key(shard), bytes(encode_shard(ids))), packed=None)
    store.publish()
    for _ in range(2):  # Also from the cache.
        with pytest.raises(HostileStoreError, match=f"found {value} at position {position}"):
            take(open_store(store.url), 1)


@pytest.mark.parametrize("value", [0, 1, 3, 4, 9])
def test_reserved_ids_that_text_never_yields(store: TokenStore, open_store: OpenDataset, value: int) -> None:
    for shard in range(3):
        ids = fixed_ids(shard)
        ids[[77, 78]] = value
        store.change(shard, sha256=store.put(shard_key(shard), bytes(encode_shard(ids))), packed=None)
    store.publish()
    found = rf"expected no special id but EOS \(2\), found {value} at position 77 \(2 in all\)"
    for _ in range(2):  # Also from the cache.
        with pytest.raises(HostileStoreError, match=found):
            take(open_store(store.url), 1)


def zstd(content: bytes, **parameters: Any) -> bytes:
    return zstandard.ZstdCompressor(**parameters).compress(content)


NARROW = fixed_ids(0).astype("<u2").tobytes()
BOMBS: dict[str, Callable[[], bytes]] = {
    "a bomb that says its size": lambda: zstd(bytes(1 << 26)),
    "a bomb that does not": lambda: zstd(bytes(1 << 26), write_content_size=False),
    "a bomb that lies": lambda: _relabelled(zstd(bytes(1 << 20)), len(NARROW)),
    "a bomb behind an honest frame": lambda: zstd(NARROW) + zstd(bytes(1 << 24)),
    "an endless row of empty frames": lambda: zstd(NARROW) + zstd(b"") * 50,
    "too few ids": lambda: zstd(NARROW[:-2]),
    "too many ids": lambda: zstd(NARROW + b"\0\0"),
    "ids beyond the vocabulary": lambda: zstd(b"\xff" * len(NARROW)),
    "other ids": lambda: zstd(fixed_ids(1).astype("<u2").tobytes()),
    "a zip": lambda: _zipped(bytes(1 << 20)),
    "nothing": lambda: b"\0",
}


def _relabelled(frame: bytes, content_bytes: int) -> bytes:
    """A frame of a megabyte (its size in four bytes) that says another size."""
    parameters = zstandard.get_frame_parameters(frame)
    size = parameters.content_size.to_bytes(4, "little")
    position = frame.index(size)
    return frame[:position] + content_bytes.to_bytes(4, "little") + frame[position + 4 :]


def _zipped(content: bytes) -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids", content)
    return body.getvalue()


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_packed_forms(store, open_store, caplog, bomb):
    body = bomb()
    for shard in range(3):
        packed = PackedEntry(key=packed_key(shard), sha256=store.put(packed_key(shard), body), size_bytes=len(body))
        store.change(shard, packed=packed)
    store.publish()
    if len(body) > max_packed_bytes(2_000, 1_000):
        with pytest.raises(HostileStoreError, match="transfer form of at most"):
            open_store(store.url)
        return
    dataset = open_store(store.url, count=1)
    with at_most(4):
        rows = next(iter(dataset))["input_ids"]
    if "other ids" not in caplog.text:
        assert "instead" in caplog.text  # The transfer form is given up, the shard itself is right.
    windows = np.stack([fixed_ids(dataset.shards[0])[64 * n : 64 * n + 64] for n in range(31)])
    assert all((windows == row.numpy()).all(axis=1).any() for row in rows)


@pytest.mark.slow
def test_an_index_that_claims_twenty_million_shards(store: TokenStore, open_store: OpenDataset) -> None:
    """The numbers must not become lists before a segment has vouched for any of them."""
    honest = store.manifest.index[0]
    full = [
        SegmentRef(
            key=f"index/segment_{n:05d}-{honest.sha256[:16]}.json",
            sha256=honest.sha256,
            first_shard=1_000 * n,
            shards=1_000,
        )
        for n in range(20_000)
    ]
    total = 20_000_000
    sources = {"alpha": store.manifest.sources["alpha"].model_copy(update={"shards": total, "tokens": total * 2_000})}
    store.publish(index=tuple(full), total_shards=total, total_tokens=total * 2_000, sources=sources)
    for options in ({}, {"holdout": 1}, {"assignment": "rendezvous"}, {"sources": {"alpha": 1.0}}):
        with at_most(150), pytest.raises(LoaderError, match=r"at most 10,000,000 shards"):
            open_store(store.url, **options)
