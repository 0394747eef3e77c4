"""Hostile newcomers, members and relays: places, proofs that are passed on, probes, and what a relay may say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.rpc_node import RUN_ID
from tests.support.waiting import until
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.network.relay import Relay, RelayConfig
from trainer.network.relay.client import OwnPlace, RelayLinks
from trainer.network.relay.gate import Gate
from trainer.network.relay.probing import probe_relay
from trainer.network.relay.protocol import COPY_BYTES, Register, end, pack_credential, proof_text
from trainer.network.rpc import Identity, RpcConfig
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import Credential, RelayPass, RevokedPeers
from trainer.network.rpc.dialing import Dialing

AUTHORITY = Identity.create()


@asynccontextmanager
async def _relay(admission: Admission | None = None, **options: object) -> AsyncIterator[Relay]:
    relay = Relay(RelayConfig(host="127.0.0.1", **options), admission, AUTHORITY)  # type: ignore[arg-type]
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


class _Newcomer:
    """Registers by hand, so that it may wait between its two lines."""

    def __init__(self, relay: Relay, credential: bytes = b"", identity: Identity | None = None) -> None:
        self.identity = identity or Identity.create()
        self._relay, self._credential = relay, credential
        self.nonce = ""

    async def begin(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._relay.port, limit=COPY_BYTES)
        asked = Register(peer_id=self.identity.peer_id, listen_port=4100)
        self.writer.write(asked.model_dump_json().encode() + b"\n")
        self.nonce = json.loads(await self.reader.readline())["nonce"]

    async def prove(self) -> dict[str, object]:
        name = f"127.0.0.1:{self._relay.port}"
        signature = self.identity.sign(proof_text(self.nonce, name, self.identity.peer_id)).hex()
        said = {"kind": "proof", "relay": name, "signature": signature, "credential": pack_credential(self._credential)}
        self.writer.write(json.dumps(said).encode() + b"\n")
        answer: dict[str, object] = json.loads(await self.reader.readline())
        return answer


async def test_those_who_prove_themselves_at_the_same_time_share_the_last_place() -> None:
    async with _relay(max_nodes=1) as relay:
        crowd = [_Newcomer(relay) for _ in range(5)]
        for each in crowd:
            await each.begin()  # All of them have been let in before any of them has a place.
        kinds = [str((await each.prove())["kind"]) for each in crowd]
        assert sorted(kinds) == ["lent", *["refusal"] * 4]
        assert relay.num_nodes == 1
        for each in crowd:
            await end(each.writer)


async def test_passes_of_one_invitation_leave_members_their_places() -> None:
    admission = Admission(RUN_ID, [AUTHORITY.peer_id])
    async with _relay(admission, max_nodes=4, max_nodes_per_host=4) as relay:
        crowd = []
        for is_member in (False, False, True):
            identity = Identity.create()
            shown: RelayPass | Credential = RelayPass.issue(AUTHORITY, RUN_ID, identity.peer_id, time.time(), 300.0)
            if is_member:
                shown = Credential.issue(AUTHORITY, RUN_ID, identity.peer_id, "worker", None, time.time(), 900.0)
            crowd.append(_Newcomer(relay, shown.wire(), identity))
        answers = []
        for each in crowd:
            await each.begin()
            answers.append(await each.prove())
        assert [it["kind"] for it in answers] == ["lent", "refusal", "lent"]
        assert "only have a pass" in str(answers[1]["text"])
        for each in crowd:
            await end(each.writer)


class _Writer:
    """The side of a relay's connection that its gate looks at."""

    def __init__(self, own_ip: str) -> None:
        self._own_ip = own_ip
        self.said: asyncio.Queue[bytes] = asyncio.Queue()

    def write(self, data: bytes) -> None:
        self.said.put_nowait(data)

    async def drain(self) -> None:
        pass

    def get_extra_info(self, _name: str, _default: object = None) -> tuple[str, int]:
        return self._own_ip, 4002


