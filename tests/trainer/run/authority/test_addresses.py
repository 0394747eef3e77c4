"""What an authority signs of its run's bucket, and for whom: its members' own names, few and small."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from manifests.serialisation import canonical_json
from tests.support.authority import LOCAL, Authority, join_wire, running_authority
from tests.support.bucket_rounds import FAST, Replica, close_collectives, folder, settings_of, together
from tests.support.rpc_node import RUN_ID, refused
from tests.support.s3_servers import Server, moto_s3, point_boto3_at
from trainer.bucket_rounds.documents import MAX_AGREEMENT_BYTES, MAX_RECORD_BYTES
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.object_names import (
    RUN_KEY,
    agreement_key,
    contribution_key,
    departure_key,
    snapshot_prefix,
    state_key,
    wish_key,
)
from trainer.bucket_rounds.rules import weights_of
from trainer.collective.planning import coordinator_order
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Identity
from trainer.run.authority.addresses import AddressConfig, BucketAddresses, refusal_of
from trainer.run.authority.cleaning import keeping_of
from trainer.run.authority.messages import AddressReply, AddressRequest, WantedAddress, sign_address_request
from trainer.run.node.bucket_settings import described

OWN, OTHER, DIGEST = "a" * 64, "b" * 64, "c" * 64
SMALL = AddressConfig(max_contribution_bytes=1000, hourly_bytes=1e5, hourly_objects=20.0)


def put(key: str, size_bytes: int = 10, *, if_absent: bool = True) -> WantedAddress:
    return WantedAddress(kind="put", key=key, size_bytes=size_bytes, if_absent=if_absent)


@pytest.mark.parametrize(
    "wanted",
    [
        put(contribution_key(3, OWN, DIGEST), 1000),
        put(state_key(3, OWN), MAX_RECORD_BYTES),
        put(agreement_key(3, 0), MAX_AGREEMENT_BYTES),
        put("run.json"),
        put(wish_key(OWN), if_absent=False),
        put(f"{snapshot_prefix(3, DIGEST)}data-000000", 64 << 20),
        put(departure_key(3, OWN), MAX_RECORD_BYTES),
        WantedAddress(kind="delete", key=wish_key(OWN)),
        WantedAddress(kind="delete", key=departure_key(3, OWN)),
        WantedAddress(kind="get", key=contribution_key(3, OTHER, DIGEST)),
        WantedAddress(kind="list", key="rounds/0000000003/", after=state_key(3, OTHER)),
        WantedAddress(kind="list", key="snapshots/"),
    ],
)
def test_a_member_may_do_what_rounds_need(wanted: WantedAddress) -> None:
    assert refusal_of(OWN, wanted, SMALL) == ""


@pytest.mark.parametrize(
    "wanted",
    [
        put(contribution_key(3, OTHER, DIGEST)),
        put(state_key(3, OTHER)),
        put(departure_key(3, OTHER)),
        put(departure_key(3, OWN), if_absent=False),
        put(wish_key(OTHER), if_absent=False),
        put(contribution_key(3, OWN, DIGEST), 10_000),
        put(contribution_key(3, OWN, DIGEST), if_absent=False),
        put(agreement_key(3, 0), MAX_AGREEMENT_BYTES + 1),
        put(state_key(3, OWN), MAX_RECORD_BYTES + 1),
        put(f"{snapshot_prefix(3, DIGEST)}data-000000", (64 << 20) + 1),
        put("manifest.json"),
        put("rounds/0000000003/notes"),
        put("../other-run/run.json"),
        WantedAddress(kind="delete", key=contribution_key(3, OWN, DIGEST)),
        WantedAddress(kind="delete", key=wish_key(OTHER)),
        WantedAddress(kind="delete", key=departure_key(3, OTHER)),
        WantedAddress(kind="delete", key=agreement_key(3, 0)),
        WantedAddress(kind="get", key="manifest.json"),
        WantedAddress(kind="list", key=""),
        WantedAddress(kind="list", key="rounds/0000000003/", after="snapshots/x"),
    ],
)
def test_a_member_may_do_nothing_else(wanted: WantedAddress) -> None:
    assert refusal_of(OWN, wanted, SMALL) != ""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with moto_s3("bucket") as running:
        yield running


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketAddresses]:
    point_boto3_at(server, None, monkeypatch)
    found = BucketAddresses(f"s3://bucket/run-{time.time_ns()}", RUN_ID, SMALL)
    yield found
    found.close()


def test_a_member_puts_few_objects_and_few_bytes(bucket: BucketAddresses) -> None:
    for number in range(4):
        bucket.sign(OWN, [put(contribution_key(3, OWN, f"{number:064x}"))])
        bucket.sign(OWN, [put(contribution_key(3, OWN, f"{number:064x}"))])  # Asked for again.
    with refused("rate", "fewer or smaller"):
        bucket.sign(OWN, [put(contribution_key(3, OWN, "d" * 64))])
    bucket.sign(OTHER, [put(contribution_key(3, OTHER, DIGEST))])
    with refused("rate", "fewer or smaller"):
        bucket.sign(OTHER, [put("run.json", 1 << 20)])
    with refused("rate", "fewer or smaller"):
        for number in range(20):
            bucket.sign(OWN, [put(state_key(number, OWN))])


def may_store(bucket: BucketAddresses, member: str) -> bool:
    try:
        bucket.sign(member, [put(f"{snapshot_prefix(0, DIGEST)}data-000000", 100)])
    except RefusedError as error:
        assert error.reason == "name"
        return False
    return True


def test_a_snapshot_is_put_by_the_member_whose_turn_it_is(bucket: BucketAddresses) -> None:
    store = bucket.place._store
    bucket._run_name = "test"
    members = [Replica(settings_of(store, config=replace(FAST, snapshot_rounds=1))) for _ in range(2)]
    described = {"run_id": "test", "rounds": asdict(members[0].settings.rules)}
    bucket.place.put_once("run.json", json.dumps(described).encode())
    assert not may_store(bucket, members[0].settings.own_id)  # Who asks too early spoils nobody's turn.
    together({str(number): each.take_part for number, each in enumerate(members)})
    close_collectives()
    agreement = members[0].agreements[0]
    assert agreement.has_snapshot
    # Each puts an agreement of itself alone beside the one that counts, by which it would be its turn.
    for attempt, each in enumerate(members, 1):
        own = next(it for it in agreement.members if it.member == each.settings.own_id)
        (weight,) = weights_of([own.claims], each.settings.rules)
        alone = agreement.model_copy(
            update={"attempt": attempt, "members": (own.model_copy(update={"weight": weight}),)}
        )
        bucket.place.put_once(agreement_key(0, attempt), alone.signed(each.settings.identity).wire())
    assert len(History(bucket.place, members[0].settings.rules).attempts(0)) == 3
    signed = [each.settings.own_id for each in members if may_store(bucket, each.settings.own_id)]
    assert signed == coordinator_order("test", 0, {each.settings.own_id for each in members})[:1]
    with refused("name", "by no agreement"):
        bucket.sign(members[0].settings.own_id, [put(f"{snapshot_prefix(7, DIGEST)}data-000000")])


def asked(identity: Identity, sent_at: float, signer: Identity | None = None, **changes: Any) -> bytes:
    content = {
        "run_name": RUN_ID,
        "peer_id": identity.peer_id,
        "wanted": (WantedAddress(kind="list", key="rounds/"),),
        "sent_at": sent_at,
    }
    return sign_address_request(AddressRequest(**(content | changes)), signer or identity)


async def admitted(authority: Authority) -> Identity:
    identity = Identity.create()
    authority.register.allow(identity.peer_id, "node")
    await authority.service.join(join_wire(identity, "", role="node"), LOCAL)
    return identity


async def test_addresses_are_for_members_alone(tmp_path: Path, bucket: BucketAddresses) -> None:
    now = time.time()
    async with running_authority(tmp_path, over_http=False, outbound_only=True, clock=lambda: now) as authority:
        service = authority.service
        with refused("role", "signs for a bucket"):
            await service.addresses(asked(Identity.create(), now), LOCAL)
        service.bucket = bucket
        identity, revoked = await admitted(authority), await admitted(authority)
        reply = await service.addresses(asked(identity, now), LOCAL)
        assert isinstance(reply, AddressReply)
        assert "X-Amz-Signature=" in reply.addresses[0].url
        assert reply.addresses[0].life_s == SMALL.life_s
        with refused("replayed", "came before"):
            await service.addresses(asked(identity, now), LOCAL)
        with refused("unknown", "join first"):
            await service.addresses(asked(Identity.create(), now), LOCAL)
        with refused("signature", "found another"):
            await service.addresses(asked(identity, now + 1, signer=Identity.create()), LOCAL)
        with refused("run", "another"):
            await service.addresses(asked(identity, now + 1, run_name="another"), LOCAL)
        with refused("clock", "apart"):
            await service.addresses(asked(identity, now + 900), LOCAL)
        authority.register.revoke(revoked.peer_id, now, 3600.0)
        with refused("revoked", "has revoked"):
            await service.addresses(asked(revoked, now), LOCAL)
        now += 4 * 3600 + 1
        with refused("unknown", "expired"):
            await service.addresses(asked(identity, now), LOCAL)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(TrainerUsageError, match="30 s to a day"):
        AddressConfig(life_s=5)
    with pytest.raises(TrainerUsageError, match="--member-gb: expected a number above 0, found -1"):
        AddressConfig(hourly_bytes=-1e9)


@pytest.mark.parametrize("options", [{}, {"num_slices": 6, "snapshot_rounds": 40, "keep_rounds": 9}])
def test_the_authority_removes_by_the_runs_own_options(tmp_path: Path, options: dict[str, int]) -> None:
    config = replace(FAST, access="signed", url="", **options)  # type: ignore[arg-type]
    settings, authority = settings_of(folder(tmp_path), config=config), Identity.create()
    assert keeping_of(settings.place, "test", authority) is None
    content = {"run_id": "test", "rounds": described(settings)}
    settings.place.put_once(RUN_KEY, canonical_json(content))
    keeping = keeping_of(settings.place, "test", authority)
    assert keeping is not None
    kept = keeping.settings.config
    assert (kept.num_slices, kept.snapshot_rounds, kept.keep_rounds) == (
        *(config.num_slices, config.snapshot_rounds, config.keep_rounds),
    )
