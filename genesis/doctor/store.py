"""Checks of a store, each link of the chain that a reader goes along: address, manifest, signature, segment, shard.

    url → manifest.json ─signature─▶ newest index segment ─sha256─▶ newest shard is there, of its size
                          └─sha256─▶ vocabulary

Where a link is broken, what lies behind it is skipped. Only one segment and one shard's size are looked at: ``genesis
verify`` reads the rest. Behind HTTP and S3 the server's ``Date`` is compared with this machine's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from genesis.doctor.findings import Checkup, Finding, Group, problem_of
from genesis.errors import (
    GenesisError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from genesis.snapshot import PublishedManifest, StoreEmptyError, read_segment, read_vocabulary, require_manifest
from genesis.store import ReadableStore, RetryPolicy, open_readable, open_store
from manifests import (
    ContractError,
    Manifest,
    SignatureError,
    Vocabulary,
    builtin_sources,
    load_public_key,
    shard_key,
    verify_manifest,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

STORE_ERRORS: Final = (GenesisError, ContractError)
MAX_SKEW_S: Final = 120.0
"""By how much two clocks may differ before nodes refuse each other (`rpc.max_clock_skew_s`); S3 bears 15 minutes."""
_DEADLINE_S: Final = 15.0
_DATE_TIMEOUT_S: Final = 5.0
_NOTABLE_SKEW_S: Final = 5.0
_NTP: Final = "set the clock by NTP (timedatectl set-ntp true, or start chronyd)"


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """What a store that can be read has."""

    manifest: Manifest
    vocabulary: Vocabulary | None
    """None: it cannot be had; a finding says why."""


def check_store(
    checkup: Checkup,
    url: str,
    public_key: str | Path | None = None,
    *,
    clock: Callable[[], float] = time.time,
    deadline_s: float = _DEADLINE_S,
) -> StoreSeen | None:
    """Looks along the chain of a store; returns what it has, or None where it cannot be read or believed."""
    try:
        store = open_readable(url, policy=RetryPolicy().lasting(deadline_s))
    except UsageError as error:
        checkup.add(
            Finding.failed("store", "store", problem_of(error), "give --store a folder, s3:// or http(s):// address")
        )
        return None
    with closing(store):
        checkup.add(store_clock_finding(store.url, clock))
        published = _manifest(checkup, store)
        if published is None:
            return None
        key_finding = signature_finding(published, public_key, store.url)
        checkup.add(key_finding)
        if key_finding.status == "failed":
            return None
        checkup.take(
            "store", "index", lambda: index_finding(store, published.manifest), "restore it from a copy of the store"
        )
        return StoreSeen(published.manifest, _vocabulary(checkup, store, published.manifest))


def _manifest(checkup: Checkup, store: ReadableStore) -> PublishedManifest | None:
    try:
        published = require_manifest(store)
    except STORE_ERRORS as error:
        checkup.add(Finding.failed("store", "store", problem_of(error), _cure_of(error, store.url)))
        return None
    manifest = published.manifest
    found = f"{store.url}: commit {manifest.sequence}, {manifest.total_shards} shards, {manifest.total_tokens:,} tokens"
    checkup.add(Finding.ok("store", "store", found, shards=float(manifest.total_shards)))
    return published


def _cure_of(error: Exception, url: str) -> str:
    if isinstance(error, StoreEmptyError | ObjectNotFoundError):
        return "check the address and its prefix, or fill it: genesis populate"
    if isinstance(error, StoreAccessError):
        if url.startswith("s3://"):
            return "check AWS_PROFILE or AWS_ACCESS_KEY_ID, its secret, the region, and that they may read the bucket"
        if "://" in url and not url.startswith("file:"):
            return "make the store public, or give the address at which it is"
        return "check the path, and that this user may read it"
    if isinstance(error, StoreUnavailableError):
        host = urlsplit(url).hostname
        return f"check the address, name service and proxy (https_proxy), and that {host or 'the server'} runs"
    return "check the address; if it is right, restore the object from a copy"


def signature_finding(published: PublishedManifest, public_key: str | Path | None, url: str) -> Finding:
    """Whether the pinned key has signed the manifest."""
    signature = published.manifest.signature
    if not public_key:
        who = f"signed by {signature.key_id}" if signature is not None else "unsigned"
        return Finding.skipped("store", "signature", f"no key is pinned (--public-key FILE); the manifest is {who}")
    try:
        key = _read_key(Path(public_key).expanduser())
        verify_manifest(published.body, key)
    except OSError as error:
        return Finding.failed(
            "store",
            "signature",
            f"--public-key {public_key}: {error.strerror}",
            "give the file of the store's public key",
        )
    except SignatureError as error:
        return Finding.failed(
            "store",
            "signature",
            f"{url}: {problem_of(error)}",
            "ask the store's owner for its public key (genesis keygen made it) and for a signed manifest "
            "(genesis populate --sign-key); believe no store that is not signed by it",
        )
    return Finding.ok("store", "signature", f"signed by the pinned key {signature.key_id if signature else ''}")


def _read_key(path: Path) -> Ed25519PublicKey:
    return load_public_key(path.read_bytes())


def index_finding(store: ReadableStore, manifest: Manifest) -> Finding:
    """Whether the newest segment is the one that the manifest names, and its newest shard is there, of its size."""
    if not manifest.index:
        return Finding.warning(
            "store", "index", "expected an index, found a manifest without one", "populate it with this release"
        )
    segment = read_segment(store, manifest.index[-1])
    if not segment.shards:
        return Finding.failed(
            "store", "index", f"expected shards in {manifest.index[-1].key}, found none", "populate it"
        )
    newest = segment.shards[-1]
    if newest.id + 1 != manifest.total_shards:
        text = f"expected shard {manifest.total_shards - 1} as the last of {manifest.index[-1].key}, found {newest.id}"
        return Finding.failed("store", "index", text, "restore manifest.json and the index from one copy of the store")
    where = newest.packed.key if newest.packed is not None else shard_key(newest.id)
    size_bytes = newest.packed.size_bytes if newest.packed is not None else newest.size_bytes
    there = store.head(where)
    if there is None or there.size_bytes != size_bytes:
        found = "none" if there is None else f"{there.size_bytes:,}"
        return Finding.failed(
            "store",
            "index",
            f"expected {where} of {size_bytes:,} bytes, found {found}",
            "restore that object from a copy, then: genesis verify",
        )
    return Finding.ok("store", "index", f"{manifest.index[-1].key} is what the manifest names; {where} is there")


def _vocabulary(checkup: Checkup, store: ReadableStore, manifest: Manifest) -> Vocabulary | None:
    try:
        found = read_vocabulary(store, manifest)
    except STORE_ERRORS as error:
        cure = "restore the vocabulary from a copy of the store; its ids mean nothing without it"
        checkup.add(Finding.failed("store", "vocabulary", problem_of(error), cure))
        return None
    checkup.add(Finding.ok("store", "vocabulary", f"{found.next_merge_id:,} ids", ids=float(found.next_merge_id)))
    return found


# -- the clock ---------------------------------------------------------------------------------------------------------


def skew_finding(group: Group, check: str, who: str, offset_s: float, max_skew_s: float = MAX_SKEW_S) -> Finding:
    """What a difference of clocks means; ``offset_s``: how far the other is ahead of this machine."""
    side = "behind" if offset_s > 0 else "ahead of"
    text = f"this machine's clock is {abs(offset_s):.1f} s {side} that of {who}"
    if abs(offset_s) > max_skew_s:
        text = f"expected clocks at most {max_skew_s:g} s apart, found: {text}"
        cure = f"{_NTP}, here or there: ask another clock which one is wrong"
        return Finding.failed(group, check, text, cure, offset_s=offset_s)
    if abs(offset_s) > _NOTABLE_SKEW_S:
        return Finding.warning(group, check, text, _NTP, offset_s=offset_s)
    return Finding.ok(group, check, text, offset_s=offset_s)


def store_clock_finding(url: str, clock: Callable[[], float]) -> Finding:
    """How far this machine's clock is from that of the store's server; a folder has none."""
    scheme = urlsplit(url).scheme
    if scheme not in ("http", "https", "s3"):
        return Finding.skipped("store", "store-clock", "the store is a folder of this machine")
    try:
        address = _s3_address() if scheme == "s3" else url
        offset_s = http_clock_offset_s(address, clock)
    except (GenesisError, OSError, ValueError) as error:
        return Finding.skipped("store", "store-clock", f"no Date from the store's server: {error}")
    if offset_s is None:
        return Finding.skipped("store", "store-clock", "the store's server sends no Date")
    return skew_finding("store", "store-clock", "the store's server", offset_s)


def http_clock_offset_s(address: str, clock: Callable[[], float]) -> float | None:
    """How many seconds a web server's clock is ahead; None: it does not say. Raises StoreError: it does not answer."""
    import httpx

    try:
        began_at = clock()
        # The body is not read; a HEAD some servers do not answer.
        with httpx.stream("GET", address, timeout=_DATE_TIMEOUT_S) as response:
            date = response.headers.get("date", "")
        ended_at = clock()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StoreError(str(error) or type(error).__name__) from error
    if not date:
        return None
    # Sent with whole seconds: half of one is the middle of what it can mean.
    return parsedate_to_datetime(date).timestamp() + 0.5 - (began_at + ended_at) / 2


