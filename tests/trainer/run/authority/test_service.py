"""An authority's answers: who is admitted, who is refused and with which word, to which addresses it dials."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.authority import LOCAL, Authority, answering_endpoint, join_wire, running_authority
from tests.support.rpc_node import RUN_ID, Clock, refused
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import MAX_CLOCK_SKEW_S
from trainer.run.authority.assignment import stage_by_need
from trainer.run.authority.messages import (
    CheckIn,
    invitation_key,
    new_invitation,
    package_digest,
    sign_check_in,
    token_hash,
)
from trainer.run.authority.register import THERE_S, Register
from trainer.run.authority.service import AuthorityConfig

_STAGES = ("head", "body-1", "tail")


async def _join(authority: Authority, identity: Identity, address: str, invitation: str = "", **changes: Any) -> Any:
    return await authority.service.join(join_wire(identity, address, invitation, **changes), LOCAL)


async def test_an_invitation_admits_as_often_as_it_says_and_members_need_none(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False) as authority, AsyncExitStack() as stack:
        invitation = authority.invite(uses=2)
        nodes = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(3)]
        for node in nodes[:2]:
            reply = await _join(authority, node.identity, node.address, invitation)
            reply.credential.verify(RUN_ID, [authority.key], time.time(), ())
            assert (reply.credential.peer_id, reply.credential.role) == (node.peer_id, "worker")
        with refused("token", "none left"):
            await _join(authority, nodes[2].identity, nodes[2].address, invitation)
        for _ in range(3):  # Neither a renewal nor a restart with the invitation costs a use.
            await _join(authority, nodes[0].identity, nodes[0].address)
            await _join(authority, nodes[0].identity, nodes[0].address, invitation)
        authority.register.allow(nodes[2].peer_id, "worker")
        await _join(authority, nodes[2].identity, nodes[2].address)
        assert [member.peer_id for member in authority.register.members()] == [node.peer_id for node in nodes]


async def test_a_node_without_an_address_is_admitted_where_rounds_go_through_a_bucket(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False, outbound_only=True) as authority:
        identity = Identity.create()
        reply = await _join(authority, identity, "", authority.invite("node"), role="node")
        reply.credential.verify(RUN_ID, [authority.key], time.time(), ())
        with pytest.raises(RefusedError):  # A worker has to be reached.
            await _join(authority, Identity.create(), "", authority.invite("worker"), role="worker")
    async with running_authority(tmp_path / "other", over_http=False) as authority:
        with pytest.raises(RefusedError):
            await _join(authority, identity, "", authority.invite("node"), role="node")


async def test_uses_are_counted_once_however_many_come_at_the_same_moment(tmp_path: Path) -> None:
    """Two authorities on one file, eight nodes at once, three uses."""
    async with (
        running_authority(tmp_path, over_http=False) as one,
        running_authority(tmp_path, over_http=False) as two,
        AsyncExitStack() as stack,
    ):
        invitation = one.invite(uses=3)
        nodes = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(8)]
        found = await asyncio.gather(
            *(
                _join((one, two)[number % 2], node.identity, node.address, invitation)
                for number, node in enumerate(nodes)
            ),
            return_exceptions=True,
        )
        refusals = [each for each in found if isinstance(each, RefusedError)]
        assert [each.reason for each in refusals] == ["token"] * 5
        assert len(one.register.members()) == len(two.register.members()) == 3


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("run", {"run_name": "corpus-9"}),
        ("clock", {"now": time.time() - MAX_CLOCK_SKEW_S - 30}),
        ("clock", {"now": time.time() + MAX_CLOCK_SKEW_S + 7200}),
        ("signature", {"signer": Identity.create()}),
        ("token", {"token_signer": Identity.create()}),
        ("token", {"token_key": ""}),
        ("token", {"invitation": new_invitation()}),
        ("role", {"role": "driver"}),
        ("address", {"address": "no-such-host.invalid:4100"}),
        ("address", {"address": f"{LOCAL}:80"}),
        ("address", {"address": "224.0.0.1:4100"}),
        ("address", {"address": "localhost"}),
        ("address", {"address": "10.1.2.3:4100"}),
        ("unreachable", {"address": f"{LOCAL}:1025"}),
        ("stage", {"stage": "body-7"}),
        ("package", {"package_digest": "0" * 64}),
    ],
)
async def test_every_mistake_has_its_word_and_costs_no_use(
    tmp_path: Path, reason: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trainer")
    options: dict[str, Any] = {"stages": _STAGES, "package_digests": (package_digest(),)}
    async with (
        running_authority(tmp_path, over_http=False, **options) as authority,
        answering_endpoint(Identity.create()) as node,
    ):
        invitation = authority.invite(uses=1)
        good = {"address": node.address, "invitation": invitation, "package_digest": package_digest()}
        with refused(reason) as _:
            await _join(authority, node.identity, **(good | changes))
        assert authority.service.refused == {reason: 1}
        assert authority.register.members() == ()
        [left] = authority.register.invitations()
        assert left.uses_left == 1
        [line] = [record.getMessage() for record in caplog.records if record.message.startswith("refused a join")]
        assert "\n" not in line
        assert (await _join(authority, node.identity, **good)).credential.stage in _STAGES
        assert invitation.removeprefix("invite-") not in caplog.text


async def test_nothing_that_is_logged_has_several_lines(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False) as authority:
        wire = join_wire(Identity.create(), "x:4100", authority.invite("driver"), role="driver")
        for lines in (b"x:4100\\nadmitted", b"x:4100\\u001b[2J"):
            with refused("malformed", "printable"):
                await authority.service.join(wire.replace(b"x:4100", lines), LOCAL)


async def test_a_request_that_came_before_is_refused_by_all_authorities_on_the_file(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path, over_http=False) as one,
        running_authority(tmp_path, over_http=False) as two,
        answering_endpoint(Identity.create()) as node,
    ):
        wire = join_wire(node.identity, node.address, one.invite())
        await one.service.join(wire, LOCAL)
        for authority in (one, two):
            with refused("replayed"):
                await authority.service.join(wire, LOCAL)


async def test_nobody_else_joins_by_a_withdrawn_invitation_and_who_has_stays(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False) as authority, AsyncExitStack() as stack:
        node, other = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(2)]
        invitation, kept = authority.invite(uses=2), authority.invite()
        await _join(authority, node.identity, node.address, invitation)
        name = authority.register.invitations()[0].name
        before = authority.register.withdraw(name, time.time())
        assert (before.uses, before.uses_left) == (2, 1)
        with refused("token"):
            await _join(authority, other.identity, other.address, invitation)
        await _join(authority, node.identity, node.address, invitation)
        await _join(authority, other.identity, other.address, kept)


async def test_an_invitation_expires_and_a_revoked_node_does_not_come_back(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False) as authority, AsyncExitStack() as stack:
        node, other = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(2)]
        with refused("token", "expired"):
            await _join(authority, node.identity, node.address, authority.invite(life_s=-1.0))
        await _join(authority, node.identity, node.address, authority.invite())
        number = authority.register.revoke(node.peer_id, time.time(), 3600.0)
        assert authority.register.revoke(node.peer_id, time.time() + 10.0, 3600.0) == number
        authority.register.allow(node.peer_id, "worker")
        for invitation in ("", authority.invite()):
            with refused("revoked"):
                await _join(authority, node.identity, node.address, invitation)
        newest = await authority.service.revoked()
        assert newest is not None
        newest.verify(RUN_ID, [authority.key], time.time())
        assert (newest.number, newest.revoked) == (number, (node.peer_id,))
        await _join(authority, other.identity, other.address, authority.invite())


async def test_a_list_drops_whose_credentials_have_all_expired(tmp_path: Path) -> None:
    clock = Clock()
    async with running_authority(tmp_path, over_http=False, clock=clock, life_s=100.0) as authority:
        authority.register.revoke("0" * 64, clock.now_s, 100.0)
        clock.now_s += 300.0
        number = authority.register.revoke("1" * 64, clock.now_s, 100.0)
        newest = await authority.service.revoked()
        assert newest is not None
        assert (newest.number, newest.revoked) == (number, ("1" * 64,))


# -- dialling back -----------------------------------------------------------------------------------------------------


async def test_a_node_must_answer_under_its_own_key(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path, over_http=False) as authority,
        answering_endpoint(Identity.create()) as somebody,
    ):
        for role in ("worker", "node"):
            with refused("unreachable"):
                invitation = authority.invite(role)  # type: ignore[arg-type]
                await _join(authority, Identity.create(), somebody.address, invitation, role=role)
        # A driver only calls; that it was not reached is in the list.
        await _join(authority, Identity.create(), somebody.address, authority.invite("driver"), role="driver")
        [member] = authority.register.members()
        assert not member.is_reached


@pytest.mark.parametrize(
    ("remote_host", "is_dialled"), [(LOCAL, True), ("203.0.113.9", False), ("10.0.0.7", False), ("unknown", False)]
)
async def test_this_machine_is_dialled_for_those_on_it_only(tmp_path: Path, remote_host: str, is_dialled: bool) -> None:
    connected = 0

    async def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        writer.close()

    server = await asyncio.start_server(count, LOCAL, 0)
    port = server.sockets[0].getsockname()[1]
    async with running_authority(tmp_path, over_http=False) as authority, server:
        for address in (f"{LOCAL}:{port}", f"localhost:{port}"):
            wire = join_wire(Identity.create(), address, authority.invite())
            with pytest.raises(RefusedError) as caught:
                await authority.service.join(wire, remote_host)
            assert caught.value.reason in (("unreachable", "rate") if is_dialled else ("address",))
        assert bool(connected) == is_dialled


async def test_nothing_is_dialled_for_who_has_no_right_to_join(tmp_path: Path) -> None:
    connected = 0

    async def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        writer.close()

    server = await asyncio.start_server(count, LOCAL, 0)
    address = f"{LOCAL}:{server.sockets[0].getsockname()[1]}"
    async with running_authority(tmp_path, over_http=False) as authority, server:
        for invitation in ("", new_invitation()):
            with refused("token"):
                await _join(authority, Identity.create(), address, invitation)
        assert connected == 0


async def test_one_host_is_dialled_a_bounded_number_of_times(tmp_path: Path) -> None:
    """A member that asks for port after port learns of few, and then of none."""
    async with running_authority(tmp_path, over_http=False, allow_private=True) as authority:
        invitation, found = authority.invite(uses=1), Counter[str]()
        for port in range(30_000, 30_040):
            wire = join_wire(Identity.create(), f"127.0.0.9:{port}", invitation)
            try:
                await authority.service.join(wire, "203.0.113.9")
            except RefusedError as error:
                found[error.reason] += 1
        assert found == {"unreachable": 8, "rate": 32}


async def test_requests_of_one_address_are_bounded(tmp_path: Path) -> None:
    options = {"requests_at_once": 5.0, "requests_per_s": 0.01}
    async with running_authority(tmp_path, over_http=False, **options) as authority:
        found = Counter[str]()
        for number in range(20):
            try:
                authority.service.take_request(f"2001:db8::{number:x}")
                found["taken"] += 1
            except RefusedError as error:
                found[error.reason] += 1
        assert found == {"taken": 5, "rate": 15}
        assert authority.service.refused == {"rate": 15}
        authority.service.take_request("2001:db8:1::1")


# -- stages, check-ins -------------------------------------------------------------------------------------------------


def test_the_stage_with_the_fewest_is_the_neediest() -> None:
    assert stage_by_need(_STAGES, {"head": 2, "tail": 1}, "f" * 64) == "body-1"
    assert stage_by_need(_STAGES, {"head": 2, "body-1": 1, "tail": 2}, "0" * 64) == "body-1"
    chosen = Counter(stage_by_need(_STAGES, {}, Identity.create().peer_id) for _ in range(300))
    assert set(chosen) == set(_STAGES)
    assert min(chosen.values()) > 50


async def test_workers_spread_evenly_and_who_is_gone_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    async with (
        running_authority(tmp_path, over_http=False, stages=_STAGES, clock=clock) as authority,
        AsyncExitStack() as stack,
    ):
        invitation = authority.invite(uses=12)
        nodes = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(8)]

        async def join(number: int, stage: str = "auto") -> str:
            node = nodes[number]
            reply = await _join(authority, node.identity, node.address, invitation, stage=stage, now=clock.now_s)
            return str(reply.credential.stage)

        placed = await asyncio.gather(*(join(number) for number in range(6)))
        assert Counter(placed) == {"head": 2, "body-1": 2, "tail": 2}
        assert await join(0, placed[0]) == placed[0]
        clock.now_s += THERE_S + 1.0
        for number in range(6):  # All but those of one stage are there still.
            if placed[number] != "body-1":
                request = CheckIn(
                    run_name=RUN_ID, peer_id=nodes[number].peer_id, known={}, sent_at=clock.now_s, stage=placed[number]
                )
                await authority.service.check_in(sign_check_in(request, nodes[number].identity), LOCAL)
        assert await join(6) == "body-1"
        assert await join(7) == "body-1"


async def test_a_check_in_brings_news_to_members_only(tmp_path: Path) -> None:
    async with (
        running_authority(tmp_path, over_http=False) as authority,
        answering_endpoint(Identity.create()) as node,
    ):

        def check_in(identity: Identity, *, known: int = 0, run_name: str = RUN_ID, ago_s: float = 0.0) -> bytes:
            numbers = {authority.key: known} if known else {}
            request = CheckIn(
                run_name=run_name, peer_id=node.peer_id, known=numbers, sent_at=time.time() - ago_s, stage="tail"
            )
            return sign_check_in(request, identity)

        with refused("unknown"):
            await authority.service.check_in(check_in(node.identity), LOCAL)
        await _join(authority, node.identity, node.address, authority.invite())
        assert (await authority.service.check_in(check_in(node.identity), LOCAL)).revoked is None
        assert authority.register.members()[0].stage == "tail"
        number = authority.register.revoke("0" * 64, time.time(), 60.0)
        reply = await authority.service.check_in(check_in(node.identity), LOCAL)
        assert reply.revoked is not None
        assert reply.revoked.revoked == ("0" * 64,)
        assert (await authority.service.check_in(check_in(node.identity, known=number), LOCAL)).revoked is None
        for wire, reason in (
            (check_in(Identity.create()), "signature"),
            (check_in(node.identity, run_name="corpus-9"), "run"),
            (check_in(node.identity, ago_s=500.0), "clock"),
            (check_in(node.identity, ago_s=60.0), "replayed"),
            (b"[]", "malformed"),
        ):
            with refused(reason):
                await authority.service.check_in(wire, LOCAL)
        authority.register.revoke(node.peer_id, time.time(), 60.0)
        with refused("revoked"):
            await authority.service.check_in(check_in(node.identity), LOCAL)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_revocation_by_an_older_copy_of_the_file_is_newer_than_all_before_it(tmp_path: Path) -> None:
    now = time.time()
    original = Register(tmp_path / "authority.sqlite")
    first = original.revoke("0" * 64, now, 3600.0)
    original.close()
    (tmp_path / "copy.sqlite").write_bytes((tmp_path / "authority.sqlite").read_bytes())
    original = Register(tmp_path / "authority.sqlite")
    lost = original.revoke("1" * 64, now + 1.0, 3600.0)
    assert original.revoke("2" * 64, now + 1.0, 3600.0) == lost + 1
    original.close()
    copy = Register(tmp_path / "copy.sqlite")
    assert copy.revoked(now) == (first, ("0" * 64,))
    assert first < lost < lost + 1 < copy.revoke("3" * 64, now + 60.0, 3600.0)
    copy.close()


def test_a_file_is_of_one_run_and_keeps_no_invitation(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "authority.sqlite"
    register = Register(path)
    register.bind(RUN_ID)
    invitation = new_invitation()
    key = invitation_key(invitation)
    register.invite(key.peer_id, "worker", 3, time.time(), 60.0)
    register.close()
    with pytest.raises(TrainerUsageError, match="expected run 'corpus-9', found 'test-run'"):
        Register(path).bind("corpus-9")
    stored = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert token_hash(key.peer_id)[:32].encode() in stored
    assert key.peer_id.encode() not in stored
    assert invitation.removeprefix("invite-").encode() not in stored
    assert path.stat().st_mode & 0o077 == 0
    (tmp_path / "no.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(TrainerUsageError, match="not a database"):
        Register(tmp_path / "no.sqlite")


@pytest.mark.parametrize("text", ["", "invite-", "invite-abc", "wallet", "invite-" + "q7" * 20, "invite-" + "A" * 44])
def test_what_is_no_invitation_is_not_repeated(text: str) -> None:
    with pytest.raises(TrainerUsageError, match="cut short") as caught:
        invitation_key(text)
    assert len(text) < 10 or text not in str(caught.value)


def test_the_digest_is_of_all_files_that_are_installed() -> None:
    assert package_digest() == package_digest()
    assert len(package_digest()) == 64


@pytest.mark.parametrize("life_s", [0.0, 1e9])
def test_lives_that_make_no_sense_are_told(life_s: float) -> None:
    with pytest.raises(TrainerUsageError, match="--life-s"):
        AuthorityConfig(life_s=life_s)


# -- all together ------------------------------------------------------------------------------------------------------

_REQUESTS, _NODES = 10_000, 24


def _says(wire: bytes) -> object:
    try:
        return json.loads(wire)
    except ValueError:
        return None


@pytest.mark.slow
async def test_of_ten_thousand_requests_the_good_ones_are_in_and_nothing_else(tmp_path: Path) -> None:
    """Forged, replayed, expired, uninvited and good ones, shuffled, from hundreds of addresses, 16 at once."""
    rng = random.Random(20261123)
    async with (
        running_authority(
            tmp_path, over_http=False, allow_private=True, stages=_STAGES, requests_at_once=1e6
        ) as authority,
        AsyncExitStack() as stack,
    ):
        nodes = [await stack.enter_async_context(answering_endpoint(Identity.create())) for _ in range(_NODES)]
        good_invitation = authority.invite(uses=_NODES)
        used_up, expired = authority.invite(uses=1), authority.invite(life_s=-1.0)
        first = await stack.enter_async_context(answering_endpoint(Identity.create()))
        await _join(authority, first.identity, first.address, used_up)
        strangers = [Identity.create() for _ in range(50)]
        closed = f"{LOCAL}:1025"

        def bad(kind: str) -> bytes:
            stranger, node = rng.choice(strangers), rng.choice(nodes)
            now = time.time()
            match kind:
                case "forged":
                    return join_wire(node.identity, node.address, good_invitation, signer=stranger)
                case "token of another":
                    return join_wire(stranger, node.address, good_invitation, token_signer=rng.choice(strangers))
                case "uninvited":
                    return join_wire(stranger, closed, rng.choice(["", new_invitation()]))
                case "used up":
                    return join_wire(stranger, closed, rng.choice([used_up, expired]))
                case "old":
                    return join_wire(node.identity, node.address, good_invitation, now=now - rng.uniform(200, 1e6))
                case "other run":
                    return join_wire(node.identity, node.address, good_invitation, run_name="corpus-9")
                case "other role":
                    return join_wire(stranger, closed, good_invitation, role="driver")
                case _:
                    whole = join_wire(node.identity, node.address, good_invitation)
                    damaged = whole
                    while _says(damaged) == _says(whole):  # The last digit of a time may mean the same number.
                        wire = bytearray(whole)
                        wire[rng.randrange(len(wire))] ^= 1 << rng.randrange(7)
                        damaged = bytes(wire)
                    return damaged

        kinds = ["forged", "token of another", "uninvited", "used up", "old", "other run", "other role", "damaged"]
        goods = [join_wire(node.identity, node.address, good_invitation, stage="auto") for node in nodes]
        wires = [(bad(rng.choice(kinds)), False) for _ in range(_REQUESTS - 3 * _NODES)]
        wires += [(wire, True) for wire in goods for _ in range(3)]  # Each twice again: a replay.
        rng.shuffle(wires)
        assert len(wires) == _REQUESTS
        admitted: list[str] = []
        outcomes: Counter[str] = Counter()
        queue = iter(wires)

        async def client() -> None:
            for wire, is_good in queue:
                try:
                    reply = await authority.service.join(wire, f"198.51.{rng.randrange(4)}.{rng.randrange(250)}")
                except RefusedError as error:
                    outcomes[error.reason] += 1
                else:
                    assert is_good, wire
                    admitted.append(reply.credential.peer_id)

        await asyncio.gather(*(client() for _ in range(16)))
        assert sorted(admitted) == sorted(node.peer_id for node in nodes)
        members = authority.register.members()
        assert {member.peer_id for member in members} == {*admitted, first.peer_id}
        assert outcomes["replayed"] == 2 * _NODES
        assert outcomes.total() == _REQUESTS - _NODES
        assert {"signature", "token", "clock", "run", "role", "malformed"} <= set(outcomes)
        placed = Counter(member.stage for member in members if member.peer_id != first.peer_id)
        assert all(abs(placed[stage] - _NODES / 3) <= 1 for stage in _STAGES)
