"""A relay of a run with an authority: members and newcomers with a pass get a port, hostile clients a reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.authority import running_authority
from tests.support.rpc_node import FAST, RUN_ID, Clock, ask, register_test_methods
from tests.support.waiting import until
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.network.relay import Relay, RelayConfig, RelayedReach
from trainer.network.relay.client import OwnPlace, RelayLinks, ShownCredential
from trainer.network.relay.probing import probe_relay
from trainer.network.relay.protocol import pack_credential
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import Credential, RelayPass, RevokedPeers, Role
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.admission import AdmissionClient

AUTHORITY = Identity.create()


def _admission(clock: Clock | None = None) -> Admission:
    return Admission(RUN_ID, [AUTHORITY.peer_id], clock or time.time)


def _member(identity: Identity, role: Role = "worker", life_s: float = 3600.0) -> Admission:
    admission = _admission()
    admission.take_own(Credential.issue(AUTHORITY, RUN_ID, identity.peer_id, role, None, time.time(), life_s))
    return admission


@asynccontextmanager
async def _relay(admission: Admission | None = None, **options: object) -> AsyncIterator[Relay]:
    relay = Relay(RelayConfig(host="127.0.0.1", **options), admission or _admission(), AUTHORITY)  # type: ignore[arg-type]
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


@asynccontextmanager
async def _relayed(
    relay: Relay, identity: Identity, admission: Admission, **options: object
) -> AsyncIterator[Endpoint]:
    """A node that listens where the relay does not see it come from."""
    reach = RelayedReach(RelayConfig(through=(f"127.0.0.1:{relay.port}",), wait_s=10.0))
    config = RpcConfig(**{**FAST, "host": "127.0.0.2", **options})  # type: ignore[arg-type]
    endpoint = Endpoint(identity, RUN_ID, config, admission, reach)
    register_test_methods(endpoint)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


async def _refusal(relay: Relay, shown: bytes, identity: Identity, run_id: str = RUN_ID) -> str:
    """Registers with whatever is to be shown, and returns what the relay says to that."""

    async def show() -> bytes:
        return shown

    admission = Admission(run_id, [AUTHORITY.peer_id])
    links = RelayLinks(
        OwnPlace(
            identity=identity,
            listens_at=("127.0.0.2", 4100),
            certificate_sha256="",
            credential=ShownCredential(admission, show),
        )
    )
    links.add(f"127.0.0.1:{relay.port}")
    try:
        await until(lambda: links.address or links.states()[0].failure)
        return links.states()[0].failure
    finally:
        await links.stop()


async def test_members_are_relayed() -> None:
    one, caller = Identity.create(), Identity.create()
    async with _relay() as relay, _relayed(relay, one, _member(one)) as node:
        config = RpcConfig(**FAST)  # type: ignore[arg-type]
        other = Endpoint(caller, RUN_ID, config, _member(caller))
        await other.start()
        assert (await ask(other, node.peer, text="here")).sender == one.peer_id
        await other.stop()


def _issued(
    identity: Identity, authority: Identity = AUTHORITY, run: str = RUN_ID, role: Role = "worker"
) -> Credential:
    return Credential.issue(authority, run, identity.peer_id, role, None, time.time(), 3600.0)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("nothing", "found none; join the run by its authority"),
        ("noise", "expected a Credential"),
        ("another's", "expected the credential of"),
        ("another authority", "expected an authority that the run names"),
        ("another run", "expected a document of run"),
        ("expired", "expired"),
        ("a monitor", "that of a monitor"),
        ("forged", "expected a signature by"),
        ("an expired pass", "relay pass that is valid"),
        ("a pass for days", "for at most 600 s"),
        ("another's pass", "expected the relay pass of"),
        ("a pass of another authority", "expected an authority that the run names"),
    ],
)
async def test_who_shows_no_valid_credential_is_refused_with_the_reason(case: str, expected: str) -> None:
    own, other, now = Identity.create(), Identity.create(), time.time()
    shown = {
        "nothing": b"",
        "noise": b"\xff" * 900,
        "another's": _issued(other).wire(),
        "another authority": _issued(own, other).wire(),
        "another run": _issued(own, run="another").wire(),
        "expired": Credential.issue(AUTHORITY, RUN_ID, own.peer_id, "worker", None, now - 7200, 3600.0).wire(),
        "a monitor": _issued(own, role="monitor").wire(),
        "forged": _issued(own).model_copy(update={"signature": "00" * 64}).wire(),
        "an expired pass": RelayPass.issue(AUTHORITY, RUN_ID, own.peer_id, now - 900, 300.0).wire(),
        "a pass for days": RelayPass.issue(AUTHORITY, RUN_ID, own.peer_id, now, 86_400.0).wire(),
        "another's pass": RelayPass.issue(AUTHORITY, RUN_ID, other.peer_id, now, 300.0).wire(),
        "a pass of another authority": RelayPass.issue(other, RUN_ID, own.peer_id, now, 300.0).wire(),
    }[case]
    async with _relay() as relay:
        assert expected in await _refusal(relay, shown, own)
        assert relay.num_nodes == 0


async def test_a_node_of_no_run_with_an_authority_is_told_whom_the_relay_serves() -> None:
    async with _relay() as relay:
        assert f"members of run '{RUN_ID}' only" in await _refusal(relay, b"", Identity.create(), run_id="mine")


async def test_a_revoked_member_loses_its_port_within_seconds_and_gets_none_again() -> None:
    identity, admission = Identity.create(), _admission()
    async with _relay(admission) as relay, _relayed(relay, identity, _member(identity)) as node:
        assert not node.address.startswith("127.0.0.2")
        admission.revoke(RevokedPeers.issue(AUTHORITY, RUN_ID, 1, [identity.peer_id], time.time()))
        await until(lambda: relay.num_nodes == 0)
        assert "has revoked" in await _refusal(relay, _issued(identity).wire(), identity)


async def test_a_port_is_lost_when_what_was_shown_expires_and_kept_where_it_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.network.relay.client._PING_S", 0.5)
    clock = Clock()
    clock.now_s = time.time()
    lasting, passing = Identity.create(), Identity.create()
    kept = _member(lasting, life_s=100.0)
    async with (
        _relay(_admission(clock)) as relay,
        _relayed(relay, lasting, kept),
        _relayed(relay, passing, _member(passing, life_s=100.0)),
    ):
        assert relay.num_nodes == 2
        # The one renews its credential while it is registered, the other does not.
        kept.take_own(Credential.issue(AUTHORITY, RUN_ID, lasting.peer_id, "worker", None, time.time(), 9000.0))
        link = relay._nodes[lasting.peer_id]
        await until(lambda: link.place.until > clock.now_s + 8000)
        clock.now_s += 300.0
        await until(lambda: relay.num_nodes == 1)
        assert lasting.peer_id in relay._nodes


async def test_a_flood_of_registrations_costs_a_ration_of_signatures() -> None:
    admission = _admission()
    async with _relay(admission) as relay:
        forged = [Identity.create() for _ in range(24)]
        wires = [_issued(it).model_copy(update={"signature": "00" * 64}).wire() for it in forged]
        said = await asyncio.gather(*(_refusal(relay, wire, it) for wire, it in zip(wires, forged, strict=True)))
        assert admission.num_verified <= 8
        assert sum("too many" in text or "closed" in text for text in said) >= 16
        assert relay.num_nodes == 0


async def test_a_newcomer_joins_by_a_pass_and_then_shows_its_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.network.relay.client._PING_S", 0.5)
    async with running_authority(tmp_path) as authority:
        admission = Admission(RUN_ID, [authority.key])
        relay = Relay(RelayConfig(host="127.0.0.1"), admission)
        await relay.start()
        identity = Identity.create()
        config = AdmissionConfig(authorities=(authority.key,), urls=(authority.url,), token=authority.invite())
        client = AdmissionClient(config, identity, RUN_ID, "worker", tmp_path / "own.json")
        reach = RelayedReach(RelayConfig(through=(f"127.0.0.1:{relay.port}",)), client.relay_pass)
        options = {**FAST, "host": "127.0.0.2", "tls": False}
        endpoint = Endpoint(identity, RUN_ID, RpcConfig(**options), client.admission, reach)  # type: ignore[arg-type]
        client.register(endpoint)
        try:
            await endpoint.start()
            assert endpoint.address.startswith("127.0.0.1:")
            pass_ends = relay._nodes[identity.peer_id].place.until
            assert pass_ends < time.time() + 600
            await client.join(endpoint.address)  # The authority dials back by way of the relay.
            assert authority.register.members()[0].is_reached
            await until(lambda: relay._nodes[identity.peer_id].place.until > pass_ends + 3600)
        finally:
            await endpoint.stop()
            await relay.stop()


async def test_only_who_may_join_gets_a_pass(tmp_path: Path) -> None:
    async with running_authority(tmp_path) as authority:
        config = AdmissionConfig(authorities=(authority.key,), urls=(authority.url,))
        client = AdmissionClient(config, Identity.create(), RUN_ID, "worker", tmp_path / "own.json")
        with pytest.raises(RefusedError, match="expected an invitation"):
            await client.relay_pass()
        invitation = authority.invite()
        config = AdmissionConfig(authorities=(authority.key,), urls=(authority.url,), token=invitation)
        client = AdmissionClient(config, Identity.create(), RUN_ID, "worker", tmp_path / "own.json")
        assert await client.relay_pass() == await client.relay_pass()  # It is good for minutes.
        assert authority.register.invitations()[0].uses_left == 1
        with pytest.raises(RefusedError):  # No node believes it.
            client.admission.screen(client._identity.peer_id, await client.relay_pass())


async def test_one_invitation_is_good_for_a_ration_of_passes(tmp_path: Path) -> None:
    async with running_authority(tmp_path, over_http=False) as authority:
        config = AdmissionConfig(authorities=(authority.key,), urls=("http://127.0.0.1:1",), token=authority.invite())
        reasons = []
        for _ in range(20):
            client = AdmissionClient(config, Identity.create(), RUN_ID, "worker", tmp_path / "own.json")
            try:
                await authority.service.relay_pass(client._join_request("", ""), "127.0.0.1")
            except RefusedError as error:
                reasons.append(error.reason)
        assert 3 <= len(reasons) <= 4
        assert set(reasons) == {"rate"}
        assert authority.register.invitations()[0].uses_left == 1


async def test_a_relay_shows_who_checks_it_that_it_and_a_lent_port_are_reached() -> None:
    async with _relay(first_port=21_300, max_nodes=2) as relay:
        await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, relay.new_ticket())
        with pytest.raises(PeerUnavailableError, match="found another") as caught:
            await probe_relay("127.0.0.1", relay.port, Identity.create().peer_id, relay.new_ticket())
        assert caught.value.cause == "another"
        taken = [await asyncio.start_server(lambda *_: None, "127.0.0.1", port) for port in (21_300, 21_301)]
        with pytest.raises(PeerUnavailableError):  # No port left to lend.
            await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, relay.new_ticket())
        for server in taken:
            server.close()
            await server.wait_closed()
        port = relay.port
    with pytest.raises(PeerUnavailableError) as caught:
        await probe_relay("127.0.0.1", port, AUTHORITY.peer_id, "0" * 32)
    assert caught.value.cause == "refused"


def test_the_longest_credential_fits_a_line() -> None:
    issued = Credential.issue(AUTHORITY, "å" * 128, AUTHORITY.peer_id, "worker", "body-1000", 1e9, 3600.0)
    assert len(pack_credential(issued.wire())) < 2732
