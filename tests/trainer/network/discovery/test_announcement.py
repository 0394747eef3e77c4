"""What a node says of itself: only what it signed, for this run, alive now and spelt in the one way, is believed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from manifests.serialisation import canonical_json
from tests.support.announcements import announce, announcement
from trainer.errors import DiscoveryError, TrainerUsageError
from trainer.model.config import stage_names
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
from trainer.network.discovery.seed import SeedConfig
from trainer.network.discovery.stage_report import (
    FIRST_NUMBER,
    MAX_PARTS,
    MAX_REASON,
    MOST_SHARDS_BESIDE_PARTS,
    PartReport,
    StagePartitions,
    StageReport,
    StageUid,
    dht_key,
    partition_of,
    settled_uid,
    workers_of,
)
from trainer.network.rpc.identity import Identity
from trainer.pipeline.protocol.work import MicroBatchId

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
    part = PartReport(
        **{"stage": "body-9999", "status": "joining", "state_digest": digest, "round_position": tiny},
        **dict.fromkeys(("outer_step", "round_index", "version"), count),
    )
    whole = {
        "stage": None,
        "filed_under": "",
        "last_round_members": (),
        "shards": (count,) * MOST_SHARDS_BESIDE_PARTS,
        "parts": tuple(part.model_copy(update={"stage": f"body-{1000 + number}"}) for number in range(MAX_PARTS)),
    }
    longest = longest.model_copy(update=whole)
    wire = sign_announcement(longest.stamped(_NOW, 60.0), _IDENTITY)
    assert len(wire) <= MAX_WIRE_BYTES
    assert _verify(wire, run_id=None).parts == longest.parts


def test_parts_are_of_a_node_without_a_stage_and_of_each_stage_once() -> None:
    part, worker = {"stage": "head", "status": "serving"}, {"uid": "head.0.42", "incarnation": "0" * 16}
    assert '"parts"' not in announce(_IDENTITY, sent_at=_NOW).decode()
    assert announcement(_IDENTITY, parts=(part, part | {"stage": "tail"})).parts[1].stage == "tail"
    for wrong in (
        {"parts": (part,), "stage": worker | {"status": "serving"}},
        {"parts": (part, part | {"status": "joining"})},
        {"parts": tuple(part | {"stage": f"body-{number}"} for number in range(1, MAX_PARTS + 2))},
        {"parts": (part | {"stage": "body-0"},)},
        {"parts": (part | {"status": "leaving"},)},
        {"parts": (part | {"weight": 1},)},
    ):
        with pytest.raises(ValidationError):
            announcement(_IDENTITY, **wrong)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data())
def test_no_byte_of_it_can_be_changed(data: st.DataObject) -> None:
    wire = announce(_IDENTITY, sent_at=_NOW, loss=2.5)
    position = data.draw(st.integers(0, len(wire) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != wire[position]))
    changed = wire[:position] + bytes([other]) + wire[position + 1 :]
    assert _reason(changed, run_id=None) in {"malformed", "signature", "expired", "future", "lifetime"}


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
        ({"filed_under": "head.0"}, "malformed"),
        ({"stage": _STAGE, "filed_under": "head.0.peers"}, "malformed"),
        ({"peer_id": Identity.create().peer_id}, "signature"),  # A statement about another node.
        ({"node_id": "a\nb"}, "malformed"),
        *(
            ({"address": it}, "malformed")
            for it in ("", "host", "host:0", "host:65536", "a b:1", "host:1/x", ":1", "h:1\n")
        ),
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
        *(f"{_SEED[:-2]}", f"{_SEED}/", f"{_SEED}x", f"{_SEED} ", f"{_SEED},{_SEED}", f"{_SEED[:-1]}0"),
        *("/ip4/10.0.0.1/tcp/1/p2p/", "/ip4/10.0.0.1/tcp/1/p2p/Qm", f"/ip4/10.0.0.1/tcp/1/p2p/{_RSA_ID[:-1]}"),
    ],
)
def test_an_address_that_nobody_could_dial_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"^initial_peers: expected .*, found ") as refusal:
        DiscoveryConfig(initial_peers=(address,))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (DiscoveryConfig, {"announcement_lifetime_s": 9.0}, "expected more than announce_interval_s"),
        (DiscoveryConfig, {"initial_peers": ("10.0.0.1:1", _SEED)}, "initial_peers: expected either"),
        (DiscoveryConfig, {"num_partitions": 2}, "num_partitions: expected 0 without partition_by_stage"),
        (StagePartitions, {"stages": ("head", "tail"), "num_partitions": 3}, "number of stages, 2, found 3"),
        *((SeedConfig, {"initial_peers": (it,)}, "an address of a seed") for it in ("10.0.0.1:1", _SEED[:20], "foo")),
        (SeedConfig, {"port": 0, "public_host": "203.0.113.1"}, "public_host"),
    ],
)
def test_a_bad_option_is_named(config: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said):
        config(**options)


NO_UIDS = ("", "head.0", "head.0.0", "body.0.4", "body0.0.4", "body-1.0.4", "head.1.42", "tail.0.04", "head.0.42\n")
NO_IDS = ("", "e0.s1", "e00.s1.r1", "e0.s1.r-1", "e0.s1.r1 ", "E0.S1.R1", "e0.s1.r99999999999")


@given(st.sampled_from(stage_names(7)), st.integers(1, 999_999), st.tuples(*[st.integers(0, 10**9 - 1)] * 3))
def test_a_worker_and_a_micro_batch_have_one_spelling(stage: str, number: int, place: tuple[int, int, int]) -> None:
    uid, micro_batch = StageUid(stage, number), MicroBatchId(*place)
    assert StageUid.parse(str(uid)) == uid
    assert str(uid).startswith(stage.replace("-", "") + ".0.")
    assert MicroBatchId.parse(str(micro_batch)) == micro_batch


@pytest.mark.parametrize("text", NO_UIDS + NO_IDS)
def test_other_spellings_are_none(text: str) -> None:
    with pytest.raises(TrainerUsageError, match=r"such as body3\.0\.55"):
        StageUid.parse(text)
    with pytest.raises(TrainerUsageError, match=r"such as e0\.s17\.r4096"):
        MicroBatchId.parse(text)


def _said(peer_id: str, uid: StageUid | None) -> Announcement:
    report = None if uid is None else StageReport(uid=str(uid), incarnation="0" * 16, status="serving")
    return Announcement(peer_id=peer_id, node_id=peer_id[-4:], run_id="run", address="h:1", stage=report)


def _peer_id(number: int, same_start: bool) -> str:
    """Keys that begin alike look for a free number from the same place on."""
    return f"{number:064x}" if same_start else f"{number:04x}".ljust(64, "0")


_peer_ids = st.booleans().flatmap(
    lambda same_start: st.lists(st.integers(0, 65_535), min_size=2, max_size=9, unique=True).map(
        lambda numbers: [_peer_id(number, same_start) for number in numbers]
    )
)


@pytest.mark.slow
@settings(max_examples=200)
@given(peer_ids=_peer_ids, data=st.data())
def test_concurrent_joiners_end_with_distinct_numbers_and_keep_them(peer_ids: list[str], data: st.DataObject) -> None:
    uids: dict[str, StageUid | None] = dict.fromkeys(peer_ids)
    views: dict[str, dict[str, Announcement]] = {peer_id: {} for peer_id in peer_ids}
    # Anyone, in any order, having heard of whomever, maybe long ago; some have a number of before.
    for peer_id in data.draw(st.lists(st.sampled_from(peer_ids), unique=True)):
        uids[peer_id] = StageUid("body-1", data.draw(st.integers(FIRST_NUMBER, FIRST_NUMBER + 2)))
    for actor, heard in data.draw(
        st.lists(st.tuples(st.sampled_from(peer_ids), st.lists(st.sampled_from(peer_ids), unique=True)), max_size=12)
    ):
        views[actor] |= {other: _said(other, uids[other]) for other in heard if other != actor}
        uids[actor] = settled_uid("body-1", actor, uids[actor], views[actor].values())
    # Then all hear of all, and all look at the same moment: nobody has an advantage.
    for _ in peer_ids:
        everyone = [_said(peer_id, uid) for peer_id, uid in uids.items()]
        uids = {peer_id: settled_uid("body-1", peer_id, uid, everyone) for peer_id, uid in uids.items()}
    assert len(set(uids.values())) == len(peer_ids)
    everyone = [_said(peer_id, uid) for peer_id, uid in uids.items()]
    for peer_id, uid in uids.items():
        assert settled_uid("body-1", peer_id, uid, everyone) == uid


def test_the_smaller_key_keeps_its_number_and_only_workers_of_the_stage_take_its_numbers() -> None:
    small, large = _peer_id(1, False), _peer_id(2, False)
    uid = StageUid("head", 42)
    others = [_said(small, uid), _said(_peer_id(3, False), None)]
    assert settled_uid("head", small, uid, [_said(large, uid)]) == uid
    moved = settled_uid("head", large, uid, others)
    assert moved.stage == "head" and moved.number != 42
    tail = StageUid("tail", 42)
    assert settled_uid("tail", large, tail, others) == tail
    assert (workers_of("head", others), workers_of("tail", others)) == ({small: 42}, {})
    # A restarted worker may find its own earlier announcement. One that changes its stage takes a new name.
    assert settled_uid("tail", large, tail, [_said(large, tail)]) == tail
    first = StageUid("head", FIRST_NUMBER)
    found = settled_uid("head", _peer_id(0, True), StageUid("tail", FIRST_NUMBER), [_said(small, first)])
    assert found == StageUid("head", FIRST_NUMBER + 1)


@given(num_stages=st.integers(2, 200), data=st.data())
def test_every_partition_has_neighbours_and_as_many_as_any_other_or_one_less(num_stages, data) -> None:
    num_partitions = data.draw(st.integers(1, num_stages))
    dealt = [partition_of(stage, num_stages, num_partitions) for stage in range(num_stages)]
    sizes = Counter(dealt)
    assert dealt == sorted(dealt)
    assert set(sizes) == set(range(num_partitions))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_neighbouring_stages_share_a_partition() -> None:
    """32 stages over 4: stages 0 to 7 in the first, 8 to 15 in the second; over as many, each has its own."""
    assert [partition_of(stage, 32, 4) for stage in (0, 7, 8, 15, 16, 31)] == [0, 0, 1, 1, 2, 3]
    partitions = StagePartitions(stage_names(32), 4)
    assert partitions.labels() == ("", "head.0", "body8.0", "body16.0", "body24.0")
    assert partitions.label("tail") == "body24.0"
    assert partitions.labels(["body-9", "body-8"]) == ("", "body8.0")
    assert StagePartitions(stage_names(4)).labels() == ("", "head.0", "body1.0", "body2.0", "tail.0")
    assert StagePartitions(stage_names(4)).labels(["body-2"]) == ("", "body2.0")
    assert StagePartitions().labels() == StagePartitions().labels(["body-1"]) == ("",)
    assert StagePartitions().label("body-1") == ""
    assert (dht_key("run"), dht_key("run", "body8.0")) == ("run.peers", "run.body8.0")
    with pytest.raises(DiscoveryError, match=r"expected one of the run's stages head, body-1, tail, found 'body-2'"):
        StagePartitions(stage_names(3)).label("body-2")
