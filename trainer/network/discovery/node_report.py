"""Reports: what a node says once a minute of its work and its health, signed, short-lived and in canonical form.

On the wire it is canonical JSON, ``{"report": {…}, "signature": "<hex>"}``, signed (ed25519) by the key that is the
node's `peer_id`, 4 KiB at most. It is a record of its own, since announcements travel twice in
ten seconds to everybody, and releases that know no reports have to read those. The trade-off: all of it is the node's
own word. What a reader can compare with something else it has to compare itself (`trainer.monitor.contribution`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError

from manifests.serialisation import canonical_json
from trainer.errors import DiscoveryError
from trainer.network.discovery.announcement import MAX_LIFETIME_S, Instant, Name, PeerIdField
from trainer.network.discovery.stage_report import MAX_REASON, Counted, Incarnation
from trainer.network.rpc.identity import Identity, verify_signature
from trainer.network.rpc.messages import Message

MAX_REPORT_BYTES: Final = 4 * 1024
"""Longest report that is parsed."""
MAX_ROUNDS: Final = 4
"""Latest rounds in one report; of more in a minute the earlier ones are only counted."""

_STAGE: Final = r"^(|head|tail|body-[1-9][0-9]{0,3})$"
_DOMAIN = b"genesis node report 1\n"

Seconds = Annotated[float, Field(ge=0, lt=1e11)]
Role = Literal["node", "worker", "driver"]


class ReportRefusedError(DiscoveryError):
    """A report failed verification; ``reason`` is a word as of `AnnouncementRefusedError`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ReportedRound(Message):
    """One of a node's latest rounds. What it took is split: until all agreed, the tensors, the vote."""

    round_index: Counted
    ended_at: Instant
    num_members: Annotated[int, Field(ge=0, le=65_536)] = 0
    num_dropped: Annotated[int, Field(ge=0, le=65_536)] = 0
    completeness: Annotated[float, Field(ge=0, le=1)] = 0.0
    seconds: Seconds = 0.0
    agree_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    vote_s: Seconds = 0.0
    sent_bytes: Counted = 0
    received_bytes: Counted = 0
    stage: Annotated[str, Field(pattern=_STAGE)] = ""
    """Whose round it was, at a node that has several; elsewhere the report's."""
    error: Annotated[str, Field(max_length=MAX_REASON)] = ""
    """Why it has no result; empty: it has one."""


class DhtTraffic(Message):
    """What a node's part of the DHT was asked by others since its start, and how many records it keeps."""

    stores: Counted = 0
    finds: Counted = 0
    records: Counted = 0


class NodeReport(Message):
    """One node's statement about its work. Sums are since the node became this `incarnation`."""

    peer_id: PeerIdField
    node_id: Name
    run_id: Name
    role: Role
    incarnation: Incarnation
    stage: Annotated[str, Field(pattern=_STAGE)] = ""
    software: Annotated[str, Field(max_length=64)] = ""  # Version of the package.
    began_at: Instant = 0.0
    flops: Annotated[float, Field(ge=0, lt=1e30)] = 0.0
    """Of forward and backward passes that counted, by the model's arithmetic (`trainer.model.sizing`)."""
    num_tokens: Counted = 0
    num_steps: Counted = 0
    micro_batches: Counted = 0  # Counted by a worker.
    active_s: Seconds = 0.0  # In which it computed.
    rounds_shared: Counted = 0
    rounds_alone: Counted = 0
    rounds_failed: Counted = 0
    withdrawals: Counted = 0
    """How often it has taken itself out to take up the others' state."""
    rounds: Annotated[tuple[ReportedRound, ...], Field(max_length=MAX_ROUNDS)] = ()
    loss: float | None = None
    tokens_per_s: Annotated[float, Field(ge=0, lt=1e15)] = 0.0
    sent_bytes: Counted = 0
    received_bytes: Counted = 0
    memory_bytes: Counted = 0  # Resident, of the process.
    is_called: bool | None = None
    """Whether others have called it at its address in the last while; None: it is too young to tell."""
    checkpoint_age_s: Seconds | None = None  # None: it makes no checkpoints, or has not run for long enough to.
    checkpoint_problem: Annotated[str, Field(max_length=MAX_REASON)] = ""
    dht: DhtTraffic | None = None  # None: it meets the others without a DHT.
    sent_at: Instant = 0.0
    expires_at: Instant = 0.0

    def stamped(self, now: float, lifetime_s: float) -> Self:
        """Returns a copy that was sent at ``now`` and expires ``lifetime_s`` seconds later."""
        return self.model_copy(update={"sent_at": float(now), "expires_at": float(now) + lifetime_s})


