"""Records: one spelling, one signer, bounded; whatever else comes is refused with a word and a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manifests.serialisation import canonical_json
from tests.support.announcements import announce
from trainer.errors import DiscoveryError, TrainerError
from trainer.network.discovery.announcement import AnnouncementRefusedError
from trainer.network.discovery.node_report import ReportRefusedError
from trainer.network.discovery.record_kinds import (
    RECORD_MODELS,
    REVOKED_STORED_S,
    check_stored,
    revoked_key,
    table_rows,
)
from trainer.network.discovery.records import RecordRefusedError, record_key, sign_record
from trainer.network.discovery.run_change import MAX_SETTINGS, RUN_CHANGE, RunChange
from trainer.network.discovery.stage_report import dht_key
from trainer.network.rpc.credential import RevokedPeers
from trainer.network.rpc.identity import Identity

_NOW = 1_800_000_000.0
_OWNER, _OTHER = Identity.create(), Identity.create()
_SKEW_S = 120.0
_DOCS = Path(__file__).resolve().parents[4] / "docs"

_scalars = (
    st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=20)
)
_names = st.from_regex(r"[a-z][a-z0-9_]{0,9}(\.[a-z][a-z0-9_]{0,9}){0,2}", fullmatch=True)
_changes = st.builds(
    RunChange,
    run_id=st.sampled_from(["run", "corpus-8", "Läufe 7"]),
    signer=st.just(_OWNER.peer_id),
    number=st.integers(1, RUN_CHANGE.max_count),
    issued_at=st.floats(0, _NOW),
    previous=st.text("0123456789abcdef", min_size=64, max_size=64),
    at_round=st.integers(0, 2**53 - 1),
    settings=st.dictionaries(_names, _scalars | st.lists(_scalars, max_size=3).map(tuple), min_size=1, max_size=4),
    comment=st.text(st.characters(categories=["L", "N"]), max_size=20),
)


def _change(**fields: Any) -> RunChange:
    content: dict[str, Any] = {
        "run_id": "run",
        "signer": _OWNER.peer_id,
        "number": 1,
        "issued_at": _NOW,
        "previous": "ab" * 32,
        "at_round": 7,
        "settings": {"inner.lr": 2e-4},
    }
    return RunChange(**(content | fields))


def _verified(wire: bytes, **changes: Any) -> RunChange:
    return RunChange.verified(wire, **({"now": _NOW, "max_clock_skew_s": _SKEW_S} | changes))


@given(_changes)
def test_a_record_comes_back_as_it_was_signed(change: RunChange) -> None:
    wire = sign_record(change, _OWNER)
    assert len(wire) <= RUN_CHANGE.max_bytes
    found = _verified(wire, run_id=change.run_id, signer=_OWNER.peer_id, subkey=change.subkey)
    assert found == change
    kinds = [{name: type(value) for name, value in each.settings.items()} for each in (found, change)]
    assert kinds[0] == kinds[1]
    assert found.digest() == change.digest()


def test_one_spelling_only() -> None:
    wire = sign_record(_change(), _OWNER)
    value = json.loads(wire)
    for other in (json.dumps(value).encode(), wire + b"\n", wire.replace(b'"at_round":7', b'"at_round":7.0')):
        with pytest.raises(RecordRefusedError) as refused:
            _verified(other)
        assert refused.value.reason == "malformed"


@pytest.mark.parametrize(
    ("reason", "fields", "changes"),
    [
        ("run", {}, {"run_id": "another"}),
        ("signer", {}, {"signer": _OTHER.peer_id}),
        ("subkey", {}, {"subkey": f"{_OWNER.peer_id}.2"}),
        ("subkey", {}, {"subkey": f"{_OTHER.peer_id}.1"}),
        ("future", {"issued_at": _NOW + _SKEW_S + 1}, {}),
        ("malformed", {"number": RUN_CHANGE.max_count + 1}, {}),
    ],
)
def test_what_is_not_what_its_place_says_is_refused(
    reason: str, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    wire = sign_record(_change(**fields), _OWNER)
    with pytest.raises(RecordRefusedError) as refused:
        _verified(wire, **changes)
    assert refused.value.reason == reason
    assert "\n" not in str(refused.value)


def test_only_the_key_in_its_name_signs_a_record() -> None:
    with pytest.raises(DiscoveryError, match="whose key this is"):
        sign_record(_change(), _OTHER)
    value = json.loads(sign_record(_change(), _OWNER))
    value["record"]["signer"] = _OTHER.peer_id
    with pytest.raises(RecordRefusedError, match="not signed by"):
        _verified(canonical_json(value))


@given(st.data())
def test_no_part_of_a_signed_record_can_be_changed(data: st.DataObject) -> None:
    wire = sign_record(_change(settings={"inner.lr": 2e-4, "rule.rule": "median"}, comment="why"), _OWNER)
    place = data.draw(st.integers(0, len(wire) - 1))
    other = bytes([data.draw(st.integers(0, 255).filter(lambda byte: byte != wire[place]))])
    with pytest.raises(RecordRefusedError):
        _verified(wire[:place] + other + wire[place + 1 :])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
_envelopes = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["run-change", "announcement", ""]) | _json,
        "record": st.dictionaries(st.sampled_from([*RunChange.model_fields, "x"]), _json) | _json,
        "signature": st.just("0" * 128) | _json,
    }
)


@given(
    st.binary(max_size=300)
    | _json.map(lambda it: json.dumps(it).encode())
    | _envelopes.map(lambda it: json.dumps(it, sort_keys=True, separators=(",", ":")).encode())
)
@example(b'{"kind":"run-change","record":' + b"[" * 5000)
@example(b'{"report":' + b"[" * 5000)
@example(b'{"issued_at":' + b"[" * 5000)
@example(b'{"issued_at":1e999,"issuer":"","number":0,"revoked":[],"run_name":"","signature":""}')
@example(b'{"report":{"peer_id":"\\ud800"},"signature":""}')
@example(b'{"kind":"' + b"x" * 20_000)
@example(b'{"kind":"run-change","record":{"number":1e999},"signature":"' + b"0" * 128 + b'"}')
@example(b'{"kind":"run-change","kind":"run-change","record":{},"signature":""}')
@example(b'{"kind":"run-change","record":{"run_id":"\\ud800"},"signature":""}')
def test_nothing_that_anybody_can_send_is_more_than_a_refusal(wire: bytes) -> None:
    for check in (
        lambda: _verified(wire),
        lambda: check_stored(wire, "a.1", _NOW + 60, now=_NOW, max_clock_skew_s=_SKEW_S),
    ):
        with pytest.raises((RecordRefusedError, AnnouncementRefusedError, ReportRefusedError)) as refused:
            check()
        assert isinstance(refused.value, TrainerError)
        assert refused.value.reason.isalpha()
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 400


def test_more_than_a_record_may_hold_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        _change(settings={f"inner.lr{number}": 1 for number in range(MAX_SETTINGS + 1)})
    with pytest.raises(ValueError, match="at least 1"):
        _change(settings={})
    with pytest.raises(DiscoveryError, match="at most 8192 bytes"):
        sign_record(_change(settings={f"a.b{number}": "x" * 250 for number in range(MAX_SETTINGS)}), _OWNER)


def _stored(wire: bytes, subkey: str, expires_at: float) -> str:
    return check_stored(wire, subkey, expires_at, now=_NOW, max_clock_skew_s=_SKEW_S)


def test_a_dht_keeps_a_record_under_its_own_name_and_for_a_while() -> None:
    change = _change()
    wire = sign_record(change, _OWNER)
    assert _stored(wire, change.subkey, _NOW + RUN_CHANGE.max_stored_s) == record_key("run", RUN_CHANGE)
    for subkey, expires_at in (
        (f"{_OTHER.peer_id}.1", _NOW + 60),
        (change.subkey, _NOW + RUN_CHANGE.max_stored_s + _SKEW_S + 1),
        (change.subkey, math.nan),
        (change.subkey, math.inf),
    ):
        with pytest.raises(RecordRefusedError):
            _stored(wire, subkey, expires_at)


def test_a_dht_keeps_an_announcement_for_as_long_as_it_says_itself() -> None:
    wire = announce(_OWNER, sent_at=_NOW, lifetime_s=60.0)
    assert _stored(wire, _OWNER.peer_id, _NOW + 60.0) == dht_key("run")
    for subkey, seconds in ((_OWNER.peer_id, 90.0), (_OTHER.peer_id, 60.0), (_OWNER.peer_id, math.nan)):
        with pytest.raises((RecordRefusedError, AnnouncementRefusedError)):
            _stored(wire, subkey, _NOW + seconds)


def test_a_dht_keeps_a_list_of_revoked_peers_for_as_long_as_follows_from_its_time() -> None:
    found = RevokedPeers.issue(_OWNER, "run", 7, ["a" * 64], _NOW)
    until = _NOW + REVOKED_STORED_S
    assert _stored(found.wire(), _OWNER.peer_id, until) == revoked_key("run")
    forged = found.model_copy(update={"number": 8})
    longest = RevokedPeers.issue(_OWNER, "run", 7, [f"{number:064x}" for number in range(1000)], _NOW)
    ahead = RevokedPeers.issue(_OWNER, "run", 7, ["a" * 64], _NOW + 3600.0)
    for wire, subkey, expires_at in (
        (found.wire(), _OTHER.peer_id, until),
        (found.wire(), _OWNER.peer_id, until + 60.0),
        (found.wire(), _OWNER.peer_id, math.nan),
        (forged.wire(), _OWNER.peer_id, until),
        (longest.wire(), _OWNER.peer_id, until),
        (ahead.wire(), _OWNER.peer_id, until + 3600.0),
        (found.wire()[:-1], _OWNER.peer_id, until),
    ):
        with pytest.raises(RecordRefusedError):
            _stored(wire, subkey, expires_at)


def test_the_page_of_records_has_every_kind_with_its_bounds() -> None:
    page = (_DOCS / "records.md").read_text(encoding="utf-8")
    rows = table_rows()
    assert {row.name for row in rows} == {"announcement", "report", "credential", "revoked-peers", *RECORD_MODELS}
    for row in rows:
        line = f"| `{row.name}` | `{row.schema}` | {row.signer} | {row.max_bytes:,} | {row.age} | {row.count} |"
        assert line in page, line
