"""Which manifest may be believed: signed by the pinned key, and never older than one seen before.

The last manifest that was believed is kept beside the cache, one file a store, so that a restart neither asks the store
again within a minute nor can be shown an older state. What comes is asked for with the ETag of what is there (304 costs
a header). A mirror that shows an older manifest, another one of the same sequence, or a successor that names another
predecessor, is passed over with a warning. A mirror that cannot be reached is too: everything a manifest names is
immutable, so a node goes on with the one it has rather than stop.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genesis.errors import GenesisError, ObjectNotFoundError
from genesis.store import ReadableStore
from loader.errors import (
    DataUnavailableError,
    LoaderError,
    LoaderUsageError,
    ManifestRollbackError,
    ManifestSignatureError,
    UntrustedManifestError,
)
from loader.fetch.facts import StoreFacts
from loader.fetch.known_store import KnownStore
from loader.fetch.mirrors import Mirrors
from manifests import MANIFEST_KEY, ContractError, SignatureError, canonical_json, sha256_hex

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = ["MAX_MANIFEST_BYTES", "BelievedManifest", "ManifestKeeper", "known_name"]

logger = logging.getLogger(__name__)

MAX_MANIFEST_BYTES: Final = 1 << 22
"""A store of 600,000 shards has a manifest of 0.1 MB, one of 10 million 1.6 MB."""
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class BelievedManifest:
    """A manifest that may be believed."""

    body: bytes
    """The file, as it came."""
    value: dict[str, Any]
    """Its JSON, defaults filled in."""

    @property
    def facts(self) -> StoreFacts:
        """What the loader needs of it."""
        return StoreFacts.of(self.value)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last manifest that was believed."""

    manifest: BelievedManifest
    checked_at: float
    """Unix time at which a store last vouched for it."""
    etags: dict[str, str]
    """By mirror, the ETag under which it gave this very body."""


