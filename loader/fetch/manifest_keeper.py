"""Which manifest is trusted: signed by the pinned key, and never older than one seen before.

A manifest is requested with the ETag of the remembered one (304 costs a header), and at the start not at all if that
was verified within a minute. A manifest that is older, another one of the same sequence, or a successor that names
another predecessor is refused, and the next mirror is asked. If none gives one that can be trusted:

- At the start a node goes on with the remembered manifest, with a warning, if any mirror was unreachable or showed an
  older copy (a CDN may, for a while): everything a manifest names is immutable. If every mirror shows another history,
  or a signature that does not hold, that is an error.
- `newest` raises the error.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from genesis.errors import GenesisError, ObjectNotFoundError
from genesis.store import ReadableStore, folder_of
from loader.errors import (
    DataUnavailableError,
    LoaderError,
    LoaderUsageError,
    ManifestRollbackError,
    ManifestSignatureError,
    UntrustedManifestError,
)
from loader.fetch.known_store import ManifestMemory, RememberedManifest, TrustedManifest
from loader.fetch.mirrors import Mirrors
from manifests import MANIFEST_KEY, ContractError, SignatureError, canonical_json, sha256_hex, shard_file_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

logger = logging.getLogger(__name__)

MAX_MANIFEST_BYTES: Final = 1 << 22
"""A store of 600,000 shards has a manifest of 0.1 MB."""

_warned: set[str] = set()


class _OlderManifestError(ManifestRollbackError):
    """An older manifest: a rollback, or a stale cache."""


class ManifestKeeper:
    """Fetches and verifies the manifest of one store.

    Args:
        mirrors: the store's addresses.
        memory: the manifest trusted before.
        public_key: PEM file of the key that must have signed it; None to trust any, with a warning.
        max_age_s: a remembered manifest verified since is taken without a request.
        max_shard_bytes: larger shards are refused.
    """

    def __init__(
        self, mirrors: Mirrors, memory: ManifestMemory, public_key: Path | None, max_age_s: float, max_shard_bytes: int
    ) -> None:
        self._mirrors = mirrors
        self._memory = memory
        self._public_key = public_key
        self._max_age_s = max_age_s
        self._max_shard_bytes = max_shard_bytes
        self._key: Ed25519PublicKey | None = None

    def current(self) -> TrustedManifest:
        """The manifest to begin with.

        Raises:
            DataUnavailableError: no mirror can be reached, and none is remembered.
            UntrustedManifestError: no mirror gives one that can be trusted.
        """
        remote = next((url for url in self._mirrors.addresses if folder_of(url) is None), None)
        if self._public_key is None and remote is not None:  # A folder of this machine is trusted.
            _warn_once(remote)
        seen = self._memory.recall(self._is_trusted)
        if seen is not None and 0 <= time.time() - seen.checked_at < self._max_age_s:
            return seen.manifest
        refused: list[LoaderError] = []
        found = self._ask(seen, refused)
        if found is not None:
            return found
        if seen is None or all(map(_is_fatal, refused)):
            raise _worst(refused)
        logger.warning(
            "going on with the manifest of %s (sequence %d), which was seen before: %s",
            seen.manifest.facts.updated_at,
            seen.manifest.facts.sequence,
            "; ".join(str(each) for each in refused),
        )
        return seen.manifest

    def newest(self, floor: TrustedManifest) -> TrustedManifest:
        """The manifest as the store has it now.

        Args:
            floor: the manifest in use: nothing older is trusted, whatever the disk remembers.

        Raises:
            DataUnavailableError: no mirror can be reached.
            UntrustedManifestError: no mirror gives one that can be trusted.
        """
        seen = self._memory.recall(self._is_trusted)
        if seen is None or seen.manifest.facts.sequence < floor.facts.sequence:
            seen = RememberedManifest(floor, 0.0, {}, self._key_digest())
        refused: list[LoaderError] = []
        found = self._ask(seen, refused)
        if found is None:
            raise _worst(refused)
        return found

    def _ask(self, seen: RememberedManifest | None, refused: list[LoaderError]) -> TrustedManifest | None:
        """The first manifest that can be trusted; adds the mirrors' errors to ``refused``."""
        for store in self._mirrors.each():
            try:
                found = self._from_store(store, seen)
            except (LoaderError, GenesisError, ContractError) as error:
                refused.append(_as_loader_error(store, error))
                # The caller tells the error of a single mirror.
                logger.log(logging.INFO if len(self._mirrors.addresses) > 1 else logging.DEBUG, "%s", refused[-1])
                continue
            self._memory.remember(found, self._is_trusted)
            return found.manifest
        return None

    def _from_store(self, store: ReadableStore, seen: RememberedManifest | None) -> RememberedManifest:
        etag = seen.etags.get(store.url) if seen is not None else None
        if seen is not None and etag is not None:
            answer = store.get_if_changed(MANIFEST_KEY, etag, max_bytes=MAX_MANIFEST_BYTES)
            if answer is None:
                return replace(seen, checked_at=time.time(), public_key=self._key_digest())
        else:
            answer = store.get(MANIFEST_KEY, max_bytes=MAX_MANIFEST_BYTES)
        found = self._verified(answer.body, store.url)
        etags = {store.url: answer.etag}
        if seen is not None:
            self._check_succession(seen.manifest, found, store.url)
            if found.body == seen.manifest.body:
                etags = {**seen.etags, **etags}
        return RememberedManifest(found, time.time(), etags, self._key_digest())

    def _verified(self, body: bytes, url: str) -> TrustedManifest:
        """Checks the form, signature and limits of a manifest."""
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
        return TrustedManifest.of(body)

    def _check_succession(self, last: TrustedManifest, found: TrustedManifest, url: str) -> None:
        """Checks that a manifest follows from the last one: `ManifestRollbackError` if it does not."""
        before, now = last.facts, found.facts
        advice = f"if the store was made anew, remove {self._memory.folders}"
        if now.sequence < before.sequence:
            raise _OlderManifestError(
                f"{url}: expected a manifest of sequence {before.sequence} or later, as seen before, found "
                f"{now.sequence}: an old copy or a rollback; {advice}"
            )
        if now.sequence == before.sequence and _unsigned(found) != _unsigned(last):
            raise ManifestRollbackError(
                f"{url}: expected the manifest of sequence {before.sequence} seen before, found another; {advice}"
            )
        follows = now.sequence == before.sequence + 1 and now.is_signed == before.is_signed
        if follows and now.previous != sha256_hex(last.body):
            raise ManifestRollbackError(
                f"{url}: expected manifest {now.sequence} to follow manifest {before.sequence}, as it was seen before, "
                f"found it to name another predecessor; {advice}"
            )

    def _is_trusted(self, seen: RememberedManifest) -> bool:
        """Whether a remembered manifest would be trusted now."""
        if shard_file_bytes(seen.manifest.facts.shard_tokens) > self._max_shard_bytes:
            return False
        if self._public_key is not None and seen.public_key != self._key_digest():
            try:
                self._verified(seen.manifest.body, self._mirrors.addresses[0])
            except (ContractError, UntrustedManifestError) as error:
                # It was trusted before a key was pinned, or under another one.
                logger.info("%s", error)
                return False
        return True

    def _load_key(self, path: Path) -> Ed25519PublicKey:
        if self._key is None:
            from manifests import load_public_key

            try:
                self._key = load_public_key(_key_file(path))
            except SignatureError as error:
                raise LoaderUsageError(f"--public-key {path}: {error}") from None
        return self._key

    def _key_digest(self) -> str | None:
        """The digest of the pinned key's file."""
        return None if self._public_key is None else sha256_hex(_key_file(self._public_key))


