"""What can go wrong between a store and a batch; every message is one line a user can act on."""

from __future__ import annotations


class LoaderError(Exception):
    """Base class; the message says what was expected, what was found, and what to do."""


class DataUnavailableError(LoaderError):
    """No mirror gave an object within the deadline; the message has the answer of each."""


class CorruptObjectError(LoaderError):
    """An object is not what the manifest vouches for, from every mirror, again and again."""


class UntrustedManifestError(LoaderError):
    """The manifest cannot be trusted."""


class ManifestSignatureError(UntrustedManifestError):
    """The manifest is not signed by the pinned key."""


class ManifestRollbackError(UntrustedManifestError):
    """The manifest is older than one seen before, or belongs to another history."""


class HostileStoreError(UntrustedManifestError):
    """The store names keys, sizes or shapes that no honest store has, or vouches for invalid ids."""


class StateMismatchError(LoaderError):
    """A state was made by another run, with another store, or in a format this release does not read."""


class TokenizerSyncError(LoaderError):
    """The store's vocabulary does not extend the one in use, so ids would change their meaning."""


class CacheError(LoaderError):
    """The cache folder cannot be used at all."""


class LoaderUsageError(LoaderError):
    """Options conflict, or a value is out of range."""