class ManifestKeeper:
    """Gives the manifest of one store.

    Args:
        mirrors: the store's addresses.
        known: where its JSON files are kept.
        public_key: PEM file of the key that must have signed it; None to believe any, with a warning.
        max_age_s: how old it may be before a store is asked.
        max_shard_bytes: larger shards are refused.
    """

    def __init__(
        self, mirrors: Mirrors, known: KnownStore, public_key: Path | None, max_age_s: float, max_shard_bytes: int
    ) -> None:
        self._mirrors = mirrors
        self._known = known
        self._public_key = public_key
        self._max_age_s = max_age_s
        self._max_shard_bytes = max_shard_bytes
        self._key: Ed25519PublicKey | None = None

    def current(self) -> BelievedManifest:
        """The manifest, no older than ``max_age_s`` unless no mirror can be reached."""
        if self._public_key is None:
            _warn_once(self._mirrors.addresses[0])
        seen = self._recall()
        if seen is not None and 0 <= time.time() - seen.checked_at < self._max_age_s:
            return seen.manifest
        return self._ask(seen)

    def newest(self) -> BelievedManifest:
        """The manifest as the store has it now.

        Raises:
            DataUnavailableError: no mirror can be reached, and none was ever seen.
            UntrustedManifestError: no mirror gives one that may be believed.
        """
        return self._ask(self._recall())

    def _ask(self, seen: _Seen | None) -> BelievedManifest:
        refused: list[LoaderError] = []
        for store in self._mirrors.each():
            try:
                found = self._from_store(store, seen)
            except (LoaderError, GenesisError, ContractError) as error:
                failure = error if isinstance(error, LoaderError) else self._as_loader_error(store, error)
                logger.info("%s", failure)
                refused.append(failure)
                continue
            self._remember(found)
            return found.manifest
        if seen is None or any(isinstance(each, ManifestSignatureError) for each in refused):
            raise refused[0]
        logger.warning(
            "going on with the manifest of %s (sequence %d), which was seen before: %s",
            seen.manifest.value["updated_at"],
            seen.manifest.value["sequence"],
            "; ".join(str(each) for each in refused),
        )
        return seen.manifest

    def _from_store(self, store: ReadableStore, seen: _Seen | None) -> _Seen:
        etag = seen.etags.get(store.url) if seen is not None else None
        if seen is not None and etag is not None:
            found = store.get_if_changed(MANIFEST_KEY, etag, max_bytes=MAX_MANIFEST_BYTES)
            if found is None:
                return replace(seen, checked_at=time.time())
        else:
            found = store.get(MANIFEST_KEY, max_bytes=MAX_MANIFEST_BYTES)
        manifest = self._believed(bytes(found.body), store.url)
        if seen is None:
            return _Seen(manifest, time.time(), {store.url: found.etag})
        self._check_succession(seen.manifest, manifest, store.url)
        etags = seen.etags if manifest.body == seen.manifest.body else {}
        return _Seen(manifest, time.time(), {**etags, store.url: found.etag})

    def _believed(self, body: bytes, url: str) -> BelievedManifest:
        """Checks a manifest as it came: its form, its signature, its limits."""
        from loader.fetch.limits import check_manifest
        from manifests import Manifest, verify_manifest

        if self._public_key is None:
            manifest = Manifest.from_json(body)
        else:
            try:
                manifest = verify_manifest(body, self._load_key(self._public_key))
            except SignatureError as error:
                raise ManifestSignatureError(f"{url}: {error}") from None
        check_manifest(manifest, self._max_shard_bytes)
        return BelievedManifest(body, manifest.to_object())

    def _load_key(self, path: Path) -> Ed25519PublicKey:
        if self._key is None:
            from manifests import load_public_key

            try:
                self._key = load_public_key(path.expanduser().read_bytes())
            except OSError as error:
                raise LoaderUsageError(f"--public-key {path}: {error.strerror}") from None
            except SignatureError as error:
                raise LoaderUsageError(f"--public-key {path}: {error}") from None
        return self._key

    def _check_succession(self, last: BelievedManifest, found: BelievedManifest, url: str) -> None:
        """Refuses a manifest that does not follow from the last one.

        Raises:
            ManifestRollbackError: it is older, or of another history.
        """
        before, now = last.value["sequence"], found.value["sequence"]
        advice = f"if the store was made anew, remove {self._known.folder}"
        if now < before:
            raise ManifestRollbackError(
                f"{url}: expected a manifest of sequence {before} or later, as seen before, found {now}: an old copy "
                f"or a rollback; {advice}"
            )
        if now == before and _unsigned(found) != _unsigned(last):
            raise ManifestRollbackError(
                f"{url}: expected the manifest of sequence {before} seen before, found another; {advice}"
            )
        follows = now == before + 1 and ("signature" in found.value) == ("signature" in last.value)
        if follows and found.value.get("previous") != sha256_hex(last.body):
            raise ManifestRollbackError(
                f"{url}: expected manifest {now} to follow manifest {before}, as it was seen before, found it to name "
                f"another predecessor; {advice}"
            )

    def _recall(self) -> _Seen | None:
        """The last manifest that was believed, if it would be believed now."""
        data = self._known.read(MANIFEST_KEY)
        if data is None:
            return None
        head, _, rest = data.partition(b"\n")
        body, _, spelt = rest.rpartition(b"\n")
        url = self._mirrors.addresses[0]
        try:
            notes = json.loads(head)
            if notes["sha256"] != sha256_hex(rest):
                raise ValueError("another digest")
            etags, checked_at = dict(notes["etags"]), float(notes["checked_at"])
            if self._public_key is None or notes["public_key"] == self._key_digest():
                manifest = BelievedManifest(body, json.loads(spelt))
                self._check_shard_bytes(manifest.facts.shard_tokens)
            else:
                manifest = self._believed(body, url)
        except (ValueError, KeyError, TypeError, RecursionError, ContractError) as error:
            logger.warning("%s is damaged (%s): forgetting which manifest was seen last", self._known.folder, error)
            return None
        except UntrustedManifestError as error:
            # Seen before a key was pinned, or under another one: no reason to believe it now.
            logger.info("%s", error)
            return None
        return _Seen(manifest, checked_at, etags)

    def _remember(self, seen: _Seen) -> None:
        spelt = seen.manifest.body + b"\n" + canonical_json(seen.manifest.value)
        notes = {
            "store": self._mirrors.addresses[0],
            "sha256": sha256_hex(spelt),
            "checked_at": seen.checked_at,
            "etags": seen.etags,
            "public_key": self._key_digest(),
        }
        self._known.write(MANIFEST_KEY, json.dumps(notes).encode() + b"\n" + spelt)
        facts = seen.manifest.facts
        named = [*facts.index, *([facts.tokenizer] if facts.tokenizer else [])]
        self._known.keep_only(frozenset({MANIFEST_KEY, *(known_name(reference.key) for reference in named)}))

    def _key_digest(self) -> str | None:
        """Names the pinned key by its file's digest."""
        if self._public_key is None:
            return None
        try:
            return sha256_hex(self._public_key.expanduser().read_bytes())
        except OSError as error:
            raise LoaderUsageError(f"--public-key {self._public_key}: {error.strerror}") from None

    def _check_shard_bytes(self, shard_tokens: int) -> None:
        if shard_tokens * 8 > self._max_shard_bytes:
            raise UntrustedManifestError(
                f"expected shards of at most {self._max_shard_bytes:,} bytes, found larger ones"
            )

    def _as_loader_error(self, store: ReadableStore, error: GenesisError | ContractError) -> LoaderError:
        if isinstance(error, ObjectNotFoundError):
            return DataUnavailableError(
                f"{store.url}: expected a store, found no {MANIFEST_KEY}; check the address, or fill it with 'genesis "
                "populate'"
            )
        if isinstance(error, GenesisError):
            return DataUnavailableError(str(error))
        return UntrustedManifestError(f"{store.url}: {error}")


def known_name(key: str) -> str:
    """What the object of a key is called among a `KnownStore`'s files."""
    return key.replace("/", "-")


def _unsigned(manifest: BelievedManifest) -> bytes:
    return canonical_json({name: value for name, value in manifest.value.items() if name != "signature"})


def _warn_once(url: str) -> None:
    if url not in _warned:
        _warned.add(url)
        logger.warning("%s: no public key is pinned, so nothing vouches for this store; see --public-key", url)
