"""What a store is: named immutable-or-conditional objects, in a folder, a bucket, or behind HTTP.

Contracts every store keeps:

- A `put` is all or nothing: a reader sees the old object, the new one, or none, never a part, whatever is killed.
- A `put` that returned is durable: a folder has been fsynced, S3 has acknowledged.
- Conditional writes are exact where the store allows it: of two writers conditional on the same ETag one succeeds.
- A write whose acknowledgement was lost is retried, and its own earlier success is recognised as success.
- Every call has a deadline; a failure that passes is retried with back-off, one that does not becomes a `StoreError`
  at once. Calls are safe from many threads.
- A store may be used before and after a fork, and be pickled: no two processes share a connection or a lock.

`PerProcess` keeps the last of them. Each caller gets the value of its own process, which is made at the first call and
only once, from however many threads. After a fork the child makes its own; what the parent made is never touched there,
not even closed, since its locks may have been held by threads that do not exist in the child. The trade-off: the
parent's sockets stay open in the child until that ends (two descriptors a keep-alive connection).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Generic, Protocol, TypeVar

from typing_extensions import Buffer

from genesis.errors import PreconditionFailedError, UsageError


class CachePolicy(Enum):
    """The ``Cache-Control`` header an object is stored with."""

    IMMUTABLE = "public, max-age=31536000, immutable"
    """Shards, sealed segments, vocabularies: never overwritten."""
    SHORT = "public, max-age=60, must-revalidate"
    """manifest.json and tokenizer.json."""
    NONE = "no-store"
    """checkpoints.json: no cache may ever answer for it."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object without reading it."""

    key: str
    size_bytes: int
    etag: str
    """Opaque; changes whenever the object does."""
    modified_at: datetime | None
    """Aware, UTC; None where the store does not say."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's bytes and the ETag they had."""

    body: bytes
    etag: str


class ReadableStore(Protocol):
    """A store as readers see it.

    Not for `isinstance`: that would read every property, and `Store.conditional_writes` asks the server.
    """

    @property
    def url(self) -> str:
        """The store's address, without credentials, as a user would type it."""

    @property
    def received_bytes(self) -> int:
        """Bytes of bodies this process has received over a network, those of failed attempts too; 0 for a folder."""

    def get(self, key: str, *, max_bytes: int | None = None) -> StoredObject:
        """The whole object.

        Args:
            key: the object's name.
            max_bytes: a larger object is refused, before it is read where the store tells its size.

        Raises:
            ObjectNotFoundError: there is none.
            StoreError: the store cannot be read, or the object is too large.
        """

    def get_if_changed(self, key: str, etag: str, *, max_bytes: int | None = None) -> StoredObject | None:
        """The whole object, or None if its ETag still is ``etag``, which an earlier answer of this store gave.

        Where a server gives no ETag of its own nothing vouches for an object being the same: it is always returned.

        Raises:
            ObjectNotFoundError: there is none.
            StoreError: the store cannot be read, or the object is too large.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """Size and ETag, or None if there is no such object."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, in key order.

        Raises:
            StoreError: this kind of store cannot list (HTTP).
        """

    def close(self) -> None:
        """Gives back connections; the store is not used again."""


class Store(ReadableStore, Protocol):
    """A store as the populator sees it."""

    @property
    def conditional_writes(self) -> bool:
        """Whether ``if_absent`` and ``if_match`` are honoured; probed once, at the first question."""

    def put(
        self, key: str, body: Buffer, *, cache: CachePolicy, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Stores an object and returns its ETag.

        Args:
            key: the object's name.
            body: its bytes.
            cache: how long caches may keep it.
            if_absent: write only if there is no such object. If there is one of exactly these bytes, that is success:
                it is what an earlier attempt wrote.
            if_match: write only if the object has this ETag. If the object now has exactly these bytes, that is
                success too: the acknowledgement was lost.

        Raises:
            PreconditionFailedError: the condition does not hold; nothing was written.
            StoreError: the store cannot be written.
        """

    def delete(self, key: str) -> None:
        """Removes an object; none there is success."""


class ConditionRefused(Exception):  # noqa: N818 - a refusal is an answer, not yet an error
    """The store refused a conditional write; never leaves the stores."""


class ConditionUnsupported(Exception):  # noqa: N818
    """The server has no conditional writes; never leaves the stores."""


@dataclass(frozen=True, slots=True)
class WriteCondition:
    """At most one of the two."""

    if_absent: bool = False
    if_match: str | None = None

    def __post_init__(self) -> None:
        if self.if_absent and self.if_match is not None:
            raise UsageError("expected if_absent or if_match, found both; a write has one condition")

    def __bool__(self) -> bool:
        return self.if_absent or self.if_match is not None

    def __str__(self) -> str:
        return "no object" if self.if_absent else f"ETag {self.if_match}"

    def holds_for(self, etag: str | None) -> bool:
        """Whether the condition holds where the object has ``etag`` (None: there is no object)."""
        if self.if_absent:
            return etag is None
        return self.if_match is None or etag == self.if_match


def settle(where: str, condition: WriteCondition, found: StoredObject | None, body: Buffer) -> str:
    """The outcome of a conditional write that was refused, from what is there now.

    An object of exactly these bytes is what an earlier attempt wrote, whose acknowledgement was lost: success.

    Args:
        where: the object, for the message.
        condition: what the write was conditional on.
        found: the object that is there.
        body: the bytes that were to be written.

    Returns:
        The ETag of the object there.

    Raises:
        PreconditionFailedError: it is another object, or there is none.
    """
    if found is None:
        raise PreconditionFailedError(f"{where}: expected {condition}, found no object; nothing was written")
    if found.body != body:
        raise PreconditionFailedError(
            f"{where}: expected {condition}, found another object of {len(found.body):,} bytes (ETag {found.etag}); "
            "nothing was written"
        )
    return found.etag


T = TypeVar("T")


class _Slot(Generic[T]):
    """One process's value."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: T | None = None


class PerProcess(Generic[T]):
    """A value made when a process first asks for it. Safe from many threads, and across forks."""

    def __init__(self, make: Callable[[], T]) -> None:
        """Names how the value is made; nothing is made yet."""
        self._make = make
        self._slots: dict[int, _Slot[T]] = {}

    def get(self) -> T:
        """This process's value."""
        slot = self._own()
        with slot.lock:
            if slot.value is None:
                slot.value = self._make()
            return slot.value

    def peek(self) -> T | None:
        """This process's value, or None if it has none yet."""
        slot = self._slots.get(os.getpid())
        return None if slot is None else slot.value

    def take(self) -> T | None:
        """This process's value, which is then no longer kept: the next `get` makes another."""
        slot = self._own()
        with slot.lock:
            value, slot.value = slot.value, None
            return value

    def _own(self) -> _Slot[T]:
        pid = os.getpid()
        slot = self._slots.get(pid)
        # One step for the interpreter: of two threads that find no slot, both get the first one's.
        return slot if slot is not None else self._slots.setdefault(pid, _Slot())
