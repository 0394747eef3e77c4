"""Object stores: named objects in a folder, in an S3 bucket, or behind HTTP, under one contract.

`open_store` and `open_readable` turn an address into a store; `base` is the contract every store keeps. The networked
stores live in `s3` and `http`, which import their client libraries and are themselves imported only when an address
asks for them; `cloudfront` tells a CDN of new manifests.
"""

from __future__ import annotations

from genesis.store.base import CachePolicy, ObjectInfo, ReadableStore, Store, StoredObject
from genesis.store.folder import FolderStore
from genesis.store.limits import RetryPolicy, Throttle
from genesis.store.opening import folder_of, open_readable, open_store

__all__ = [
    "CachePolicy",
    "FolderStore",
    "ObjectInfo",
    "ReadableStore",
    "RetryPolicy",
    "Store",
    "StoredObject",
    "Throttle",
    "folder_of",
    "open_readable",
    "open_store",
]
