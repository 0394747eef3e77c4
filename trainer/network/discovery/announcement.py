"""Announcements: what a node publishes about itself, signed, short-lived and in canonical form.

On the wire it is canonical JSON, ``{"announcement": {…}, "signature": "<hex>"}``, signed (ed25519) by the key that is
the node's `peer_id`. The fields of pipelines are left out where they are empty: releases without stages read it.
The trade-off: each one carries the certificate (0.7 of about 1.6 kB), which saves a trusted exchange of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Self

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from manifests.serialisation import canonical_json
from trainer.errors import DiscoveryError
from trainer.network.discovery.stage_report import MAX_PARTS, Counted, PartReport, StageReport, StageUid
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message, Peer

MAX_WIRE_BYTES = 16 * 1024
"""Longest announcement that is parsed; a full one (64 members, 256 shards, certificate) has about 9 kB."""
MAX_LIFETIME_S = 3600.0
"""Longest time from `sent_at` to `expires_at`: how long a node may occupy others' memory after it is gone."""

_DOMAIN = b"genesis announcement 1\n"
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):[0-9]{1,5}")


class AnnouncementRefusedError(DiscoveryError):
    """An announcement failed verification.

    ``reason`` is one word for counters: oversized, malformed, signature, subkey, run, expired, future or lifetime.
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
PeerIdField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]
Instant = Annotated[float, Field(ge=0, lt=1e11)]


class Announcement(Message):
    """One node's statement about itself. Times are seconds since 1970; `sent_at` 0 means not yet stamped."""

    peer_id: PeerIdField
    node_id: Name
    run_id: Name
    address: Annotated[str, Field(max_length=262), AfterValidator(_reachable)]
    certificate_pem: Annotated[str, Field(max_length=4096)] = ""
    protocol: Counted = 1
    terms_digest: Digest = ""  # Digest of what all members must agree on: architecture, vocabulary, DiLoCo options.
    outer_step: Counted = 0
    state_digest: Digest = ""
    """The snapshot the node holds and serves for `outer_step`; empty while it has none worth adopting."""
    last_round_members: Annotated[tuple[PeerIdField, ...], Field(max_length=64)] = ()
    """Members of the last round the node finished; empty if it had more than 64."""
    inner_step: Counted = 0
    loss: float | None = None
    tokens_per_s: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    shards: Annotated[tuple[Counted, ...], Field(max_length=256)] = ()
    stage: StageReport | None = None
    parts: Annotated[tuple[PartReport, ...], Field(max_length=MAX_PARTS)] = ()
    """Of a node that holds a whole model among swarms of stages: where each stage's part of it is."""
    relay_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Where other nodes of the run may register at its host to be relayed; 0: nowhere."""
    filed_under: Annotated[str, Field(pattern=r"^(|(head|tail|body[1-9][0-9]{0,3})\.0)$")] = ""
    """Of a worker, in a DHT partitioned by stage: its partition (`StagePartitions`)."""
    sent_at: Instant = 0.0
    expires_at: Instant = 0.0

    @model_validator(mode="after")
    def _only_workers_are_filed_by_stage(self) -> Self:
        if self.filed_under and self.stage is None:
            raise ValueError("expected a stage with filed_under")
        if self.parts and self.stage is not None:
            raise ValueError("expected a stage or parts, found both")
        if len({part.stage for part in self.parts}) < len(self.parts):
            raise ValueError("expected one part of each stage")
        return self

    @property
    def stage_name(self) -> str:
        """The stage that a worker announces, such as ``body-1``; empty: of no worker."""
        return "" if self.stage is None else StageUid.parse(self.stage.uid).stage

    @property
    def part_states(self) -> tuple[tuple[str, int, str], ...]:
        """Stage, outer step and digest of each part that a node with all stages announces."""
        return tuple((part.stage, part.outer_step, part.state_digest) for part in self.parts)

    def peer(self) -> Peer:
        """Returns the address and certificate to call the node at."""
        return Peer(self.peer_id, self.address, self.certificate_pem.encode() or None)

    def stamped(self, now: float, lifetime_s: float) -> Self:
        """Returns a copy that was sent at ``now`` and expires ``lifetime_s`` seconds later."""
        return self.model_copy(update={"sent_at": float(now), "expires_at": float(now) + lifetime_s})


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A verified announcement and its wire form."""

    announcement: Announcement
    wire: bytes


