"""Everything that can go wrong between a store and a batch, one line a user can act on each.

LoaderError
├── DataUnavailableError       no mirror gave an object in time
├── CorruptObjectError         every mirror gave bytes that are not what the manifest vouches for
├── UntrustedManifestError     the manifest may not be believed
│   ├── ManifestSignatureError     not signed by the pinned key
│   ├── ManifestRollbackError      older than one seen before, or another history
│   └── HostileStoreError          it names, or vouches for, what no honest store does
├── StateMismatchError         a state_dict of another run, store or format
├── TokenizerSyncError         the store's vocabulary does not extend the one in use
├── CacheError                 the cache folder cannot be used at all
└── LoaderUsageError           options that do not go together
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "CorruptObjectError",
    "DataUnavailableError",
    "HostileStoreError",
    "LoaderError",
    "LoaderUsageError",
    "ManifestRollbackError",
    "ManifestSignatureError",
    "StateMismatchError",
    "TokenizerSyncError",
    "UntrustedManifestError",
]


class LoaderError(Exception):
    """Base of all of them; the message says what was expected, what was found, and what to do."""


class DataUnavailableError(LoaderError):
    """No mirror gave an object within the deadline; the message says what each answered."""


class CorruptObjectError(LoaderError):
    """An object is not what the manifest vouches for, from every mirror, again and again."""


class UntrustedManifestError(LoaderError):
    """The manifest may not be believed."""


class ManifestSignatureError(UntrustedManifestError):
    """The manifest is not signed by the pinned key."""


class ManifestRollbackError(UntrustedManifestError):
    """The manifest is older than one seen before, or belongs to another history."""


class HostileStoreError(UntrustedManifestError):
    """The store names keys, sizes or shapes that no honest store names, or vouches for ids that are none."""


class StateMismatchError(LoaderError):
    """A state was made by another run, with another store, or in a format this release does not read."""


class TokenizerSyncError(LoaderError):
    """The store's vocabulary does not extend the one in use, so ids would change their meaning."""


class CacheError(LoaderError):
    """The cache folder cannot be used at all."""


class LoaderUsageError(LoaderError):
    """Options that do not go together, or a value out of range."""