@dataclass(frozen=True, slots=True)
class SignedReport:
    """A verified report and its wire form."""

    report: NodeReport
    wire: bytes


class _Envelope(Message):
    report: NodeReport
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def _content(report: NodeReport) -> dict[str, JsonValue]:
    """What is signed; a round's stage only where there is one, since earlier releases know none."""
    content: dict[str, JsonValue] = report.model_dump(mode="json")
    content["rounds"] = [it.model_dump(mode="json", exclude=None if it.stage else {"stage"}) for it in report.rounds]
    return content


def sign_report(report: NodeReport, identity: Identity) -> SignedReport:
    """Signs a stamped report; raises `DiscoveryError` if it is another's, or too long."""
    if report.peer_id != identity.peer_id:
        raise DiscoveryError(
            f"expected to report on {identity.peer_id[:16]}…, whose key this is, found {report.peer_id[:16]}…"
        )
    content = _content(report)
    signature = identity.sign(_DOMAIN + canonical_json(content)).hex()
    wire = canonical_json({"report": content, "signature": signature})
    if len(wire) > MAX_REPORT_BYTES:
        raise DiscoveryError(f"expected a report of at most {MAX_REPORT_BYTES} bytes, found {len(wire)}")
    return SignedReport(report, wire)


def verify_report(
    wire: bytes,
    *,
    now: float,
    max_clock_skew_s: float,
    run_id: str | None = None,
    subkey: str | None = None,
    allow_expired: bool = False,
) -> NodeReport:
    """Parses and verifies a report from an untrusted source, or raises `ReportRefusedError`.

    Arguments are those of `trainer.network.discovery.announcement.verify_announcement`.
    """
    if len(wire) > MAX_REPORT_BYTES:
        raise ReportRefusedError("oversized", f"expected at most {MAX_REPORT_BYTES} bytes, found {len(wire)}")
    try:
        envelope = _Envelope.model_validate_json(wire)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:80]
        raise ReportRefusedError("malformed", f"not a report: {place!r}: {first['msg']}") from None
    report = envelope.report
    content = _content(report)
    if canonical_json({"report": content, "signature": envelope.signature}) != wire:
        raise ReportRefusedError("malformed", "expected canonical JSON, found another form")
    _check_frame(report, now, max_clock_skew_s, run_id, subkey, allow_expired=allow_expired)
    if not verify_signature(report.peer_id, _DOMAIN + canonical_json(content), bytes.fromhex(envelope.signature)):
        raise ReportRefusedError("signature", f"not signed by {report.peer_id[:16]}…, on whom it reports")
    return report


def _check_frame(
    report: NodeReport,
    now: float,
    max_clock_skew_s: float,
    run_id: str | None,
    subkey: str | None,
    *,
    allow_expired: bool,
) -> None:
    """Checks what is cheaper to check than a signature; raises `ReportRefusedError`."""
    if report.expires_at <= now and not allow_expired:
        raise ReportRefusedError("expired", f"expired {now - report.expires_at:.1f} s ago")
    if subkey is not None and subkey != report.peer_id:
        raise ReportRefusedError("subkey", f"sent or stored by {subkey[:16]!r}, but of {report.peer_id[:16]}…")
    if run_id is not None and run_id != report.run_id:
        raise ReportRefusedError("run", f"expected run {run_id!r}, found {report.run_id!r}")
    if report.sent_at > now + max_clock_skew_s:
        ahead_s = report.sent_at - now
        raise ReportRefusedError("future", f"sent {ahead_s:.1f} s from now; one of the two clocks is wrong")
    if not 0 < report.expires_at - report.sent_at <= MAX_LIFETIME_S:
        raise ReportRefusedError("lifetime", f"expected a lifetime of at most {MAX_LIFETIME_S:g} s")


def report_key(run_id: str) -> str:
    """Returns the DHT key of a run's reports."""
    return f"{run_id}.reports"
