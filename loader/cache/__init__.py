"""A folder of verified, immutable files that many processes of one machine share (POSIX, a local disk).

`loader.cache.shard_cache` states the guarantees. The modules import nothing but the standard library (the commands:
typer).
"""

from __future__ import annotations

from loader.cache.folder import CacheEntry, ClearReport
from loader.cache.settings import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_CACHE_DIR,
    cache_bytes,
    cache_dir,
    format_size,
    parse_size,
)
from loader.cache.shard_cache import CachedFile, ShardCache

__all__ = [
    "DEFAULT_CACHE_BYTES",
    "DEFAULT_CACHE_DIR",
    "CacheEntry",
    "CachedFile",
    "ClearReport",
    "ShardCache",
    "cache_bytes",
    "cache_dir",
    "format_size",
    "parse_size",
]
