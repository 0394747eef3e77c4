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
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from loader.fetch.limits import MAX_MANIFEST_BYTES, check_manifest
from loader.fetch.mirrors import Mirrors
from manifests import MANIFEST_KEY, ContractError, Manifest, SignatureError, sha256_hex

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

__all__ = ["KnownStore", "ManifestKeeper"]

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last manifest that was believed."""

    manifest: Manifest
    body: bytes
    checked_at: float
    """Unix time at which a store last vouched for it."""
    etags: dict[str, str]
    """By mirror, the ETag under which it gave this very body."""


@dataclass(frozen=True, slots=True)
class KnownStore:
    """Where one store's JSON files are kept on this machine: a folder beside the cached shards."""

    folder: Path

    @classmethod
    def of(cls, cache_dir: Path, address: str) -> KnownStore:
        """The folder of the store at ``address``."""
        return cls(cache_dir / "stores" / sha256_hex(address.encode())[:16])

    def read(self, name: str) -> bytes | None:
        """A file's bytes; None if it is not there or cannot be read."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, body: bytes) -> None:
        """Keeps a file, all or nothing; a folder that cannot be written only costs the next start a request."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        except OSError as error:
            logger.debug("%s: %s", self.folder, error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
            Path(temporary).replace(self.folder / name)
        except OSError as error:
            logger.debug("%s: %s", self.folder / name, error)
            with suppress(OSError):
                Path(temporary).unlink()

    def keep_only(self, names: frozenset[str]) -> None:
        """Removes what no manifest names any more."""
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in names and not path.name.startswith("."):
                    path.unlink(missing_ok=True)


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

    def current(self) -> Manifest:
        """The manifest, no older than ``max_age_s`` unless no mirror can be reached."""
        seen = self._recall()
        if seen is not None and 0 <= time.time() - seen.checked_at < self._max_age_s:
            return seen.manifest
        return self._ask(seen)

    def newest(self) -> Manifest:
        """The manifest as the store has it now.

        Raises:
            DataUnavailableError: no mirror can be reached, and none was ever seen.
            UntrustedManifestError: no mirror gives one that may be believed.
        """
        return self._ask(self._recall())

    def _ask(self, seen: _Seen | None) -> Manifest:
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
            seen.manifest.updated_at,
            seen.manifest.sequence,
            "; ".join(str(each) for each in refused),
        )
        return seen.manifest

    def _from_store(self, store: ReadableStore, seen: _Seen | None) -> _Seen:
        etag = seen.etags.get(store.url) if seen is not None else None
        if seen is not None and etag is not None:
            found = store.get_if_changed(MANIFEST_KEY, etag, max_bytes=MAX_MANIFEST_BYTES)
            if found is None:
                return _Seen(seen.manifest, seen.body, time.time(), seen.etags)
        else:
            found = store.get(MANIFEST_KEY, max_bytes=MAX_MANIFEST_BYTES)
        body = bytes(found.body)
        manifest = self._believed(body, store.url)
        if seen is None:
            return _Seen(manifest, body, time.time(), {store.url: found.etag})
        self._check_succession(seen, manifest, store.url)
        etags = seen.etags if body == seen.body else {}
        return _Seen(manifest, body, time.time(), {**etags, store.url: found.etag})

    def _believed(self, body: bytes, url: str) -> Manifest:
        """Parses a manifest; checks its signature and its limits."""
        if self._public_key is None:
            _warn_once(url)
            manifest = Manifest.from_json(body)
        else:
            from manifests import verify_manifest

            try:
                manifest = verify_manifest(body, self._load_key(self._public_key))
            except SignatureError as error:
                raise ManifestSignatureError(f"{url}: {error}") from None
        check_manifest(manifest, self._max_shard_bytes)
        return manifest

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

    def _check_succession(self, seen: _Seen, found: Manifest, url: str) -> None:
        """Refuses a manifest that does not follow from the last one.

        Raises:
            ManifestRollbackError: it is older, or of another history.
        """
        last, advice = seen.manifest, f"if the store was made anew, remove {self._known.folder}"
        if found.sequence < last.sequence:
            raise ManifestRollbackError(
                f"{url}: expected a manifest of sequence {last.sequence} or later, as seen before, found "
                f"{found.sequence}: an old copy or a rollback; {advice}"
            )
        same = found.sequence == last.sequence
        if same and _unsigned(found) != _unsigned(last):
            raise ManifestRollbackError(
                f"{url}: expected the manifest of sequence {last.sequence} seen before, found another; {advice}"
            )
        follows = found.sequence == last.sequence + 1 and bool(found.signature) == bool(last.signature)
        if follows and found.previous != sha256_hex(seen.body):
            raise ManifestRollbackError(
                f"{url}: expected manifest {found.sequence} to name manifest {last.sequence}, as it was seen before, as its "
                f"predecessor, found another; {advice}"
            )

    def _recall(self) -> _Seen | None:
        data = self._known.read(MANIFEST_KEY)
        if data is None:
            return None
        head, _, body = data.partition(b"\n")
        try:
            notes = json.loads(head)
            if notes["format"] != _FORMAT or notes["sha256"] != sha256_hex(body):
                raise ValueError("another format or digest")
            manifest = self._believed(body, self._mirrors.addresses[0])
            return _Seen(manifest, body, float(notes["checked_at"]), dict(notes["etags"]))
        except (ValueError, KeyError, TypeError, RecursionError, ContractError) as error:
            logger.warning("%s is damaged (%s): forgetting which manifest was seen last", self._known.folder, error)
            return None
        except UntrustedManifestError as error:
            # Seen before a key was pinned, or under another one: no reason to believe it now.
            logger.info("%s", error)
            return None

    def _remember(self, seen: _Seen) -> None:
        notes = {
            "format": _FORMAT,
            "store": self._mirrors.addresses[0],
            "sha256": sha256_hex(seen.body),
            "checked_at": seen.checked_at,
            "etags": seen.etags,
        }
        self._known.write(MANIFEST_KEY, json.dumps(notes).encode() + b"\n" + seen.body)
        named = {reference.key.replace("/", "-") for reference in seen.manifest.index}
        if seen.manifest.tokenizer is not None:
            named.add(seen.manifest.tokenizer.key.replace("/", "-"))
        self._known.keep_only(frozenset({MANIFEST_KEY, *named}))

    def _as_loader_error(self, store: ReadableStore, error: GenesisError | ContractError) -> LoaderError:
        if isinstance(error, ObjectNotFoundError):
            return DataUnavailableError(
                f"{store.url}: expected a store, found no {MANIFEST_KEY}; check the address, or fill it with 'genesis "
                "populate'"
            )
        if isinstance(error, GenesisError):
            return DataUnavailableError(str(error))
        return UntrustedManifestError(f"{store.url}: {error}")


def _unsigned(manifest: Manifest) -> bytes:
    return manifest.model_copy(update={"signature": None}).to_json()


def _warn_once(url: str) -> None:
    if url not in _warned:
        _warned.add(url)
        logger.warning("%s: no public key is pinned, so nothing vouches for this store; see --public-key", url)