@pytest.mark.parametrize(
    ("own_ip", "dialled_ip", "is_taken"),
    [
        ("1.1.1.1", "1.1.1.1", True),
        ("1.1.1.1", "8.8.8.8", False),
        ("1.1.1.1", "", True),  # A node of an earlier release does not say.
        ("10.0.0.7", "8.8.8.8", True),  # Behind a router it is called by an address that it does not know.
    ],
)
async def test_a_proof_for_a_relay_of_the_same_port_elsewhere_is_worth_nothing(
    own_ip: str, dialled_ip: str, is_taken: bool
) -> None:
    identity, reader, writer = Identity.create(), asyncio.StreamReader(), _Writer(own_ip)
    gate = Gate(RelayConfig(), None)
    asked = Register(peer_id=identity.peer_id, listen_port=4100)
    passing = asyncio.create_task(
        gate.pass_through(asked, "9.9.9.9", 4002, tuple, (reader, writer))  # type: ignore[arg-type]
    )
    nonce = json.loads(await writer.said.get())["nonce"]
    # Whoever runs the relay that the node has dialled passes on what it said there: the name is not this relay's.
    signature = identity.sign(proof_text(nonce, "relay.hostile:4002", identity.peer_id, dialled_ip)).hex()
    said = {"kind": "proof", "relay": "relay.hostile:4002", "signature": signature, "dialled_ip": dialled_ip}
    reader.feed_data(json.dumps(said).encode() + b"\n")
    if is_taken:
        assert (await passing).host == "9.9.9.9"
        return
    with pytest.raises(RefusedError, match="expected a proof for") as caught:
        await passing
    assert caught.value.reason == "recipient"


async def test_the_address_that_was_dialled_is_signed() -> None:
    identity = Identity.create()
    async with _relay() as relay:
        node = _Newcomer(relay, identity=identity)
        await node.begin()
        name = f"127.0.0.1:{relay.port}"
        signature = identity.sign(proof_text(node.nonce, name, identity.peer_id, "8.8.8.8")).hex()
        node.writer.write(json.dumps({"kind": "proof", "relay": name, "signature": signature}).encode() + b"\n")
        assert json.loads(await node.reader.readline())["kind"] == "refusal"
        await end(node.writer)


async def test_strangers_cannot_hold_the_ports_that_a_relay_lends_by_probes() -> None:
    async with _relay(first_port=21_310, max_nodes=1) as relay:
        ticket = relay.new_ticket()
        for shown in ("0" * 32, "f" * 32):
            with pytest.raises(PeerUnavailableError):
                await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, shown)
        await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, ticket)
        with pytest.raises(PeerUnavailableError):  # It counts once.
            await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, ticket)
        newest = [relay.new_ticket() for _ in range(100)]
        assert len(relay._tickets) == 16
        await probe_relay("127.0.0.1", relay.port, AUTHORITY.peer_id, newest[-1])


