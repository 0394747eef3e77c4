"""The signed documents of rounds in a bucket: who brings what, what a round consists of, and what came of it.

Each is canonical JSON under a prefix of its own, so that no signature can pass for another's; it is read strictly (one
spelling, no unknown fields, bounded), and believed only with the signature of the key that it names. A signature
takes 140 µs to check.

    contribution header   member, round, state it began with, claims, size and SHA-256 of the payload that follows it
    agreement             round, attempt, the agreement before, members with their claims and weights
    state record          member, round, digest of the state after it, digest of the state's snapshot
    wish                  a newcomer waits for a snapshot
    departure             a member does not come to a round
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, ValidationError, model_serializer

from manifests.serialisation import canonical_json, sha256_hex
from trainer.bucket_rounds.config import MAX_MEMBERS
from trainer.errors import MalformedAnswerError
from trainer.network.rpc import Identity, Message
from trainer.network.rpc.credential import MAX_CREDENTIAL_BYTES, Credential
from trainer.network.rpc.envelope import first_line, parse_strict_json
from trainer.network.rpc.identity import verify_signature

MAX_HEADER_BYTES: Final = 4096 + MAX_CREDENTIAL_BYTES
MAX_AGREEMENT_BYTES: Final = 1024 * (MAX_MEMBERS + 4)
MAX_RECORD_BYTES: Final = 4096 + MAX_CREDENTIAL_BYTES

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MaybeDigest = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{64})?$")]
SignatureHex = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Count = Annotated[int, Field(ge=0, le=1 << 48)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
RunId = Annotated[str, Field(min_length=1, max_length=128)]


class SignedDocument(Message):
    """A document that the key it names has signed."""

    DOMAIN: ClassVar[bytes]
    MAX_BYTES: ClassVar[int]

    version: Literal[1] = 1
    run_id: RunId
    member: Key
    signature: SignatureHex = "0" * 128

    def signed(self, identity: Identity) -> Self:
        """Returns it with the signature of ``identity``, whose key becomes its ``member``."""
        named = self.model_copy(update={"member": identity.peer_id})
        return named.model_copy(update={"signature": identity.sign(named._message()).hex()})

    def wire(self) -> bytes:
        """Returns the one form in which it is stored."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of `wire`."""
        return sha256_hex(self.wire())

    @classmethod
    def parse(cls, wire: bytes, run_id: str) -> Self:
        """Reads one that came from anywhere, and checks run and signature.

        Raises:
            MalformedAnswerError: it is none, of another run, or not signed by the member it names.
        """
        document = _parsed(cls, wire)
        if document.run_id != run_id:
            raise MalformedAnswerError(f"expected a document of run {run_id!r}, found one of {document.run_id[:80]!r}")
        if not document.is_signed():
            raise MalformedAnswerError(f"expected the signature of {document.member[:12]}, found another")
        return document

    def is_signed(self) -> bool:
        """Returns whether the member it names has signed it."""
        return verify_signature(self.member, self._message(), bytes.fromhex(self.signature))

    def _message(self) -> bytes:
        return self.DOMAIN + canonical_json(self.model_dump(mode="json", exclude={"signature"}))


DocumentT = TypeVar("DocumentT", bound=SignedDocument)


def _parsed(kind: type[DocumentT], wire: bytes) -> DocumentT:
    what = f"signed {kind.__name__}"
    if len(wire) > kind.MAX_BYTES:
        raise MalformedAnswerError(f"expected a {what} of at most {kind.MAX_BYTES} bytes, found {len(wire)}")
    try:
        parse_strict_json(wire)
        document = kind.model_validate_json(wire)
    except (ValidationError, ValueError, RecursionError) as error:
        raise MalformedAnswerError(f"expected a {what}, found something else ({first_line(error)})") from None
    if document.wire() != wire:
        raise MalformedAnswerError(f"expected a {what} as canonical JSON, found another spelling")
    return document


class Claims(Message):
    """What a member says of its contribution; it decides weight and progress, which the rules bound."""

    num_batches: Count  # Batches in it.
    age_s: Seconds  # Of the oldest of them, when it was made.
    progress: Share  # Of the round's planned work.
    vocabulary_rows: Count  # The most rows of vocabulary that it can have now; 0: it does not say.