def _content(announcement: Announcement) -> dict[str, JsonValue]:
    content: dict[str, JsonValue] = announcement.model_dump(mode="json")
    for name in ("stage", "filed_under", "parts", "relay_port"):
        if not content[name]:
            del content[name]
    return content


class _Envelope(Message):
    announcement: Announcement
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def sign_announcement(announcement: Announcement, identity: Identity) -> bytes:
    """Returns the wire form of a stamped announcement; raises `DiscoveryError` if it is another's, or too long."""
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
    """Parses and verifies an announcement from an untrusted source, or raises `AnnouncementRefusedError`.

    Its node's clock may be ``max_clock_skew_s`` ahead of ``now``. A ``run_id`` of None accepts any run (a seed serves
    all); ``subkey`` is the peer id under which it was stored in the DHT, if it was.
    """
    if len(wire) > MAX_WIRE_BYTES:
        raise AnnouncementRefusedError("oversized", f"expected at most {MAX_WIRE_BYTES} bytes, found {len(wire)}")
    try:
        envelope = _Envelope.model_validate_json(wire)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:80]  # Of an unknown field its name, which may be anything.
        raise AnnouncementRefusedError("malformed", f"not an announcement: {place!r}: {first['msg']}") from None
    announcement = envelope.announcement
    content = _content(announcement)
    if canonical_json({"announcement": content, "signature": envelope.signature}) != wire:
        raise AnnouncementRefusedError("malformed", "expected canonical JSON, found another form")
    if announcement.expires_at <= now and not allow_expired:
        raise AnnouncementRefusedError("expired", f"expired {now - announcement.expires_at:.1f} s ago")
    # Everything else is cheaper to check than the signature.
    peer_name = f"{announcement.peer_id[:16]}…"
    if subkey is not None and subkey != announcement.peer_id:
        raise AnnouncementRefusedError("subkey", f"stored under {subkey[:16]!r}, but announces {peer_name}")
    if run_id is not None and run_id != announcement.run_id:
        raise AnnouncementRefusedError("run", f"expected run {run_id!r}, found {announcement.run_id!r}")
    if announcement.sent_at > now + max_clock_skew_s:
        ahead = announcement.sent_at - now
        raise AnnouncementRefusedError("future", f"sent {ahead:.1f} s from now; one of the two clocks is wrong")
    if not 0 < announcement.expires_at - announcement.sent_at <= MAX_LIFETIME_S:
        raise AnnouncementRefusedError("lifetime", f"expected a lifetime of at most {MAX_LIFETIME_S:g} s")
    signed = _DOMAIN + canonical_json(content)
    if not verify_signature(announcement.peer_id, signed, bytes.fromhex(envelope.signature)):
        raise AnnouncementRefusedError("signature", f"not signed by {peer_name}, whom it announces")
    return announcement


@dataclass(slots=True)
class OwnRecord:
    """This node's announcement in wire form, signed again when it changes or is ``repeat_after_s`` seconds old."""

    identity: Identity
    _: KW_ONLY
    repeat_after_s: float
    lifetime_s: float
    clock: Callable[[], float] = time.time
    _current: KnownPeer | None = field(default=None, init=False)

    def set(self, announcement: Announcement) -> None:
        """Replaces the announcement; raises what `sign_announcement` does."""
        now = self.clock()
        if self._current is not None:  # Two records with one time could not be told apart.
            now = max(now, self._current.announcement.sent_at + 1e-3)
        self._sign(announcement, now)

    def current(self) -> KnownPeer | None:
        """Returns the current announcement with its wire form; None before the first `set`."""
        if self._current is not None:
            now = self.clock()
            age_s = now - self._current.announcement.sent_at
            # A clock that was set back makes the record seem sent in the future: others would drop it.
            if age_s >= self.repeat_after_s or age_s < -1.0:
                self._sign(self._current.announcement, now)
        return self._current

    @property
    def wire(self) -> bytes:
        """The current wire form; empty before the first `set`."""
        current = self.current()
        return b"" if current is None else current.wire

    def _sign(self, announcement: Announcement, now: float) -> None:
        signed = announcement.stamped(now, self.lifetime_s)
        self._current = KnownPeer(signed, sign_announcement(signed, self.identity))
