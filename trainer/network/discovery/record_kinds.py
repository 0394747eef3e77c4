"""The table of everything that nodes keep or pass on for others, and the one check that a DHT node makes of it.

A DHT node, a seed too, keeps what is in this table and nothing else: an announcement or a record that its own key has
signed, under the key and subkey that follow from its content, within the bounds of its kind. docs/records.md shows the
table; a test holds that it shows it whole. Credentials are in the table and in no DHT: nodes show them to each other
(`trainer.network.rpc.admission`). Lists of revoked peers are in a DHT as long as they are short; longer ones are told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trainer.errors import RefusedError
from trainer.network.discovery.announcement import MAX_LIFETIME_S, MAX_WIRE_BYTES, verify_announcement
from trainer.network.discovery.node_report import MAX_REPORT_BYTES, report_key, verify_report
from trainer.network.discovery.records import RecordRefusedError, SignedRecord, is_record, record_key
from trainer.network.discovery.run_change import RunChange
from trainer.network.discovery.stage_report import dht_key
from trainer.network.rpc.admission import MAX_KNOWN
from trainer.network.rpc.credential import MAX_CREDENTIAL_BYTES, MAX_LIST_BYTES, MAX_REVOKED, RevokedPeers
from trainer.network.rpc.envelope import parse_strict_json

RECORD_MODELS: Final[dict[str, type[SignedRecord]]] = {model.KIND.name: model for model in (RunChange,)}
"""The kinds of records by name; a further kind is a line here and a row in docs/records.md."""
_EXPIRY_SLACK_S: Final = 1e-3
_REVOKED: Final = b'{"issued_at":'
"""How the canonical form of a list of revoked peers begins."""
MAX_STORED_LIST_BYTES: Final = 1 << 16
"""Of a list of revoked peers that is kept in a DHT: some 970 peers."""
REVOKED_STORED_S: Final = 7 * 86_400.0
"""How long a DHT keeps a list after it was issued: as long as a credential can live."""
_REPORT: Final = b'{"report":'
"""How the canonical form of a report begins."""


@dataclass(frozen=True, slots=True)
class RecordRow:
    """One row of the table, for people."""

    name: str
    schema: str
    signer: str
    max_bytes: int
    age: str
    count: str


def table_rows() -> tuple[RecordRow, ...]:
    """Returns the table: announcements, the kinds of records by name, reports, and what authorities sign."""
    announcements = RecordRow(
        "announcement",
        "Announcement",
        "the node it is of (peer_id)",
        MAX_WIRE_BYTES,
        f"{MAX_LIFETIME_S:g} s by its own word, announcement_lifetime_s at its reader",
        "1 of a node; max_peers, and a quarter as many candidates",
    )
    records = (
        RecordRow(
            model.KIND.name,
            model.__name__,
            "the key in its name (signer)",
            model.KIND.max_bytes,
            "as long as the run" if model.KIND.max_age_s is None else f"{model.KIND.max_age_s:g} s",
            f"{model.KIND.max_count} of a signer in a run",
        )
        for _, model in sorted(RECORD_MODELS.items())
    )
    reports = RecordRow(
        "report",
        "NodeReport",
        "the node it is of (peer_id)",
        MAX_REPORT_BYTES,
        f"{MAX_LIFETIME_S:g} s",
        "1 of a node; of 256 nodes without a DHT",
    )
    credentials = RecordRow(
        "credential",
        "Credential",
        "an authority of the run (issuer)",
        MAX_CREDENTIAL_BYTES,
        "until its expires_at",
        f"1 of a node; of {MAX_KNOWN} nodes",
    )
    revocations = RecordRow(
        "revoked-peers",
        "RevokedPeers",
        "an authority of the run (issuer)",
        MAX_LIST_BYTES,
        "until there is one with a higher number",
        f"1 of an authority; {MAX_REVOKED} peers in it",
    )
    return (announcements, *records, reports, credentials, revocations)


def check_stored(wire: bytes, subkey: str, expires_at: float, *, now: float, max_clock_skew_s: float) -> str:
    """Checks what somebody stores in a DHT; returns the key that it belongs under.

    Raises:
        AnnouncementRefusedError, ReportRefusedError: an announcement or report that does not hold.
        RecordRefusedError: a record that does not hold, of a kind that is not in the table, or to be kept too long.
    """
    if wire.startswith(_REPORT):
        report = verify_report(wire, now=now, max_clock_skew_s=max_clock_skew_s, subkey=subkey, allow_expired=True)
        if not abs(expires_at - report.expires_at) <= _EXPIRY_SLACK_S:
            raise RecordRefusedError("expired", "to be kept until another time than it says itself")
        return report_key(report.run_id)
    if wire.startswith(_REVOKED):
        return revoked_key(_stored_list(wire, subkey, expires_at, now).run_name)
    if not is_record(wire):
        said = verify_announcement(wire, now=now, max_clock_skew_s=max_clock_skew_s, subkey=subkey, allow_expired=True)
        # Otherwise an old record could be stored again with a later time, and replace the new one.
        if not abs(expires_at - said.expires_at) <= _EXPIRY_SLACK_S:  # NaN is no such time either.
            raise RecordRefusedError("expired", "to be kept until another time than it says itself")
        return dht_key(said.run_id, said.filed_under)
    model = _model_of(wire)
    record = model.verified(wire, now=now, max_clock_skew_s=max_clock_skew_s, subkey=subkey)
    # A record's number says which of two is newer; how long it is kept is up to whoever stores it, within bounds.
    if not (math.isfinite(expires_at) and expires_at <= now + model.KIND.max_stored_s + max_clock_skew_s):
        raise RecordRefusedError("expired", f"expected to keep it for {model.KIND.max_stored_s:g} s at most")
    return record_key(record.run_id, model.KIND)


def revoked_key(run_name: str) -> str:
    """Under what a DHT keeps the lists of revoked peers of a run; the subkey is the authority that has signed one."""
    return f"{run_name}.revoked-peers"


def _stored_list(wire: bytes, subkey: str, expires_at: float, now: float) -> RevokedPeers:
    if len(wire) > MAX_STORED_LIST_BYTES:
        raise RecordRefusedError("oversized", f"expected at most {MAX_STORED_LIST_BYTES} bytes, found {len(wire)}")
    try:
        found = RevokedPeers.parse(wire)
        if subkey != found.issuer:
            raise RecordRefusedError("subkey", f"stored under {subkey[:80]!r}, but signed by {found.issuer[:24]!r}…")
        # As with announcements: an old list that is kept for longer would replace the newer one.
        if not abs(expires_at - (found.issued_at + REVOKED_STORED_S)) <= _EXPIRY_SLACK_S:
            raise RecordRefusedError("expired", "to be kept until another time than follows from when it was issued")
        found.verify(found.run_name, (found.issuer,), now)
    except RefusedError as error:
        raise RecordRefusedError("signature", str(error)) from None
    return found


def _model_of(wire: bytes) -> type[SignedRecord]:
    largest = max(model.KIND.max_bytes for model in RECORD_MODELS.values())
    if len(wire) > largest:
        raise RecordRefusedError("oversized", f"expected at most {largest} bytes, found {len(wire)}")
    try:
        name = parse_strict_json(wire).get("kind")
    except (ValueError, RecursionError):
        raise RecordRefusedError("malformed", "expected a JSON object, found something else") from None
    model = RECORD_MODELS.get(name) if isinstance(name, str) else None
    if model is None:
        raise RecordRefusedError("kind", f"expected one of {', '.join(RECORD_MODELS)}, found {str(name)[:40]!r}")
    return model
