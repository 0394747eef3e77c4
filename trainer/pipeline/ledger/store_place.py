"""Where in a store a run's journal is: the head, which names all of it, and the parts; how they are read and written.

    ledger/RUN/head                     keeper, fencing token, parts, and the newest lines: each write of it is a commit
    ledger/RUN/parts/TOKEN-NUMBER       older lines (`journal_lines`), put if absent; the first may be a snapshot

A head is written in place of the one that its writer knows, or not at all. A part is never changed, and has the token
of the keeper in its name. The trade-off: a store that does not honour conditions is refused, however well it would do
with one keeper.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from genesis.errors import GenesisError, ObjectNotFoundError
from genesis.store.base import CachePolicy, Store
from genesis.store.limits import RetryPolicy
from genesis.store.opening import open_store
from manifests import Writer
from trainer.errors import LedgerError
from trainer.network.discovery.stage_report import Counted
from trainer.network.rpc import Message

_MAX_HEAD_BYTES: Final = 64 << 20
_STORE_CALL_S: Final = 10.0
_READS: Final = 5
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class JournalPart(Message):
    """An object with lines of the journal."""

    key: str
    size_bytes: Counted
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class JournalHead(Message):
    """The first line of the head; the newest lines of the journal follow it."""

    version: Literal[1] = 1
    keeper: str  # Key of the driver.
    writer: Writer  # Its process and its fencing token; without an end, the journal was given back.
    writes: Counted  # By this keeper, so that each write changes the object.
    parts: tuple[JournalPart, ...] = ()
    digest: str  # Of the last line; empty: there is none yet.


@dataclass(frozen=True, slots=True)
class Head:
    """The head as it was read or written."""

    about: JournalHead
    tail: bytes  # The newest lines.
    etag: str

    def to_bytes(self) -> bytes:
        """Returns the object's bytes."""
        return self.about.model_dump_json(exclude_none=True).encode() + b"\n" + self.tail

    @classmethod
    def from_bytes(cls, body: bytes, etag: str, name: str) -> Head:
        """Inverts `to_bytes`; raises LedgerError if it is damaged."""
        first, newline, tail = body.partition(b"\n")
        try:
            about = JournalHead.model_validate_json(first)
        except ValidationError as error:
            why = str(error).splitlines()[0]
            raise LedgerError(f"expected the head of a journal at {name}, found something else ({why})") from None
        if not newline:
            raise LedgerError(f"expected the head of a journal at {name}, found it cut; put back a copy")
        return cls(about, tail, etag)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where in a store a run's journal is; its methods block."""

    store: Store
    prefix: str

    @classmethod
    def of(cls, url: str, run_id: str) -> StorePlace:
        """The place of a run's journal in the store at an address; nothing is contacted.

        Raises LedgerError if no store that can be written has that address.
        """
        name = run_id
        if _UNSAFE.search(run_id):  # Names of runs may have characters that keys of objects may not.
            name = f"{_UNSAFE.sub('_', run_id)}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
        try:
            store = open_store(url, policy=RetryPolicy().lasting(_STORE_CALL_S))
        except GenesisError as error:
            raise LedgerError(f"swarm.ledger.journal: {error}") from None
        return cls(store, f"ledger/{name}/")

    @property
    def head_key(self) -> str:
        """Of the object that names all others."""
        return self.prefix + "head"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.store.url}/{self.head_key}"

    def check(self) -> None:
        """Raises LedgerError if the store cannot be written, or does not honour conditions."""
        try:
            honours = self.store.conditional_writes
        except (GenesisError, OSError) as error:
            raise LedgerError(f"swarm.ledger.journal: expected a store that can be written, found: {error}") from error
        if not honours:
            raise LedgerError(
                f"swarm.ledger.journal: expected a store that honours If-Match and If-None-Match, found that "
                f"{self.store.url} ignores them, so two drivers could both keep the account; take another store, a "
                "folder that all drivers share, or swarm.ledger.journal=replicated"
            )

    def read(self) -> Head | None:
        """Returns the head; None: there is none yet. Raises LedgerError if it is damaged."""
        try:
            found = self.store.get(self.head_key, max_bytes=_MAX_HEAD_BYTES)
        except ObjectNotFoundError:
            return None
        return Head.from_bytes(found.body, found.etag, self.name)

    def etag(self) -> str | None:
        """Returns what changes with each write of the head; None: there is none."""
        found = self.store.head(self.head_key)
        return None if found is None else found.etag

    def swap(self, head: Head) -> Head:
        """Writes the head in place of the one with its ETag (empty: of none); returns it with its new one.

        Raises PreconditionFailedError if that one is not there any more.
        """
        body = head.to_bytes()
        etag = self.store.put(
            self.head_key, body, cache=CachePolicy.NONE, if_absent=not head.etag, if_match=head.etag or None
        )
        return replace(head, etag=etag)

    def lines(self, head: Head) -> bytes:
        """Returns all lines of the journal that a head names.

        Raises ObjectNotFoundError if a part is gone, as when the head was replaced meanwhile, LedgerError if one is
        damaged.
        """
        bodies = []
        for part in head.about.parts:
            body = self.store.get(part.key, max_bytes=part.size_bytes).body
            if hashlib.sha256(body).hexdigest() != part.sha256:
                raise LedgerError(
                    f"expected {part.key} in {self.store.url} to have sha256 {part.sha256}, found it damaged; put back "
                    "a copy"
                )
            bodies.append(body)
        return b"".join((*bodies, head.tail))

    def put_part(self, token: int, number: int, lines: bytes) -> JournalPart:
        """Stores lines under a name that only the keeper with this token uses."""
        key = f"{self.prefix}parts/{token:08d}-{number:08d}"
        self.store.put(key, lines, cache=CachePolicy.IMMUTABLE, if_absent=True)
        return JournalPart(key=key, size_bytes=len(lines), sha256=hashlib.sha256(lines).hexdigest())

    def left_behind(self, head: Head) -> list[str]:
        """Returns the keys of parts that nobody needs: former keepers' that are not named by the keeper's head."""
        named = {part.key for part in head.about.parts}
        own = f"{self.prefix}parts/{head.about.writer.token:08d}-"
        found = [each.key for each in self.store.list(self.prefix + "parts/")]
        return [key for key in found if key not in named and not key.startswith(own)]


def read_journal(place: StorePlace) -> tuple[bytes, Head | None]:
    """Returns all lines of a journal, and its head, from a store in which a keeper may go on meanwhile.

    Raises LedgerError if it is damaged.
    """
    for _ in range(_READS):
        head = place.read()
        if head is None:
            return b"", None
        try:
            return place.lines(head), head
        except ObjectNotFoundError as error:
            missing = str(error)
    raise LedgerError(f"expected the parts that {place.name} names, found one missing: {missing}; put back a copy")
