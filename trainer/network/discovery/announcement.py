"""What a node says of itself: signed, short-lived, spelt in one way.

An announcement says where its node is reached (address and TLS certificate), which run, protocol and terms it trains
by, and how far it is. On the wire it is canonical JSON, ``{"announcement": {…}, "signature": "<hex>"}``; the signature
is ed25519 over a domain prefix and the canonical JSON of the inner object, by the key that is the node's `peer_id`.

What only workers of a pipeline say, their stage and where they file it, is left out of the wire form where there is
none: nodes that know nothing of stages and those that do understand each other, as long as nobody speaks of one.

Guarantees: what `verify_announcement` returns was signed by the node it speaks of, for this run, is alive by our
clock, and is at most `MAX_WIRE_BYTES` long; there is exactly one spelling of it, so equal bytes mean equal content.
The trade-off: the certificate travels in each one (0.7 of about 1.6 kB), which saves a trusted exchange of its own.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from manifests.spelling import canonical_json
from trainer.errors import DiscoveryError
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message, Peer

__all__ = [
    "MAX_LIFETIME_S",
    "MAX_WIRE_BYTES",
    "Announcement",
    "AnnouncementRefusedError",
    "sign_announcement",
    "verify_announcement",
]

MAX_WIRE_BYTES = 16 * 1024
"""Longest announcement that is looked at; a full one (64 members, 256 shards, certificate) has about 9 kB."""
MAX_LIFETIME_S = 3600.0
"""Longest time from `sent_at` to `expires_at`: what a node may occupy of others' memory after it has gone."""

_DOMAIN = b"genesis announcement 1\n"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}")


class AnnouncementRefusedError(DiscoveryError):
    """An announcement that is not believed.

    Args:
        reason: one word for counters: ``oversized``, ``malformed``, ``signature``, ``subkey``, ``run``, ``expired``,
            ``future`` or ``lifetime``.
        text: one line for people.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected printable characters")
    return value


def _reachable(value: str) -> str:
    if not _ADDRESS.fullmatch(value) or not 0 < int(value.rpartition(":")[2]) < 65536:
        raise ValueError("expected host:port")
    return value


Digest = Annotated[str, Field(pattern=r"^(|[0-9a-f]{64})$")]
"""SHA-256 in hexadecimal, or nothing."""
PeerIdField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]
Counted = Annotated[int, Field(ge=0, lt=2**53)]
Instant = Annotated[float, Field(ge=0, lt=1e11)]


class Announcement(Message):
    """One node's word about itself. Times are seconds since 1970; `sent_at` 0 means not yet stamped."""

    peer_id: PeerIdField
    node_id: Name
    run_id: Name
    address: Annotated[str, Field(max_length=262), AfterValidator(_reachable)]
    """``host:port`` of the node's RPC endpoint."""
    certificate_pem: Annotated[str, Field(max_length=4096)] = ""
    """The endpoint's TLS certificate; empty without TLS."""
    protocol: Counted = 1
    """Version of the protocol of rounds."""
    terms_digest: Digest = ""
    """Digest of what all members have to agree on: architecture, vocabulary, DiLoCo options."""
    outer_step: Counted = 0
    state_digest: Digest = ""
    """The snapshot the node holds and hands out for `outer_step`; empty while it has none worth adopting."""
    last_round_members: Annotated[tuple[PeerIdField, ...], Field(max_length=64)] = ()
    """Members of the last round the node finished; empty if it had more than 64."""
    inner_step: Counted = 0
    loss: float | None = None
    tokens_per_s: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    shards: Annotated[tuple[Counted, ...], Field(max_length=256)] = ()
    """Ids of the data shards the node trains on."""
    stage: StageReport | None = None
    """Workers of a pipeline: the stage it holds and how it stands there."""
    filed_under: Annotated[str, Field(pattern=r"^(|(head|tail|body[1-9][0-9]{0,3})\.0)$")] = ""
    """Workers, in a DHT that is partitioned by stage: the partition this is for (`partition.StagePartitions`)."""
    sent_at: Instant = 0.0
    expires_at: Instant = 0.0

    @model_validator(mode="after")
    def _only_workers_are_filed_by_stage(self) -> Self:
        if self.filed_under and self.stage is None:
            raise ValueError("expected a stage where it says which stages it is filed under")
        return self

    def peer(self) -> Peer:
        """Where to reach the node."""
        return Peer(self.peer_id, self.address, self.certificate_pem.encode() or None)

    def stamped(self, now: float, lifetime_s: float) -> Self:
        """The same, said at ``now`` and good for ``lifetime_s`` seconds."""
        return self.model_copy(update={"sent_at": float(now), "expires_at": float(now) + lifetime_s})


