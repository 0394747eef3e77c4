"""Records: what nodes keep and pass on for others, each signed by the key in its name and bounded by its kind.

On the wire a record is canonical JSON, ``{"kind": "run-change", "record": {…}, "signature": "<hex>"}``. The signature
(ed25519) is over ``genesis record 1``, a line feed, and the canonical JSON of kind and record, so that no record can be
taken for one of another kind, nor for an announcement or a frame. Who signs is the record's `signer`; its name is run,
kind, signer and number. A number is used once: it is what makes an old record known for one.

A kind states how large a record may be, how many of one signer are kept, and how long one counts; `record_kinds` has
the table of them all. The trade-off: keys and signature take some 400 bytes of each record as hexadecimal text, twice
what they would take in a binary form; any JSON library reads and checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Protocol, Self

from pydantic import Field, JsonValue, ValidationError

from manifests.serialisation import canonical_json, sha256_hex
from trainer.errors import DiscoveryError
from trainer.network.discovery.announcement import Instant, Name, PeerIdField
from trainer.network.rpc.envelope import first_line, parse_strict_json
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message

_DOMAIN: Final = b"genesis record 1\n"
_WIRE_START: Final = b'{"kind":"'
MAX_NUMBER: Final = 2**31 - 1


class RecordRefusedError(DiscoveryError):
    """A record is not what its name says, or has no place here.

    ``reason`` is one word for counters: oversized, malformed, kind, subkey, run, signer, future, expired or signature;
    of a chain also known, fork, order, other, round or settings.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RecordKind:
    """What holds for all records of a kind, whoever signs them."""

    name: str
    max_bytes: int
    """Size of the wire form."""
    max_count: int
    """Records of one signer in one run that a node keeps; their numbers go up to it."""
    max_stored_s: float
    """How long a DHT node keeps one that nobody stores again."""
    max_age_s: float | None = None
    """Seconds after which one counts no more; None: it counts as long as its run lasts."""


class SignedRecord(Message):
    """What all records have; a kind adds fields of its own, each of them bounded."""

    KIND: ClassVar[RecordKind]

    run_id: Name
    signer: PeerIdField
    number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    """Counts the signer's records of this kind and run from 1."""
    issued_at: Instant
    """Seconds since 1970, by the signer's clock."""

    def signed_bytes(self) -> bytes:
        """Returns what the signature is over; see this module."""
        return _DOMAIN + canonical_json({"kind": self.KIND.name, "record": self.model_dump(mode="json")})

    def digest(self) -> str:
        """Returns the SHA-256 of what is signed: the record's content under its one spelling."""
        return sha256_hex(self.signed_bytes())

    @property
    def subkey(self) -> str:
        """Under what a DHT keeps it, among the records of its run and kind."""
        return f"{self.signer}.{self.number}"

    @classmethod
    def verified(
        cls,
        wire: bytes,
        *,
        now: float,
        max_clock_skew_s: float,
        run_id: str | None = None,
        signer: str | None = None,
        subkey: str | None = None,
    ) -> Self:
        """Parses and verifies a record from anywhere, cheap checks first; raises `RecordRefusedError`.

        ``run_id`` and ``signer`` of None accept any (a seed serves all runs); ``subkey`` is what a DHT keeps it under.
        """
        record, signature = cls._parsed(wire)
        who = f"{record.signer[:16]}…"
        if subkey is not None and subkey != record.subkey:
            raise RecordRefusedError("subkey", f"stored under {subkey[:80]!r}, but named {record.subkey[:24]!r}…")
        if run_id is not None and run_id != record.run_id:
            raise RecordRefusedError("run", f"expected a record of run {run_id!r}, found one of {record.run_id!r}")
        if signer is not None and signer != record.signer:
            raise RecordRefusedError("signer", f"expected a record signed by {signer[:16]}…, found one of {who}")
        if record.number > cls.KIND.max_count:
            raise RecordRefusedError(
                "malformed", f"expected a number of at most {cls.KIND.max_count}, found {record.number}"
            )
        ahead_s = record.issued_at - now
        if ahead_s > max_clock_skew_s:
            raise RecordRefusedError("future", f"issued {ahead_s:.1f} s from now; one of the two clocks is wrong")
        if cls.KIND.max_age_s is not None and -ahead_s > cls.KIND.max_age_s:
            raise RecordRefusedError("expired", f"issued {-ahead_s:.0f} s ago, and counts for {cls.KIND.max_age_s:g} s")
        if not verify_signature(record.signer, record.signed_bytes(), signature):
            raise RecordRefusedError("signature", f"not signed by {who}, whom it names")
        return record

    @classmethod
    def _parsed(cls, wire: bytes) -> tuple[Self, bytes]:
        if len(wire) > cls.KIND.max_bytes:
            raise RecordRefusedError("oversized", f"expected at most {cls.KIND.max_bytes} bytes, found {len(wire)}")
        try:
            value = parse_strict_json(wire)
            envelope = _Envelope.model_validate(value)
            if envelope.kind != cls.KIND.name:
                raise RecordRefusedError("kind", f"expected a record of kind {cls.KIND.name}, found {envelope.kind}")
            record = cls.model_validate_json(canonical_json(envelope.record))
            is_canonical = record.to_wire(envelope.signature) == wire
        except (ValidationError, ValueError, RecursionError) as error:
            raise RecordRefusedError("malformed", f"not a record: {first_line(error)}") from None
        if not is_canonical:
            raise RecordRefusedError("malformed", "expected canonical JSON, found another form")
        return record, bytes.fromhex(envelope.signature)

    def to_wire(self, signature: str) -> bytes:
        """Returns the wire form with a signature in hexadecimal digits."""
        record = self.model_dump(mode="json")
        return canonical_json({"kind": self.KIND.name, "record": record, "signature": signature})