async def test_revoked_nodes_that_hear_nothing_lose_their_ports_together(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    async def never_heard(_writer: object, error: RefusedError) -> None:
        begun.append(error)
        await asyncio.sleep(1.0)

    monkeypatch.setattr("trainer.network.relay.server._refuse", never_heard)
    admission = Admission(RUN_ID, [AUTHORITY.peer_id])
    async with _relay(admission) as relay:
        crowd = []
        for _ in range(4):
            identity = Identity.create()
            wire = Credential.issue(AUTHORITY, RUN_ID, identity.peer_id, "node", None, time.time(), 900.0).wire()
            crowd.append(_Newcomer(relay, wire, identity))
            await crowd[-1].begin()
            assert (await crowd[-1].prove())["kind"] == "lent"
        revoked = [each.identity.peer_id for each in crowd]
        admission.revoke(RevokedPeers.issue(AUTHORITY, RUN_ID, 1, revoked, time.time()))
        await until(lambda: begun)
        assert len(begun) == 4
        assert all(node.server is not None and not node.server.is_serving() for node in relay._nodes.values())
        await until(lambda: relay.num_nodes == 0)
        for each in crowd:
            await end(each.writer)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"kind":"pong"}\n', "lines a second at most"),
        (b'{"kind":"incoming","token":"' + b"0" * 32 + b'","host":"h"}\n', "lines a second at most"),
        (b'{"kind":"checked","is_direct":true}\n{"kind":"checked","is_direct":false}\n', "nobody has asked for"),
    ],
)
async def test_a_relay_that_says_more_than_its_part_is_left(line: bytes, expected: str) -> None:
    num_connections = 0

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with contextlib.suppress(OSError):
            if b"register" in await reader.readline():
                lent = {"kind": "lent", "port": 4100, "public_host": "", "seen_host": "127.0.0.1", "is_direct": False}
                writer.write(json.dumps(lent).encode() + b"\n" + line * 2000)
                await reader.read()
        await end(writer)

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        links = _links()
        links.add(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await until(lambda: expected in links.states()[0].failure)
        assert links.address == ""
        await links.stop()
        assert num_connections < 700


async def test_a_relay_cannot_use_up_the_files_that_a_node_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.network.relay.client.raise_open_files", lambda _needed: 48)
    kinds: list[str] = []

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kinds.append(json.loads(await reader.readline())["kind"])
        if kinds[-1] == "register":
            lent = {"kind": "lent", "port": 4100, "public_host": "", "seen_host": "127.0.0.1", "is_direct": False}
            writer.write(json.dumps(lent).encode() + b"\n")
            for number in range(100):
                said = {"kind": "incoming", "token": "0" * 32, "host": f"9.9.9.{number}"}
                writer.write(json.dumps(said).encode() + b"\n")
        await reader.read()
        await end(writer)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await end(writer)

    async with (
        await asyncio.start_server(flood, "127.0.0.1", 0) as server,
        await asyncio.start_server(hold, "127.0.0.1", 0) as own,
    ):
        links = _links(listens_at=("127.0.0.1", own.sockets[0].getsockname()[1]))
        links.add(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await until(lambda: kinds.count("accept") == 3)
        await asyncio.sleep(0.2)
        assert kinds.count("accept") == 3  # Of 100 callers that the relay tells of: 48 files are for three.
        await links.stop()


def _links(certificate_sha256: str = "", listens_at: tuple[str, int] = ("127.0.0.2", 4100)) -> RelayLinks:
    identity = Identity.create()
    place = OwnPlace(identity=identity, listens_at=listens_at, certificate_sha256=certificate_sha256)
    return RelayLinks(place)


async def test_a_link_outlasts_what_nobody_has_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    num_failed = 0

    async def fail(_self: object, _host: str, _port: int) -> None:
        nonlocal num_failed
        num_failed += 1
        raise ValueError("a line that nobody has thought of")

    monkeypatch.setattr("trainer.network.relay.client._Link._connect", fail)
    monkeypatch.setattr("trainer.network.relay.client._PAUSES_S", (0.01, 0.01))
    links = _links()
    links.add("127.0.0.1:4002")
    await until(lambda: num_failed > 2)
    assert links.states()[0].failure == "it cannot be used (ValueError)"
    await links.stop()


async def test_a_stranger_whose_lent_port_closes_later_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own, another = "a" * 64, "b" * 64
    answers = [own, own, another]

    async def certificate(_host: str, _port: int, _timeout_s: float) -> str:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr("trainer.network.relay.client.fetch_certificate", certificate)
    monkeypatch.setattr("trainer.network.relay.client.certificate_digest", lambda found: found)
    monkeypatch.setattr("trainer.network.relay.client._CHECK_S", 0.2)
    async with _relay() as relay:
        links = _links(own)
        links.add(f"127.0.0.1:{relay.port}", Dialing(RpcConfig(), "f" * 64))
        await until(lambda: links.address)
        await until(lambda: "does not reach itself (another answers there)" in links.states()[0].failure)
        assert answers == [another]
        await links.stop()
