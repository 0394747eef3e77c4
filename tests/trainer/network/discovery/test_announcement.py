"""Only what a node itself signed, for this run, alive now and spelt in the one way, is believed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from manifests.spelling import canonical_json
from trainer.errors import DiscoveryError
from trainer.network.discovery.announcement import (
    MAX_LIFETIME_S,
    MAX_WIRE_BYTES,
    Announcement,
    AnnouncementRefusedError,
    sign_announcement,
    verify_announcement,
)
from trainer.network.discovery.stage_report import MAX_REASON, StageReport
from trainer.network.rpc.identity import Identity

_NOW = 1_800_000_000.0
_IDENTITY = Identity.create()
_HEX64 = st.text("0123456789abcdef", min_size=64, max_size=64)

_stages = st.builds(
    StageReport,
    uid=st.sampled_from(["head.0.42", "body3.0.55", "tail.0.999999"]),
    incarnation=st.text("0123456789abcdef", min_size=16, max_size=16),
    status=st.sampled_from(["joining", "serving", "leaving"]),
    version=st.integers(0, 2**53 - 1),
    num_tokens=st.integers(0, 2**53 - 1),
    queued=st.integers(0, 2**53 - 1),
    rows_per_s=st.floats(0, 1e11),
    busy=st.floats(0, 1),
)

_announcements = st.builds(
    Announcement,
    peer_id=st.just(_IDENTITY.peer_id),
    node_id=st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=40),
    run_id=st.just("run"),
    address=st.sampled_from(["10.0.0.1:1", "[2001:db8::1]:65535", "node-7.example.org:4100"]),
    certificate_pem=st.text(max_size=200),
    protocol=st.integers(0, 2**40),
    terms_digest=st.just("") | _HEX64,
    outer_step=st.integers(0, 2**53 - 1),
    state_digest=st.just("") | _HEX64,
    last_round_members=st.lists(_HEX64, max_size=3).map(tuple),
    inner_step=st.integers(0, 2**53 - 1),
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    tokens_per_s=st.floats(0, 1e14),
    shards=st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
    stage=st.none() | _stages,
)


def _verify(wire: bytes, **changes: object) -> Announcement:
    arguments: dict[str, object] = {"now": _NOW + 1, "max_clock_skew_s": 120.0, "run_id": "run"}
    return verify_announcement(wire, **(arguments | changes))  # type: ignore[arg-type]


def _reason(wire: bytes, **changes: object) -> str:
    with pytest.raises(AnnouncementRefusedError) as caught:
        _verify(wire, **changes)
    assert "\n" not in str(caught.value)
    return caught.value.reason


@pytest.fixture
def wire(identity: Identity, announce: Callable[..., bytes]) -> bytes:
    return announce(identity, sent_at=_NOW)


@pytest.mark.slow
@given(_announcements)
def test_what_is_signed_is_read_back(announcement: Announcement) -> None:
    stamped = announcement.stamped(_NOW, 60.0)
    wire = sign_announcement(stamped, _IDENTITY)
    assert len(wire) <= MAX_WIRE_BYTES
    assert _verify(wire, subkey=_IDENTITY.peer_id) == stamped


def test_the_longest_announcement_fits() -> None:
    longest = Announcement(
        peer_id=_IDENTITY.peer_id,
        node_id="n" * 128,
        run_id="r" * 128,
        address=f"{'h' * 253}:65535",
        certificate_pem="c" * 4096,
        protocol=2**53 - 1,
        terms_digest="f" * 64,
        outer_step=2**53 - 1,
        state_digest="f" * 64,
        last_round_members=("f" * 64,) * 64,
        loss=-1.2345678901234567e-300,
        shards=(2**53 - 1,) * 256,
        stage=StageReport(
            uid="body9999.0.999999",
            incarnation="f" * 16,
            status="joining",
            version=2**53 - 1,
            num_tokens=2**53 - 1,
            queued=2**53 - 1,
            rows_per_s=1.2345678901234567e-300,
            busy=1.2345678901234567e-300,
            unsaved_s=1.2345678901234567e-300,
            unsaved_because="\U0010ffff" * MAX_REASON,
        ),
        filed_under="body9999.0",
    )
    assert len(sign_announcement(longest.stamped(_NOW, 60.0), _IDENTITY)) <= MAX_WIRE_BYTES


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_no_byte_of_it_can_be_changed(data: st.DataObject) -> None:
    announcement = Announcement(peer_id=_IDENTITY.peer_id, node_id="n", run_id="run", address="h:1", loss=2.5)
    wire = sign_announcement(announcement.stamped(_NOW, 60.0), _IDENTITY)
    position = data.draw(st.integers(0, len(wire) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != wire[position]))
    changed = wire[:position] + bytes([other]) + wire[position + 1 :]
    assert _reason(changed, run_id=None) in {"malformed", "signature", "expired", "future", "lifetime"}


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_without_a_crash(data: bytes) -> None:
    assert _reason(data) == "malformed"


def test_another_spelling_is_refused(wire: bytes) -> None:
    assert _reason(json.dumps(json.loads(wire)).encode()) == "malformed"
    assert _reason(wire + b" ") == "malformed"


def test_an_unknown_field_is_refused(wire: bytes) -> None:
    value = json.loads(wire)
    value["announcement"]["weight"] = 1e12
    assert _reason(canonical_json(value)) == "malformed"


def test_who_holds_no_stage_says_what_was_said_before_there_were_stages(wire: bytes) -> None:
    """So that nodes of a run that is not cut understand those of the release before, and are understood."""
    value = json.loads(wire)
    assert not {"stage", "filed_under"} & set(value["announcement"])
    assert _verify(wire).stage is None
    for name, nothing in (("stage", None), ("filed_under", "")):
        spelt_out = {**value, "announcement": {**value["announcement"], name: nothing}}
        assert _reason(canonical_json(spelt_out)) == "malformed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": {"uid": "head.1.42", "incarnation": "0" * 16, "status": "serving"}},
        {"stage": {"uid": "body-3.0.42", "incarnation": "0" * 16, "status": "serving"}},
        {"stage": {"uid": "head.0.42", "incarnation": "0" * 16, "status": "dead"}},
        {"stage": {"uid": "head.0.42", "incarnation": "0" * 16, "status": "serving", "busy": 1.5}},
        {"stage": {"uid": "head.0.42", "incarnation": "0" * 16, "status": "serving", "weight": 3}},
        {"stage": {"uid": "head.0.42", "status": "serving"}},
        {"filed_under": "head.0"},
        {
            "stage": {"uid": "head.0.42", "incarnation": "0" * 16, "status": "serving"},
            "filed_under": "head.0.peers",
        },
    ],
)
def test_stages_that_cannot_be_are_refused(wrong: dict[str, object], wire: bytes) -> None:
    value = json.loads(wire)
    value["announcement"].update(wrong)
    assert _reason(canonical_json(value)) == "malformed"


def test_a_word_about_somebody_else_is_refused(wire: bytes) -> None:
    value = json.loads(wire)
    value["announcement"]["peer_id"] = Identity.create().peer_id
    assert _reason(canonical_json(value)) == "signature"


def test_refusals(wire: bytes, identity: Identity, announce: Callable[..., bytes]) -> None:
    assert _reason(wire, run_id="another") == "run"
    assert _reason(wire, subkey=Identity.create().peer_id) == "subkey"
    assert _reason(wire, now=_NOW + 60) == "expired"
    assert _reason(wire, now=_NOW - 121) == "future"
    assert _reason(announce(identity, sent_at=_NOW, lifetime_s=MAX_LIFETIME_S + 1)) == "lifetime"
    assert _reason(b"x" * (MAX_WIRE_BYTES + 1)) == "oversized"


def test_a_seed_takes_any_run_and_leaves_expiring_to_the_store(wire: bytes) -> None:
    assert _verify(wire, run_id=None, now=_NOW + 1000, allow_expired=True).run_id == "run"


def test_one_cannot_announce_for_another(identity: Identity) -> None:
    announcement = Announcement(peer_id=Identity.create().peer_id, node_id="n", run_id="run", address="h:1")
    with pytest.raises(DiscoveryError, match="whose key this is"):
        sign_announcement(announcement.stamped(_NOW, 60.0), identity)


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:65536", "a b:1", "host:1/x", ":1", "h:1\n"])
def test_an_address_nobody_can_reach_is_refused(identity: Identity, address: str) -> None:
    with pytest.raises(ValidationError):
        Announcement(peer_id=identity.peer_id, node_id="n", run_id="run", address=address)


@pytest.mark.parametrize(
    "fields", [{"loss": float("nan")}, {"tokens_per_s": -1.0}, {"node_id": "a\nb"}, {"shards": (-1,)}]
)
def test_values_that_mean_nothing_are_refused(identity: Identity, fields: dict[str, object]) -> None:
    content = {"peer_id": identity.peer_id, "node_id": "n", "run_id": "run", "address": "h:1"}
    with pytest.raises(ValidationError):
        Announcement.model_validate(content | fields)


def test_it_says_where_to_reach_the_node(identity: Identity) -> None:
    announcement = Announcement(
        peer_id=identity.peer_id, node_id="n", run_id="run", address="10.0.0.1:4100", certificate_pem="PEM"
    )
    peer = announcement.peer()
    assert (peer.peer_id, peer.address, peer.certificate) == (identity.peer_id, "10.0.0.1:4100", b"PEM")
    assert announcement.model_copy(update={"certificate_pem": ""}).peer().certificate is None


def test_stamping_changes_nothing_but_the_times(identity: Identity) -> None:
    announcement = Announcement(peer_id=identity.peer_id, node_id="n", run_id="run", address="h:1")
    now = time.time()
    stamped = announcement.stamped(now, 30)
    assert (stamped.sent_at, stamped.expires_at) == (now, now + 30)
    assert stamped.model_copy(update={"sent_at": 0.0, "expires_at": 0.0}) == announcement