def _s3_address() -> str:
    import botocore.exceptions

    from genesis.store.s3_client import S3Connection

    connection = S3Connection(RetryPolicy().lasting(5.0))
    try:
        return str(connection.client().meta.endpoint_url)
    except botocore.exceptions.BotoCoreError as error:
        raise StoreError(str(error)) from error
    finally:
        connection.close()


# -- writing -----------------------------------------------------------------------------------------------------------


def writer_finding(url: str) -> Finding:
    """Who may write to the store now: whether a populator could begin."""
    from genesis.status import read_status

    with closing(open_readable(url, policy=RetryPolicy().lasting(_DEADLINE_S))) as store:
        writer = read_status(store, builtin_sources()).writer
    if writer is None or writer.state == "released":
        return Finding.ok("store", "writer", "nobody is writing to it")
    if writer.state == "stale":
        return Finding.ok("store", "writer", f"the lease of {writer.description} has gone stale: a populator may begin")
    return Finding.warning(
        "store",
        "writer",
        f"{writer.description} is writing to it",
        "wait until it ends, or stop it, before another begins",
    )


def conditional_writes_finding(url: str) -> Finding:
    """Whether the store honours conditional writes, as the populator asks it; writes small objects and removes them."""
    with closing(open_store(url, policy=RetryPolicy().lasting(_DEADLINE_S))) as store:
        if store.conditional_writes:
            return Finding.ok("store", "conditional-writes", "honoured: of two populators one is refused")
    return Finding.warning(
        "store",
        "conditional-writes",
        "expected a store that honours If-Match and If-None-Match, found one that ignores them",
        "run one populator at a time, or use a server that has them (S3, MinIO, Ceph since 19)",
    )
