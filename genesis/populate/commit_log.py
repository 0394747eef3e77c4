"""The commit protocol: a store always holds a complete prefix of the run, whichever process is killed at any time.

One commit is four writes, in this order:

1. the shards, put if absent (done before `CommitLog.commit_shards` is called);
2. the index segment, under a name with its digest;
3. checkpoints.json, by compare-and-swap on its ETag: *this is the commit*. It carries the manifest it stands for;
4. manifest.json, which readers trust.

Killed before 3, nothing has happened: the next run makes the same objects again and finds them there. Killed after,
the next start publishes the manifest the checkpoint carries. A writer that was ousted fails at 3, because taking
the lease changed the object; it has then written nothing that a manifest names.

The cost of a commit does not depend on the store's size: one segment of at most 1,000 entries is rewritten (0.35 MB),
and the list of segments grows by 0.15 KB per 1,000 shards.

Which index segments in a store are of the past, and since when: told from their names and times alone.

A segment counts as replaced from the moment the next one of its number was written, not from when it was itself: a
reader may have got the manifest that names it a second before. The newest of a number belongs to the manifest, or to a
commit that was not completed; it counts from its own time, and the caller keeps what the manifest names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from genesis.errors import (
    LeaseError,
    LeaseLostError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    StoreRemovedError,
    TokenizerError,
    UsageError,
)
from genesis.populate.crashpoint import crash_point
from genesis.populate.lease import LEASE_S, check_free, describe_writer, lease_end, this_process
from genesis.store.base import CachePolicy, ObjectInfo, Store
from genesis.tokenizer import FrozenTokenizer, StoreTokenizer, read_tokenizer
from manifests import (
    CHECKPOINTS_KEY,
    FROZEN_FORMAT,
    FROZEN_TOKENIZER_VERSION,
    MANIFEST_KEY,
    SEGMENT_SHARDS,
    TOKENIZER_KEY,
    Checkpoints,
    ContractError,
    InputRead,
    Manifest,
    Segment,
    SegmentRef,
    ShardEntry,
    SourceCheckpoint,
    SourceTotals,
    TokenizerRef,
    Writer,
    canonical_json,
    format_time,
    key_id,
    segment_key,
    sha256_hex,
    shard_key,
    sign_manifest,
    vocabulary_key,
)

logger = logging.getLogger(__name__)

SUPERSEDED_KEEP_S = 3600.0
"""How long an index segment is kept after a longer one replaced it, for readers with an older manifest."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True)
class CommitLog:
    """The state of a store as its one writer knows it, and the only code that writes its four JSON files.

    Use `CommitLog.open`. Methods may be called from several threads.

    Attributes:
        store: where everything is.
        shard_tokens: ids in a shard, fixed for the life of the store.
        sign_key: signs manifests, if given.
        on_publish: called after each publication (to invalidate a CDN).
    """

    store: Store
    shard_tokens: int
    source: str | None = None
    sign_key: Ed25519PrivateKey | None = None
    on_publish: Callable[[], None] = lambda: None
    lease_s: float = LEASE_S
    superseded_keep_s: float = SUPERSEDED_KEEP_S
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    manifest: Manifest | None = None
    """The newest manifest, unsigned; None until something was committed."""
    tokens_per_s: float | None = None
    input_read: dict[str, InputRead] = field(default_factory=dict)
    """How far each source's input was turned into shards, as far as that is known; for telling people."""
    _etag: str | None = None
    _manifest_etag: str | None = None
    _manifest_sha256: str | None = None
    _tokenizer_etag: str | None = None
    _tokenizer_sha256: str | None = None
    _tail: list[bytes] = field(default_factory=list)
    """Entries of the last segment, as JSON."""
    _token: int = 0
    _superseded: dict[str, float] = field(default_factory=dict)
    """Segments that a longer one has replaced, and when."""
    _published: bool = False
    """Something was published that `on_publish` has not been told of."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def open(self) -> None:
        """Takes the lease, and mends what a killed writer left unpublished.

        Raises:
            LeaseHeldError: another populator is writing.
            ContractError: a file of the store is damaged.
            UsageError: the store has shards of another length.
        """
        with self._lock:
            self._read()
            self._check_shard_tokens()
            self._check_tokenizer_copy()
            writer = self.checkpoints.writer
            self._token = (writer.token if writer else 0) + 1
            self.input_read = dict((writer.input_read if writer else None) or {})
            if writer is not None and writer.expires_at is not None:
                logger.info("taking over the stale lease of %s", describe_writer(writer))
            self._swap(self.checkpoints)
            crash_point("lease-taken")
            try:
                if self.manifest is not None:
                    self._tail = [_entry_json(entry) for entry in read_tail(self.store, self.manifest)]
                    self._publish()
                self._sweep_index()
            except (StoreError, ContractError):
                with suppress(StoreError, LeaseError):
                    self.close()
                raise
        self._tell()

    def renew(self) -> None:
        """Prolongs the lease.

        Raises:
            LeaseLostError: another populator took it.
        """
        with self._lock:
            self._swap(self.checkpoints)

    def close(self) -> None:
        """Gives the lease back."""
        with self._lock:
            self._delete_superseded()
            writer = Writer(id=str(this_process()), token=self._token, input_read=self.input_read or None)
            self._swap(self.checkpoints.model_copy(update={"writer": writer}), release=True)

    @property
    def next_shard_id(self) -> int:
        """The id the next shard gets."""
        return self.manifest.total_shards if self.manifest else 0

    @property
    def tokenizer_sha256(self) -> str | None:
        """Digest of the newest vocabulary's file; None if the store has none."""
        return self.manifest.tokenizer.sha256 if self.manifest and self.manifest.tokenizer else None

    def read_tokenizer(self) -> StoreTokenizer | None:
        """The store's newest vocabulary; of an empty store with only a tokenizer.json, that one.

        Raises:
            TokenizerError, ContractError: it is damaged.
        """
        if self.manifest is not None and self.manifest.tokenizer is not None:
            reference = self.manifest.tokenizer
            body = self.store.get(reference.key).body
            if sha256_hex(body) != reference.sha256:
                raise TokenizerError(
                    f"{reference.key} does not match the manifest: expected sha256 {reference.sha256}, "
                    f"found {sha256_hex(body)}; restore that object, then run the same command again"
                )
            return read_tokenizer(body, name=reference.key)
        try:
            return read_tokenizer(self.store.get(TOKENIZER_KEY).body)
        except ObjectNotFoundError:
            return None

    def commit_vocabulary(self, tokenizer: StoreTokenizer) -> None:
        """Makes ``tokenizer`` the store's vocabulary. With one made elsewhere the store is of format 2 from here on.

        Raises:
            LeaseLostError: another populator took the store over; nothing was changed.
        """
        body = tokenizer.to_file().to_json()
        digest = sha256_hex(body)
        if digest == self.tokenizer_sha256:
            return
        reference = TokenizerRef(key=vocabulary_key(digest), sha256=digest, next_merge_id=tokenizer.next_merge_id)
        changes: dict[str, object] = {"tokenizer": reference}
        if isinstance(tokenizer, FrozenTokenizer):
            changes["tokenizer"] = reference.model_copy(update={"eos_id": tokenizer.eos_id})
            changes |= {"format": FROZEN_FORMAT, "tokenizer_version": FROZEN_TOKENIZER_VERSION}
        with self._lock:
            self.store.put(reference.key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
            crash_point("vocabulary-stored")
            self._commit(self._next_manifest(**changes), self.checkpoints.sources)
        self._tell()

    def commit_shards(
        self,
        entries: Sequence[ShardEntry],
        source: str,
        checkpoint: SourceCheckpoint,
        input_read: InputRead | None = None,
    ) -> None:
        """Commits shards that are in the store already, with the position that follows the last of them.

        Args:
            entries: the shards, ids running on from `next_shard_id`; may be empty, to commit a position alone.
            source: whose they are.
            checkpoint: where the source stands after them.
            input_read: how far its input was turned into shards; None if that has not changed.

        Raises:
            LeaseLostError: another populator took the store over; nothing was committed.
            StoreRemovedError: the store was removed meanwhile.
        """
        with self._lock:
            index, tail, replaced = self._store_segments(entries)
            crash_point("segment-stored")
            totals = self._totals_after(entries, source, checkpoint)
            manifest = self._next_manifest(
                index=index,
                sources=totals,
                total_shards=self.next_shard_id + len(entries),
                total_tokens=sum(each.tokens for each in totals.values()),
                total_size_bytes=(self.manifest.total_size_bytes if self.manifest else 0)
                + sum(entry.size_bytes for entry in entries),
            )
            if input_read is not None:
                self.input_read = {**self.input_read, source: input_read}
            self._commit(manifest, {**self.checkpoints.sources, source: checkpoint})
            self._tail = tail
            self._superseded.update(dict.fromkeys(replaced, time.time()))
            self._delete_superseded()
        self._tell()

    def _read(self) -> None:
        """Reads both states; the holder of the lease may commit between the two reads, so that is looked at first."""
        self.checkpoints, self._etag = read_checkpoints(self.store)
        check_free(self.checkpoints.writer, self.store.url, _now())
        self.manifest = self.checkpoints.manifest
        try:
            published = self.store.get(MANIFEST_KEY)
        except ObjectNotFoundError:
            if self._etag is None:
                self._check_nothing_is_lost()
            return
        self._manifest_etag, self._manifest_sha256 = published.etag, sha256_hex(published.body)
        found = Manifest.from_json(published.body)
        self._check_signer(found)
        if self.manifest is None or found.sequence > self.manifest.sequence:
            check_free(read_checkpoints(self.store)[0].writer, self.store.url, _now())
            raise ContractError(
                f"{self.store.url}: manifest.json has sequence {found.sequence}, but checkpoints.json "
                f"{'is missing' if self.manifest is None else f'stands at {self.manifest.sequence}'}; "
                "restore checkpoints.json, or populate into another store"
            )

    def _check_nothing_is_lost(self) -> None:
        """A store without its documents is not an empty one: a populator's first act is to write checkpoints.json."""
        remains = next(iter(self.store.list("index/")), None) or self.store.head(shard_key(0))
        if remains is not None:
            raise ContractError(
                f"{self.store.url} holds {remains.key} but neither manifest.json nor checkpoints.json; restore one of "
                "them, remove what is left there, or populate into another store"
            )

    def _check_signer(self, published: Manifest) -> None:
        """Readers that pinned the signer would refuse an unsigned manifest, so that takes more than forgetting."""
        if published.signature is None:
            return
        signer = published.signature.key_id
        if self.sign_key is None:
            raise UsageError(
                f"{self.store.url} is signed by key {signer}; give --sign-key, or readers that trust that key would "
                "refuse the store (to go on unsigned all the same, delete its manifest.json first)"
            )
        if key_id(self.sign_key.public_key()) != signer:
            logger.warning(
                "%s was signed by key %s and will be by %s: readers need the new public key",
                self.store.url, signer, key_id(self.sign_key.public_key()),
            )  # fmt: skip

    def _check_shard_tokens(self) -> None:
        if self.manifest is not None and self.manifest.shard_tokens != self.shard_tokens:
            raise UsageError(
                f"{self.store.url} has shards of {self.manifest.shard_tokens} tokens, asked for {self.shard_tokens}; "
                f"give --shard-tokens {self.manifest.shard_tokens} or another --store"
            )

    def _check_tokenizer_copy(self) -> None:
        """tokenizer.json may lag behind the vocabulary (a writer was killed); it may not contradict it."""
        newest = self.manifest.tokenizer if self.manifest else None
        try:
            published = self.store.get(TOKENIZER_KEY)
        except ObjectNotFoundError:
            return
        body = published.body
        self._tokenizer_etag, self._tokenizer_sha256 = published.etag, sha256_hex(body)
        if newest is None or self._tokenizer_sha256 == newest.sha256:
            return
        remedy = f"copy {newest.key} of {self.store.url} over tokenizer.json, then run the same command again"
        try:
            found = read_tokenizer(body)
            current = self.read_tokenizer()
        except (ContractError, TokenizerError) as error:
            raise TokenizerError(f"the store's tokenizer.json is damaged ({error}); {remedy}") from None
        # One made elsewhere has a single state, so whatever is not equal to it is another.
        if (
            current is None
            or isinstance(current, FrozenTokenizer)
            or isinstance(found, FrozenTokenizer)
            or current.merges[: len(found.merges)] != found.merges
        ):
            raise TokenizerError(f"the store's tokenizer.json is not an earlier state of its vocabulary; {remedy}")

    def _commit(self, manifest: Manifest, sources: dict[str, SourceCheckpoint]) -> None:
        # Of the manifest's format: a populator that does not know that must not go on from what it reads here.
        update = {"manifest": manifest, "sources": sources, "format": manifest.format}
        self._swap(self.checkpoints.model_copy(update=update))
        self.manifest = manifest
        crash_point("checkpoint-stored")
        self._publish()

    def _swap(self, checkpoints: Checkpoints, *, release: bool = False) -> None:
        """Replaces checkpoints.json if it is still the one this writer knows: the compare-and-swap."""
        if not release:
            writer = Writer(
                id=str(this_process()),
                token=self._token,
                expires_at=lease_end(_now(), self.lease_s),
                source=self.source,
                tokens_per_s=self.tokens_per_s,
                input_read=self.input_read or None,
            )
            checkpoints = checkpoints.model_copy(update={"writer": writer})
        body = checkpoints.to_json()
        try:
            self._etag = self._put_checkpoints(body, self._etag)
        except PreconditionFailedError:
            self._etag = self._put_checkpoints(body, self._own_etag())
        self.checkpoints = checkpoints

    def _put_checkpoints(self, body: bytes, etag: str | None) -> str:
        return self.store.put(CHECKPOINTS_KEY, body, cache=CachePolicy.NONE, if_absent=etag is None, if_match=etag)

    def _own_etag(self) -> str:
        """The ETag of a state this very writer left there though it was told that it had failed.

        Raises:
            LeaseLostError: the state is another writer's.
            StoreRemovedError: there is no state any more.
        """
        found, etag = read_checkpoints(self.store)
        if etag is None or not self._is_own(found.writer):
            raise self._lost(CHECKPOINTS_KEY)
        return etag

    def _is_own(self, writer: Writer | None) -> bool:
        return writer is not None and (writer.id, writer.token) == (str(this_process()), self._token)

    def _lost(self, key: str) -> StoreError | LeaseLostError:
        """Why the object under ``key`` is not the one this writer left there."""
        found, etag = read_checkpoints(self.store)
        if etag is None and self._etag is not None:
            return StoreRemovedError(
                f"{self.store.url}: {CHECKPOINTS_KEY} is gone: the store was removed or emptied while this populator "
                "wrote to it, which stops; restore it, or remove what is left there and run the same command again"
            )
        if self._is_own(found.writer):
            return StoreError(
                f"{self.store.url}: {key} was replaced or removed by something that holds no lease, and this "
                "populator stops; see whether the rest of the store is there, restore what is not, and run the same "
                "command again: what is committed there is published anew"
            )
        who = describe_writer(found.writer) if found.writer else "an unknown writer"
        return LeaseLostError(
            f"{self.store.url} was taken over by {who}; this populator stops, and everything committed is kept"
        )

    def _publish(self) -> None:
        """Brings tokenizer.json and manifest.json up to the checkpoint's manifest."""
        manifest = self.manifest
        if manifest is None:
            return
        if manifest.tokenizer is not None and manifest.tokenizer.sha256 != self._tokenizer_sha256:
            body = self.store.get(manifest.tokenizer.key).body
            self._tokenizer_etag = self._overwrite(TOKENIZER_KEY, body, self._tokenizer_etag)
            self._tokenizer_sha256 = manifest.tokenizer.sha256
            crash_point("tokenizer-published")
        body = (sign_manifest(manifest, self.sign_key) if self.sign_key else manifest).to_json()
        if sha256_hex(body) == self._manifest_sha256:
            return
        self._manifest_etag = self._overwrite(MANIFEST_KEY, body, self._manifest_etag)
        self._manifest_sha256 = sha256_hex(body)
        self._published = True
        crash_point("manifest-published")

    def _overwrite(self, key: str, body: bytes, etag: str | None) -> str:
        """Replaces the object this writer knows under ``key``; a writer ousted since its commit must not."""
        try:
            return self.store.put(key, body, cache=CachePolicy.SHORT, if_absent=etag is None, if_match=etag)
        except PreconditionFailedError:
            raise self._lost(key) from None

    def _tell(self) -> None:
        """Tells the CDN, outside the lock: that may take longer than a lease."""
        if self._published:
            self._published = False
            self.on_publish()

    def _next_manifest(self, **changes: object) -> Manifest:
        """The manifest of the next commit: the present one with ``changes``."""
        now = format_time(_now())
        present = self.manifest or Manifest(
            total_shards=0,
            total_tokens=0,
            total_size_bytes=0,
            sources={},
            shard_tokens=self.shard_tokens,
            created_at=now,
            updated_at=now,
        )
        sequence = present.sequence + 1
        return present.model_copy(
            update={**changes, "sequence": sequence, "previous": self._manifest_sha256, "updated_at": now}
        )

    def _totals_after(
        self, entries: Sequence[ShardEntry], source: str, checkpoint: SourceCheckpoint
    ) -> dict[str, SourceTotals]:
        sources = dict(self.manifest.sources) if self.manifest else {}
        before = sources.get(source)
        sources[source] = SourceTotals(
            shards=(before.shards if before else 0) + len(entries),
            tokens=(before.tokens if before else 0) + sum(entry.tokens for entry in entries),
            documents_processed=checkpoint.documents_processed,
            last_shard_id=checkpoint.last_shard_id,
        )
        return sources

    def _store_segments(self, entries: Sequence[ShardEntry]) -> tuple[tuple[SegmentRef, ...], list[bytes], list[str]]:
        """Puts the segments that hold ``entries``.

        Returns:
            The whole index, the entries of its last segment, and the keys of segments that are in it no more. Nothing
            is noted before the commit that makes them true.
        """
        index = list(self.manifest.index) if self.manifest else []
        tail, replaced = self._tail, list[str]()
        remaining = [_entry_json(entry) for entry in entries]
        while remaining:
            if len(tail) == SEGMENT_SHARDS:
                tail = []
            if tail:
                replaced.append(index.pop().key)
            room = SEGMENT_SHARDS - len(tail)
            tail, remaining = tail + remaining[:room], remaining[room:]
            index.append(self._store_segment(len(index), tail))
        return tuple(index), tail, replaced

    def _store_segment(self, number: int, entries: list[bytes]) -> SegmentRef:
        body = Segment.join(entries)
        digest = sha256_hex(body)
        key = segment_key(number, digest)
        self.store.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        return SegmentRef(key=key, sha256=digest, first_shard=number * SEGMENT_SHARDS, shards=len(entries))

    def _delete_superseded(self) -> None:
        """Deletes segments that were replaced long enough ago and that the manifest does not name (again)."""
        deadline = time.time() - self.superseded_keep_s
        named = {segment.key for segment in self.manifest.index} if self.manifest else set()
        for key in [key for key, since in self._superseded.items() if since <= deadline or key in named]:
            del self._superseded[key]
            if key not in named:
                self.store.delete(key)

    def _sweep_index(self) -> None:
        """Notes the segments that earlier runs left behind."""
        try:
            self._superseded = replaced_at(self.store.list("index/"), time.time())
        except StoreError as error:
            logger.warning("old index segments are not cleaned up: %s", error)
            return
        self._delete_superseded()


def _entry_json(entry: ShardEntry) -> bytes:
    return canonical_json(entry.model_dump(mode="json", exclude_none=True))


def read_checkpoints(store: Store) -> tuple[Checkpoints, str | None]:
    """The store's checkpoints and their ETag; empty ones and None if there are none.

    Raises:
        ContractError: checkpoints.json is damaged.
    """
    try:
        found = store.get(CHECKPOINTS_KEY)
    except ObjectNotFoundError:
        return Checkpoints(), None
    return Checkpoints.from_json(found.body), found.etag


def read_tail(store: Store, manifest: Manifest) -> tuple[ShardEntry, ...]:
    """The entries of the manifest's last segment.

    Raises:
        ContractError: the segment does not match the manifest.
    """
    if not manifest.index:
        return ()
    last = manifest.index[-1]
    body = store.get(last.key).body
    if sha256_hex(body) != last.sha256:
        raise ContractError(
            f"{last.key}: expected sha256 {last.sha256}, found {sha256_hex(body)}; restore that object from a copy"
        )
    return Segment.from_json(body, name=last.key).shards


def replaced_at(segments: Iterable[ObjectInfo], now: float) -> dict[str, float]:
    """When each segment was replaced, in seconds since the epoch, by key.

    Args:
        segments: what lies under ``index/``.
        now: taken for the time of an object whose store does not say.
    """
    by_number: dict[str, list[tuple[float, str]]] = {}
    for info in segments:
        written_at = info.modified_at.timestamp() if info.modified_at else now
        by_number.setdefault(info.key.partition("-")[0], []).append((written_at, info.key))
    times: dict[str, float] = {}
    for written in by_number.values():
        written.sort()
        for (_, key), (next_written_at, _) in pairwise([*written, written[-1]]):
            times[key] = next_written_at
    return times