class _Envelope(Message):
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z-]{0,31}$")]
    record: dict[str, JsonValue]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def sign_record(record: SignedRecord, identity: Identity) -> bytes:
    """Returns the wire form of a record; raises `DiscoveryError` if it is in another's name, or too large."""
    if record.signer != identity.peer_id:
        raise DiscoveryError(
            f"expected to sign as {identity.peer_id[:16]}…, whose key this is, found a record of {record.signer[:16]}…"
        )
    wire = record.to_wire(identity.sign(record.signed_bytes()).hex())
    if len(wire) > record.KIND.max_bytes:
        raise DiscoveryError(
            f"expected a record of at most {record.KIND.max_bytes} bytes, found {len(wire)}; take fewer or shorter ones"
        )
    return wire


def is_record(wire: bytes) -> bool:
    """Checks whether bytes look like a record rather than an announcement; proves nothing."""
    return wire.startswith(_WIRE_START)


def record_key(run_id: str, kind: RecordKind) -> str:
    """Returns the DHT key of a run's records of a kind; none of announcements ends so (`dht_key`)."""
    return f"{run_id}.{kind.name}"


class RecordLog(Protocol):
    """One run's records of one kind as a node keeps them; for one event loop, like the exchange that fills it."""

    kind: RecordKind

    def heads(self) -> dict[str, int]:
        """Returns, for each signer, the number of the newest record here before which none is missing."""
        ...

    def newer_than(self, heads: dict[str, int]) -> list[bytes]:
        """Returns the wire forms of what somebody with these heads lacks, in the order in which it is to be offered."""
        ...

    def has(self, wire: bytes) -> bool:
        """Checks whether this very record is here, without verifying anything."""
        ...

    def subkey_of(self, wire: bytes) -> str:
        """Returns `SignedRecord.subkey` of a record that is here."""
        ...

    def offer(self, wire: bytes) -> bool:
        """Takes a record up; returns whether it is news, and raises `RecordRefusedError` where it has no place."""
        ...