def _key_file(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        raise LoaderUsageError(f"--public-key {path}: {getattr(error, 'strerror', None) or error}") from None


def _is_fatal(error: LoaderError) -> bool:
    return isinstance(error, UntrustedManifestError) and not isinstance(error, _OlderManifestError)


def _worst(errors: list[LoaderError]) -> LoaderError:
    return next(filter(_is_fatal, errors), errors[0])


def _as_loader_error(store: ReadableStore, error: Exception) -> LoaderError:
    if isinstance(error, LoaderError):
        return error
    if isinstance(error, ObjectNotFoundError):
        return DataUnavailableError(
            f"{store.url}: expected a store, found no {MANIFEST_KEY}; check the address, or fill it with 'genesis "
            "populate'"
        )
    if isinstance(error, ContractError):
        return UntrustedManifestError(f"{store.url}: {error}")
    return DataUnavailableError(str(error))


def _unsigned(manifest: TrustedManifest) -> bytes:
    value = json.loads(manifest.body)
    try:
        return canonical_json({name: each for name, each in value.items() if name != "signature"})
    except (ValueError, RecursionError):  # NaN, say, in a field that a later revision may add.
        return manifest.body


def _warn_once(url: str) -> None:
    if url not in _warned:
        _warned.add(url)
        logger.warning(
            "%s: no public key is pinned, so nothing vouches for this store; pin one with --public-key, or as "
            "data.public_key of a trainer's run file",
            url,
        )
