"""Only what a node itself signed, for this run, alive now and spelt in the one way, is believed; and options."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from manifests.serialisation import canonical_json
from tests.support.announcements import announce, announcement
from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.network.discovery.announcement import (
    MAX_LIFETIME_S,
    MAX_WIRE_BYTES,
    Announcement,
    AnnouncementRefusedError,
    OwnRecord,
    sign_announcement,
    verify_announcement,
)
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.dht import SeedConfig, listen_address
from trainer.network.discovery.stage_report import MAX_REASON, StageReport
from trainer.network.rpc.identity import Identity

_NOW = 1_800_000_000.0
_IDENTITY = Identity.create()
_HEX64 = st.text("0123456789abcdef", min_size=64, max_size=64)
_COUNT = st.integers(0, 2**53 - 1)

_stages = st.builds(
    StageReport,
    uid=st.sampled_from(["head.0.42", "body3.0.55", "tail.0.999999"]),
    incarnation=st.text("0123456789abcdef", min_size=16, max_size=16),
    status=st.sampled_from(["joining", "serving", "leaving"]),
    version=_COUNT,
    num_tokens=_COUNT,
    queued=_COUNT,
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
    protocol=_COUNT,
    terms_digest=st.just("") | _HEX64,
    outer_step=_COUNT,
    state_digest=st.just("") | _HEX64,
    last_round_members=st.lists(_HEX64, max_size=3).map(tuple),
    inner_step=_COUNT,
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
def wire() -> bytes:
    return announce(_IDENTITY, sent_at=_NOW)


@pytest.mark.slow
@given(_announcements)
def test_what_is_signed_is_read_back(said: Announcement) -> None:
    stamped = said.stamped(_NOW, 60.0)
    assert (stamped.sent_at, stamped.expires_at) == (_NOW, _NOW + 60)
    assert stamped.model_copy(update={"sent_at": 0.0, "expires_at": 0.0}) == said
    wire = sign_announcement(stamped, _IDENTITY)
    assert len(wire) <= MAX_WIRE_BYTES
    assert _verify(wire, subkey=_IDENTITY.peer_id) == stamped


def test_the_longest_announcement_fits() -> None:
    count, tiny, digest = 2**53 - 1, 1.2345678901234567e-300, "f" * 64
    longest = Announcement(
        peer_id=_IDENTITY.peer_id,
        node_id="n" * 128,
        run_id="r" * 128,
        address=f"{'h' * 253}:65535",
        certificate_pem="c" * 4096,
        protocol=count,
        terms_digest=digest,
        outer_step=count,
        state_digest=digest,
        last_round_members=(digest,) * 64,
        loss=-tiny,
        shards=(count,) * 256,
        stage=StageReport(
            **{"uid": "body9999.0.999999", "incarnation": "f" * 16, "status": "joining"},
            **dict.fromkeys(("version", "num_tokens", "queued"), count),
            **dict.fromkeys(("rows_per_s", "busy", "unsaved_s"), tiny),
            unsaved_because="\U0010ffff" * MAX_REASON,
        ),
        filed_under="body9999.0",
    )
    assert len(sign_announcement(longest.stamped(_NOW, 60.0), _IDENTITY)) <= MAX_WIRE_BYTES


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_no_byte_of_it_can_be_changed(data: st.DataObject) -> None:
    wire = announce(_IDENTITY, sent_at=_NOW, loss=2.5)
    position = data.draw(st.integers(0, len(wire) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != wire[position]))
    changed = wire[:position] + bytes([other]) + wire[position + 1 :]
    assert _reason(changed, run_id=None) in {"malformed", "signature", "expired", "future", "lifetime"}


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_without_a_crash(data: bytes) -> None:
    assert _reason(data) == "malformed"


_STAGE = {"uid": "head.0.42", "incarnation": "0" * 16, "status": "serving"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"weight": 1e12}, "malformed"),  # An unknown field.
        ({"a\nb": 1}, "malformed"),  # One that would begin a new line in a log.
        ({"stage": None}, "malformed"),  # Left out by releases before stages, and so by all.
        ({"filed_under": ""}, "malformed"),
        ({"stage": {**_STAGE, "uid": "head.1.42"}}, "malformed"),
        ({"stage": {**_STAGE, "uid": "body-3.0.42"}}, "malformed"),
        ({"stage": {**_STAGE, "status": "dead"}}, "malformed"),
        ({"stage": {**_STAGE, "busy": 1.5}}, "malformed"),
        ({"stage": {**_STAGE, "weight": 3}}, "malformed"),
        ({"stage": {"uid": "head.0.42", "status": "serving"}}, "malformed"),
        ({"filed_under": "head.0"}, "malformed"),
        ({"stage": _STAGE, "filed_under": "head.0.peers"}, "malformed"),
        ({"peer_id": Identity.create().peer_id}, "signature"),  # A statement about another node.
    ],
)
def test_fields_that_cannot_be_are_refused(wrong: dict[str, object], reason: str, wire: bytes) -> None:
    value = json.loads(wire)
    value["announcement"].update(wrong)
    assert _reason(canonical_json(value)) == reason


def test_refusals(wire: bytes) -> None:
    assert not {"stage", "filed_under"} & set(json.loads(wire)["announcement"])
    assert _reason(json.dumps(json.loads(wire)).encode()) == "malformed"  # Another form.
    assert _reason(wire + b" ") == "malformed"
    assert _reason(wire, run_id="another") == "run"
    assert _reason(wire, subkey=Identity.create().peer_id) == "subkey"
    assert _reason(wire, now=_NOW + 60) == "expired"
    assert _reason(wire, now=_NOW - 121) == "future"
    assert _reason(announce(_IDENTITY, sent_at=_NOW, lifetime_s=MAX_LIFETIME_S + 1)) == "lifetime"
    assert _reason(b"x" * (MAX_WIRE_BYTES + 1)) == "oversized"
    # A seed takes any run, and leaves expiring to its store.
    assert _verify(wire, run_id=None, now=_NOW + 1000, allow_expired=True).run_id == "run"
    with pytest.raises(DiscoveryError, match="whose key this is"):
        sign_announcement(announcement(Identity.create()).stamped(_NOW, 60.0), _IDENTITY)


@pytest.mark.parametrize(
    "fields",
    [
        *({"address": it} for it in ("", "host", "host:0", "host:65536", "a b:1", "host:1/x", ":1", "h:1\n")),
        *({"loss": float("nan")}, {"tokens_per_s": -1.0}, {"node_id": "a\nb"}, {"shards": (-1,)}),
    ],
)
def test_values_that_mean_nothing_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        announcement(_IDENTITY, **fields)


def test_it_says_where_to_reach_the_node() -> None:
    for pem, certificate in (("PEM", b"PEM"), ("", None)):
        peer = announcement(_IDENTITY, address="10.0.0.1:4100", certificate_pem=pem).peer()
        assert (peer.peer_id, peer.address, peer.certificate) == (_IDENTITY.peer_id, "10.0.0.1:4100", certificate)


def test_it_is_signed_again_when_it_changes_or_grows_old_or_the_clock_is_set_back() -> None:
    now = _NOW
    own = OwnRecord(_IDENTITY, repeat_after_s=10, lifetime_s=60, clock=lambda: now)
    assert (own.current(), own.wire) == (None, b"")

    def sent_at() -> float:
        said = verify_announcement(own.wire, now=now, max_clock_skew_s=1)
        assert said == own.current().announcement
        return said.sent_at

    own.set(announcement(_IDENTITY))
    now += 9
    assert sent_at() == _NOW
    now += 1
    assert sent_at() == now
    own.set(announcement(_IDENTITY, inner_step=3))
    assert sent_at() > now
    assert own.current().announcement.inner_step == 3
    now -= 3600
    assert sent_at() == now


_ID = "12D3KooWGm9bJVTBVuZrZ3EXuGJEBWVTcKpWUWRjxEGbWwsXQW41"
_RSA_ID = "QmNLei78zWmzUdbeRB3CiUfAizWUrbeeZh5K1rhAQKCh51"
_SEED = f"/ip4/10.0.0.1/tcp/1/p2p/{_ID}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("announce_interval_s", 0.0),
        ("poll_interval_s", float("nan")),
        ("announcement_lifetime_s", 4000.0),
        ("announcement_lifetime_s", 9.0),
        ("max_peers", 0),
        ("dht_port", 70_000),
        ("initial_peers", ("10.0.0.1:1", _SEED)),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(TrainerUsageError, match=name):
        DiscoveryConfig(**{name: value})  # type: ignore[arg-type]


def test_multiaddresses() -> None:
    assert [DiscoveryConfig(initial_peers=peers).uses_dht for peers in ((_SEED,), ("10.0.0.1:1",), ())] == [
        True,
        False,
        False,
    ]
    assert listen_address("127.0.0.1", 7) == "/ip4/127.0.0.1/tcp/7"
    assert listen_address("::1", 7) == "/ip6/::1/tcp/7"
    with pytest.raises(DiscoveryError, match="IP address"):
        listen_address("localhost", 7)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1:4100", "gpu-7.example.org:4100", "gpu_7:1", "[2001:db8::1]:4100", "localhost:65535"),
        *(_SEED, f"/ip6/::1/tcp/4001/p2p/{_RSA_ID}", f"/dns4/seed.example.org/tcp/4001/p2p/{_ID}"),
        f"/ip4/10.0.0.1/udp/4001/quic-v1/p2p/{_ID}",
    ],
)
def test_an_address_that_can_be_dialled_is_taken(address: str) -> None:
    assert DiscoveryConfig(initial_peers=(address,)).initial_peers == (address,)


@pytest.mark.parametrize(
    "address",
    [
        *("", "foo", "10.0.0.1", "10.0.0.1:", ":4100", "10.0.0.1:0", "10.0.0.1:65536", "http://10.0.0.1:80", "a b:1"),
        *("10.0.0.1:4100,10.0.0.2:4100", "10.0.0.1:4100/p2p", "2001:db8::1:4100", "[10.0.0.1]x:4100"),
        *("/", "/ip4/127.0.0.1/tcp/24001", f"/ip4/127.0.0.1/p2p/{_ID}", f"/ip4/1270.0.1/tcp/1/p2p/{_ID}"),
        *(f"/ip4/10.0.0.1/tcp/0/p2p/{_ID}", f"/ip4/::1/tcp/1/p2p/{_ID}", f"/dns4/a b/tcp/1/p2p/{_ID}"),
        *(
            f"{_SEED[:-2]}",
            f"{_SEED}/",
            f"{_SEED}x",
            f"{_SEED} ",
            f"{_SEED},{_SEED}",
            f"{_SEED[:-1]}0",
        ),
        *("/ip4/10.0.0.1/tcp/1/p2p/", "/ip4/10.0.0.1/tcp/1/p2p/Qm", f"/ip4/10.0.0.1/tcp/1/p2p/{_RSA_ID[:-1]}"),
    ],
)
def test_an_address_that_nobody_could_dial_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"^initial_peers: expected .*, found ") as refusal:
        DiscoveryConfig(initial_peers=(address,))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            ({"initial_peers": (it,)}, "an address of a seed")
            for it in ("10.0.0.1:4001", "/ip4/10.0.0.1/tcp/4001", "foo")
        ),
        ({"port": 70_000}, "port"),
        ({"port": 0, "public_host": "203.0.113.1"}, "public_host"),
    ],
)
def test_a_seed_begins_at_seeds_and_is_reached_at_one_port(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        SeedConfig(**options)
