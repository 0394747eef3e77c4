"""An opened store: mirrors, the manifest that may be believed, and the cache, put together from a user's options."""

from __future__ import annotations

from dataclasses import dataclass

from loader.cache import ShardCache
from loader.fetch.catalog import Catalog
from loader.fetch.known_store import KnownStore
from loader.fetch.manifest_keeper import ManifestKeeper
from loader.fetch.manifest_memory import ManifestMemory
from loader.fetch.mirrors import Mirrors
from loader.fetch.shards import OpenShard, ShardOpener
from loader.options import StoreOptions

__all__ = ["Session"]


@dataclass(frozen=True, slots=True)
class Session:
    """What everything that reads shards shares. May be pickled, and used after a fork."""

    options: StoreOptions
    mirrors: Mirrors
    catalog: Catalog
    cache: ShardCache

    @classmethod
    def open(cls, options: StoreOptions) -> Session:
        """Finds the manifest, and reads nothing else.

        Raises:
            DataUnavailableError: no mirror can be reached.
            UntrustedManifestError: none gives a manifest that may be believed.
            LoaderUsageError: an address or key makes no sense.
        """
        mirrors = Mirrors(options.mirrors, options.timeout_s, options.max_bytes_per_s)
        cache = ShardCache(options.cache_dir, options.cache_bytes)
        manifest = _keeper(options, mirrors).current()
        return cls(options, mirrors, Catalog(manifest, mirrors, _known(options, mirrors)), cache)

    @property
    def opener(self) -> ShardOpener:
        """Opens shards of this store."""
        return ShardOpener(self.mirrors, self.cache)

    def open_shard(self, shard_id: int) -> OpenShard:
        """A shard, verified.

        Raises:
            LoaderError: it cannot be had.
        """
        return self.opener.open(self.catalog.entry(shard_id))

    def newest_catalog(self) -> Catalog:
        """The store as it is now.

        Raises:
            LoaderError: it cannot be asked, or not believed.
        """
        manifest = _keeper(self.options, self.mirrors).newest(self.catalog.believed)
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
