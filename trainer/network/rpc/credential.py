"""Credentials, relay passes and lists of revoked peers: what a run's authority signs, and every node checks itself.

A credential says that a key may take part in a run, in which role, and until when. It proves nothing to whoever only
copies it: a peer proves the key with each message, and the credential proves the key's admission. All documents are
canonical JSON under prefixes of their own, so that no signature can pass for another's, nor for an announcement's.

    {"expires_at":…,"issued_at":…,"issuer":"…","peer_id":"…","role":"worker",…,"signature":"…"}      500 to 700 bytes
    {"issued_at":…,"issuer":"…","number":7,"revoked":["…", …],"run_name":"…","signature":"…"}        66 bytes a peer

The checks go from cheap to expensive; the signature, 140 µs, is last. The trade-off of numbered lists: a node that
nobody tells of a newer list believes the older one, until the credentials in question expire.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from manifests.serialisation import canonical_json
from trainer.errors import RefusedError
from trainer.network.rpc.envelope import first_line, parse_strict_json
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message, PeerId, Reason

MAX_CREDENTIAL_BYTES: Final = 2048
MAX_REVOKED: Final = 8192
"""Peers of one list, which then has 0.6 MB and still fits a payload."""
MAX_LIST_BYTES: Final = 1 << 20
MAX_CLOCK_SKEW_S: Final = 120.0
"""By which clocks of an authority and of nodes may differ."""

_CREDENTIAL_DOMAIN: Final = b"genesis credential 1\n"
_REVOKED_DOMAIN: Final = b"genesis revoked peers 1\n"
_RELAY_PASS_DOMAIN: Final = b"genesis relay pass 1\n"
MAX_RELAY_PASS_S: Final = 600.0
"""Longest life of a relay pass: a newcomer joins in it."""
_BAD = Reason.CREDENTIAL

Role: TypeAlias = Literal["node", "worker", "driver", "monitor"]
"""A node trains the whole model, a worker a stage; a driver feeds workers; a monitor only reads."""


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected printable characters")
    return value


PeerKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SignatureHex = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
RunName = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]
StageOfRun = Annotated[str, Field(pattern=r"^(head|tail|body-[1-9][0-9]{0,3})$")]
UnixTime = Annotated[float, Field(ge=0, lt=1e11)]

SignedT = TypeVar("SignedT", bound="_SignedDocument")


class _SignedDocument(Message):
    """A document that ``issuer`` has signed."""

    run_name: RunName
    issuer: PeerKey
    issued_at: UnixTime  # Seconds since 1970, like all times here.
    signature: SignatureHex

    def wire(self) -> bytes:
        """Returns the one form in which it travels."""
        return canonical_json(self.model_dump(mode="json"))

    def _check_issuer(self, run_name: str, authorities: Collection[PeerId], now: float) -> None:
        if self.run_name != run_name:
            raise RefusedError(_BAD, f"expected a document of run {run_name!r}, found one of {self.run_name!r}")
        if self.issuer not in authorities:
            raise RefusedError(_BAD, f"expected an authority that the run names, found {self.issuer[:16]}…")
        if self.issued_at > now + MAX_CLOCK_SKEW_S:
            raise RefusedError(
                _BAD, f"issued {self.issued_at - now:.0f} s from now by this node's clock; set both clocks by NTP"
            )

    def _check_signature(self, domain: bytes) -> None:
        content = self.model_dump(mode="json", exclude={"signature"})
        if not verify_signature(self.issuer, domain + canonical_json(content), bytes.fromhex(self.signature)):
            raise RefusedError(_BAD, f"expected a signature by {self.issuer[:16]}…, found another")


class Credential(_SignedDocument):
    """The statement of an authority that a peer may take part in a run."""

    peer_id: PeerKey
    role: Role
    stage: StageOfRun | None = None
    """Where a worker may be; to move, it asks for another credential. None: in any."""
    expires_at: UnixTime

    @classmethod
    def issue(
        cls,
        authority: Identity,
        run_name: str,
        peer_id: PeerId,
        role: Role,
        stage: str | None,
        now: float,
        life_s: float,
    ) -> Self:
        """Returns a credential that ``authority`` has signed, which expires ``life_s`` seconds from ``now``."""
        content: dict[str, Any] = {
            "run_name": run_name,
            "issuer": authority.peer_id,
            "issued_at": float(now),
            "peer_id": peer_id,
            "role": role,
            "stage": stage,
            "expires_at": float(now) + life_s,
        }
        signature = authority.sign(_CREDENTIAL_DOMAIN + canonical_json(content)).hex()
        return cls(**content, signature=signature)

    @classmethod
    def parse(cls, wire: bytes) -> Self:
        """Reads one that came from anywhere; nothing about it is verified yet. Raises RefusedError."""
        return _parse(cls, wire, MAX_CREDENTIAL_BYTES)

    def check(self, run_name: str, authorities: Collection[PeerId], now: float, revoked: Collection[PeerId]) -> None:
        """Checks everything but the signature; raises RefusedError, for a revoked peer with reason ``revoked``."""
        if self.peer_id in revoked:
            raise RefusedError(Reason.REVOKED, f"the run's authority has revoked {self.peer_id[:16]}…")
        self._check_issuer(run_name, authorities, now)
        if self.expires_at + MAX_CLOCK_SKEW_S <= now:
            raise RefusedError(
                _BAD, f"expected a credential that is valid, found one that expired {now - self.expires_at:.0f} s ago"
            )

    def check_signature(self) -> None:
        """Checks that the issuer signed it; raises RefusedError."""
        self._check_signature(_CREDENTIAL_DOMAIN)

    def verify(self, run_name: str, authorities: Collection[PeerId], now: float, revoked: Collection[PeerId]) -> None:
        """Checks all of it; raises RefusedError."""
        self.check(run_name, authorities, now, revoked)
        self.check_signature()


class RelayPass(_SignedDocument):
    """The statement of an authority that a peer may ask to join, and be reached by relays for some minutes to do so.

    A newcomer behind a router cannot be dialled back without a relay, and has no credential before it was. Nothing but
    relays believes a pass.
    """

    kind: Literal["relay-pass"] = "relay-pass"
    peer_id: PeerKey
    expires_at: UnixTime

    @classmethod
    def issue(cls, authority: Identity, run_name: str, peer_id: PeerId, now: float, life_s: float) -> Self:
        """Returns a pass that ``authority`` has signed, which expires ``life_s`` seconds from ``now``."""
        content: dict[str, Any] = {
            "kind": "relay-pass",
            "run_name": run_name,
            "issuer": authority.peer_id,
            "issued_at": float(now),
            "peer_id": peer_id,
            "expires_at": float(now) + life_s,
        }
        return cls(**content, signature=authority.sign(_RELAY_PASS_DOMAIN + canonical_json(content)).hex())

    @classmethod
    def parse(cls, wire: bytes) -> Self:
        """Reads one that came from anywhere; nothing about it is verified yet. Raises RefusedError."""
        return _parse(cls, wire, MAX_CREDENTIAL_BYTES)

    def check(self, run_name: str, authorities: Collection[PeerId], now: float, revoked: Collection[PeerId]) -> None:
        """Checks everything but the signature; raises RefusedError, for a revoked peer with reason ``revoked``."""
        if self.peer_id in revoked:
            raise RefusedError(Reason.REVOKED, f"the run's authority has revoked {self.peer_id[:16]}…")
        self._check_issuer(run_name, authorities, now)
        if not 0 < self.expires_at - self.issued_at <= MAX_RELAY_PASS_S:
            raise RefusedError(_BAD, f"expected a relay pass for at most {MAX_RELAY_PASS_S:g} s, found a longer one")
        if self.expires_at + MAX_CLOCK_SKEW_S <= now:
            raise RefusedError(
                _BAD, f"expected a relay pass that is valid, found one that expired {now - self.expires_at:.0f} s ago"
            )

    def check_signature(self) -> None:
        """Checks that the issuer signed it; raises RefusedError."""
        self._check_signature(_RELAY_PASS_DOMAIN)


def is_relay_pass(wire: bytes) -> bool:
    """Returns whether what somebody shows is to be read as a relay pass, and not as a credential."""
    return b'"kind":"relay-pass"' in wire


class RevokedPeers(_SignedDocument):
    """All peers that an authority has revoked and whose credentials could still be valid; a higher number is newer."""

    number: Annotated[int, Field(ge=1, lt=2**53)]
    revoked: Annotated[tuple[PeerKey, ...], Field(max_length=MAX_REVOKED)]

    @classmethod
    def issue(cls, authority: Identity, run_name: str, number: int, revoked: Collection[PeerId], now: float) -> Self:
        """Returns a list that ``authority`` has signed."""
        content: dict[str, Any] = {
            "run_name": run_name,
            "issuer": authority.peer_id,
            "issued_at": float(now),
            "number": number,
            "revoked": tuple(sorted(revoked)),
        }
        signature = authority.sign(_REVOKED_DOMAIN + canonical_json(content)).hex()
        return cls(**content, signature=signature)

    @classmethod
    def parse(cls, wire: bytes) -> Self:
        """Reads one that came from anywhere; nothing about it is verified yet. Raises RefusedError."""
        return _parse(cls, wire, MAX_LIST_BYTES)

    def verify(self, run_name: str, authorities: Collection[PeerId], now: float) -> None:
        """Checks run, issuer, clock and signature; raises RefusedError."""
        self._check_issuer(run_name, authorities, now)
        self._check_signature(_REVOKED_DOMAIN)


def _parse(kind: type[SignedT], wire: bytes, max_bytes: int) -> SignedT:
    """Reads the one spelling of a document."""
    what = kind.__name__
    if len(wire) > max_bytes:
        raise RefusedError(_BAD, f"expected a {what} of at most {max_bytes} bytes, found {len(wire)}")
    try:
        parse_strict_json(wire)
        document = kind.model_validate_json(wire)
    except (ValidationError, ValueError, RecursionError) as error:
        raise RefusedError(_BAD, f"expected a {what}, found {first_line(error)}") from None
    if document.wire() != wire:
        raise RefusedError(_BAD, f"expected a {what} as canonical JSON, found another spelling")
    return document
