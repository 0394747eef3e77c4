"""An opened store: its mirrors, its trusted manifest and the cache, made from a user's options."""

from __future__ import annotations

from dataclasses import dataclass

from loader.cache import ShardCache
from loader.fetch.catalog import Catalog
from loader.fetch.known_store import KnownStore, ManifestMemory
from loader.fetch.manifest_keeper import ManifestKeeper
from loader.fetch.mirrors import Mirrors
from loader.fetch.shards import OpenShard, open_shard
from loader.options import StoreOptions


@dataclass(frozen=True, slots=True)
class Session:
    """An opened store. It may be pickled, and used after a fork."""

    options: StoreOptions
    mirrors: Mirrors
    catalog: Catalog
    cache: ShardCache

    @classmethod
    def open(cls, options: StoreOptions) -> Session:
        """Reads the manifest, and nothing else.

        Raises:
            DataUnavailableError: no mirror can be reached.
            UntrustedManifestError: none gives a manifest that can be trusted.
            LoaderUsageError: an address or key is invalid.
        """
        mirrors = Mirrors(options.mirrors, options.timeout_s, options.max_bytes_per_s)
        cache = ShardCache(options.cache_dir, options.cache_bytes)
        manifest = _keeper(options, mirrors).current()
        return cls(options, mirrors, Catalog(manifest, mirrors, _known(options, mirrors)), cache)

    def open_shard(self, shard_id: int) -> OpenShard:
        """Opens a shard, verified.

        Raises:
            LoaderError: it is unavailable.
        """
        is_frozen = self.catalog.manifest.is_frozen
        return open_shard(self.mirrors, self.cache, self.catalog.entry(shard_id), is_frozen=is_frozen)

    def newest_catalog(self) -> Catalog:
        """The store as it is now.

        Raises:
            LoaderError: it is unavailable, or cannot be trusted.
        """
        manifest = _keeper(self.options, self.mirrors).newest(self.catalog.trusted)
        return Catalog(manifest, self.mirrors, _known(self.options, self.mirrors))


def _known(options: StoreOptions, mirrors: Mirrors) -> KnownStore:
    return KnownStore.of(options.cache_dir, mirrors.addresses[0])


def _keeper(options: StoreOptions, mirrors: Mirrors) -> ManifestKeeper:
    return ManifestKeeper(
        mirrors,
        ManifestMemory([KnownStore.of(options.cache_dir, address) for address in mirrors.addresses]),
        options.public_key,
        options.manifest_max_age_s,
        options.max_shard_bytes,
    )