class ContributionHeader(SignedDocument):
    """The first line of a contribution; its payload, the encoded vector, follows."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket contribution 1\n"
    MAX_BYTES: ClassVar[int] = MAX_HEADER_BYTES

    round_index: Count
    state_digest: MaybeDigest  # Of the state before the round, which all its members have to share.
    form: Annotated[str, Field(min_length=1, max_length=64)]  # How the payload is encoded.
    num_values: Count
    payload_bytes: Count
    payload_sha256: Digest
    claims: Claims
    credential: dict[str, JsonValue] | None = None  # Of the run's authority, where the run has one.

    def read_credential(self) -> Credential | None:
        """Returns the credential; raises RefusedError where it is none."""
        return read_credential_field(self.credential)


class AgreedMember(Message):
    """A contribution that is in a round."""

    member: Key
    payload_sha256: Digest
    claims: Claims
    weight: Annotated[float, Field(ge=0, le=1e12)]


class Departure(SignedDocument):
    """A member's word that it does not come to a round: it has been told to stop."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket departure 1\n"
    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES

    round_index: Count


class Agreement(SignedDocument):
    """What a round consists of; its ``member`` has proposed it, and is one of the members."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket agreement 1\n"
    MAX_BYTES: ClassVar[int] = MAX_AGREEMENT_BYTES

    round_index: Count
    attempt: Annotated[int, Field(ge=0, le=999)]  # Agreements for this round before this one, all of them void.
    follows: MaybeDigest  # Digest of the agreement of the round before; empty: the first one in this bucket.
    state_digest: MaybeDigest
    form: Annotated[str, Field(min_length=1, max_length=64)]
    num_values: Count
    members: Annotated[tuple[AgreedMember, ...], Field(min_length=1, max_length=MAX_MEMBERS)]  # Sorted by key.
    has_snapshot: bool = False  # Whether the state after it is to be stored for newcomers.
    departures: Annotated[tuple[Departure, ...], Field(max_length=MAX_MEMBERS)] = ()  # Who is not waited for; sorted.

    @model_serializer(mode="wrap")
    def _without_empty_departures(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves the field out where nobody has left: agreements of releases that did not know it read the same."""
        found: dict[str, Any] = handler(self)
        if not self.departures:
            found.pop("departures", None)
        return found

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the members, in order."""
        return tuple(each.member for each in self.members)

    @property
    def vocabulary_rows(self) -> int:
        """The rows of vocabulary that all members can have."""
        return min(each.claims.vocabulary_rows for each in self.members)


class StateRecord(SignedDocument):
    """What a member holds after a round."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket state 1\n"
    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES

    round_index: Count  # The round that led to it.
    agreement: Digest  # By which it went.
    state_digest: Digest
    snapshot: MaybeDigest = ""  # Of its snapshot's descriptor, if the agreement asked for one.
    credential: dict[str, JsonValue] | None = None  # As of a contribution.

    def read_credential(self) -> Credential | None:
        """Returns the credential; raises RefusedError where it is none."""
        return read_credential_field(self.credential)


class Wish(SignedDocument):
    """A node that needs a snapshot: it is new, or was away for longer than contributions are kept."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket wish 1\n"
    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES

    credential: dict[str, JsonValue] | None = None


def contribution_body(header: ContributionHeader, payload: bytes | bytearray | memoryview) -> bytearray:
    """Returns the object: the header, a line feed, the payload."""
    body = bytearray(header.wire())
    body += b"\n"
    body += payload
    return body


def split_contribution(body: bytes, run_id: str) -> tuple[ContributionHeader, memoryview]:
    """Inverts `contribution_body`, and checks signature and the payload's digest; raises MalformedAnswerError."""
    end = body.find(b"\n", 0, MAX_HEADER_BYTES + 1)
    if end < 0:
        raise MalformedAnswerError(f"expected a header of at most {MAX_HEADER_BYTES} bytes and a line feed, found none")
    header = ContributionHeader.parse(body[:end], run_id)
    payload = memoryview(body)[end + 1 :]
    if len(payload) != header.payload_bytes:
        raise MalformedAnswerError(f"expected {header.payload_bytes} bytes of payload, found {len(payload)}")
    if payload_digest(payload) != header.payload_sha256:
        raise MalformedAnswerError("expected the payload that the header names, found another")
    return header, payload


def payload_digest(payload: bytes | bytearray | memoryview) -> str:
    """SHA-256 of an encoded vector, hexadecimal."""
    return sha256_hex(payload)


def read_credential_field(field: dict[str, JsonValue] | None) -> Credential | None:
    """Returns the credential in a field of a document; raises RefusedError where it is none."""
    return None if field is None else Credential.parse(canonical_json(field))


def credential_field(credential: Credential | None) -> dict[str, Any] | None:
    """Returns a credential as a field of a document."""
    return None if credential is None else credential.model_dump(mode="json")