def _content(announcement: Announcement) -> dict[str, JsonValue]:
    """What is signed."""
    content: dict[str, JsonValue] = announcement.model_dump(mode="json")
    for name in ("stage", "filed_under"):
        if not content[name]:
            del content[name]
    return content


class _Envelope(Message):
    announcement: Announcement
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def sign_announcement(announcement: Announcement, identity: Identity) -> bytes:
    """The wire form.

    Args:
        announcement: what to say; stamped.
        identity: the key of ``announcement.peer_id``.

    Returns:
        Canonical JSON with the signature, at most `MAX_WIRE_BYTES` long.

    Raises:
        DiscoveryError: it speaks of another node than the key's, has no valid content, or is too long.
    """
    if announcement.peer_id != identity.peer_id:
        raise DiscoveryError(
            f"expected to announce {identity.peer_id[:16]}…, whose key this is, found {announcement.peer_id[:16]}…"
        )
    content = _content(announcement)
    signature = identity.sign(_DOMAIN + canonical_json(content)).hex()
    wire = canonical_json({"announcement": content, "signature": signature})
    if len(wire) > MAX_WIRE_BYTES:
        raise DiscoveryError(f"expected an announcement of at most {MAX_WIRE_BYTES} bytes, found {len(wire)}")
    return wire


def verify_announcement(
    wire: bytes,
    *,
    now: float,
    max_clock_skew_s: float,
    run_id: str | None = None,
    subkey: str | None = None,
    allow_expired: bool = False,
) -> Announcement:
    """Reads what someone claims a node said of itself.

    Args:
        wire: the bytes as they came.
        now: our clock, seconds since 1970.
        max_clock_skew_s: how far ahead the node's clock may be.
        run_id: the run it has to be for; None takes any (a seed serves them all).
        subkey: the peer id under which it was filed, if it was.
        allow_expired: take it though its time is over.

    Returns:
        The announcement.

    Raises:
        AnnouncementRefusedError: it is not to be believed; `reason` says why.
    """
    if len(wire) > MAX_WIRE_BYTES:
        raise AnnouncementRefusedError("oversized", f"expected at most {MAX_WIRE_BYTES} bytes, found {len(wire)}")
    try:
        envelope = _Envelope.model_validate_json(wire)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise AnnouncementRefusedError("malformed", f"not an announcement: {place}: {first['msg']}") from None
    announcement = envelope.announcement
    content = _content(announcement)
    if canonical_json({"announcement": content, "signature": envelope.signature}) != wire:
        raise AnnouncementRefusedError("malformed", "expected canonical JSON, found another spelling of it")
    if announcement.expires_at <= now and not allow_expired:
        raise AnnouncementRefusedError("expired", f"expired {now - announcement.expires_at:.1f} s ago")
    _check_claims(announcement, now, max_clock_skew_s, run_id, subkey)
    signed = _DOMAIN + canonical_json(content)
    if not verify_signature(announcement.peer_id, signed, bytes.fromhex(envelope.signature)):
        raise AnnouncementRefusedError("signature", f"not signed by {announcement.peer_id[:16]}…, of whom it speaks")
    return announcement


def _check_claims(
    announcement: Announcement, now: float, max_clock_skew_s: float, run_id: str | None, subkey: str | None
) -> None:
    """Everything that is cheaper to check than the signature."""
    if subkey is not None and subkey != announcement.peer_id:
        raise AnnouncementRefusedError(
            "subkey", f"filed under {subkey[:16]!r}, but speaks of {announcement.peer_id[:16]}…"
        )
    if run_id is not None and run_id != announcement.run_id:
        raise AnnouncementRefusedError("run", f"expected run {run_id!r}, found {announcement.run_id!r}")
    if announcement.sent_at > now + max_clock_skew_s:
        ahead = announcement.sent_at - now
        raise AnnouncementRefusedError("future", f"sent {ahead:.1f} s from now; one of the two clocks is wrong")
    if not 0 < announcement.expires_at - announcement.sent_at <= MAX_LIFETIME_S:
        raise AnnouncementRefusedError("lifetime", f"expected to live at most {MAX_LIFETIME_S:g} s")
