"""Attacks by announcements, under as many keys as one likes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

from tests.support.announcements import announce
from tests.support.attacks import Target, send_record
from trainer.network.discovery.exchange import (
    EXCHANGE_METHOD,
    PRESENT_METHOD,
    PeerExchangeReply,
    PeerExchangeRequest,
    PresentReply,
    pack_request,
    split_records,
)
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint, Identity, Reply, Request, RpcConfig
from trainer.run.config import RunConfig, from_mapping, read_yaml

_NUM_IDENTITIES, _NUM_NEWCOMERS = 40, 2
_MAX_KNOCKS_PER_NODE = 3.0
"""In the first minute; fewer from then on."""
_FORBIDDEN = ("127.0.0.1:22", "10.11.12.13:4100", "169.254.169.254:4100", "0.0.0.0:4100")
_NUM_DEAD, _NUM_LISTENING = 1040, 24
_LIFETIME_S = 3600.0
_RECORDS_PER_ANSWER = 256


async def knocking(target: Target) -> None:
    """Names a port of somebody else in 40 announcements, so that all nodes of the run connect there.

    The victim is a service of this machine, which counts who comes; a few a minute may come from each node.
    """
    chance = random.Random(target.seed)
    run_id = from_mapping(RunConfig, read_yaml(Path(target.run_file))).run_id
    knocks = 0

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        await asyncio.sleep(1.0)
        writer.close()

    victim = await asyncio.start_server(accept, "127.0.0.77", 0)
    port = victim.sockets[0].getsockname()[1]
    rpc = RpcConfig(host=target.source_host, stop_grace_s=0.1)
    liars = [Endpoint(Identity.create(), run_id, rpc) for _ in range(_NUM_IDENTITIES)]
    until_s = time.monotonic() + target.seconds
    announced = 0
    while time.monotonic() < until_s:
        for number, liar in enumerate(liars):
            name = chance.choice(list(target.addresses))
            address = _FORBIDDEN[number // 4 % 4] if number % 4 == 0 else f"127.0.0.77:{port}"
            uid = f"body1.0.{100 + number}"
            wire = announce(
                liar.identity,
                lifetime_s=_LIFETIME_S,
                node_id=f"liar-{number}",
                run_id=run_id,
                address=address,
                stage=StageReport(uid=uid, incarnation="0" * 16, status="serving"),
            )
            announced += await send_record(liar, target.peer(name), wire)
    for liar in liars:
        await liar.stop()
    victim.close()
    print(json.dumps({"announced": announced, "knocks": knocks}))  # noqa: T201
    num_nodes = len(target.addresses) + _NUM_NEWCOMERS
    allowed = _MAX_KNOCKS_PER_NODE * num_nodes * max(1.0, target.seconds / 60.0)
    assert announced >= _NUM_IDENTITIES
    assert 0 < knocks <= allowed, f"expected at most {allowed:.0f} knocks by {num_nodes} nodes, found {knocks}"


async def sybils(target: Target) -> None:
    """A thousand identities that announce themselves to all nodes, for an hour each, as drivers and workers of the run.

    Most name a port where nobody listens. Some are real nodes, which answer whatever discovery asks and pass on all
    others. All announce the terms of the run, which they have read in announcements of its nodes.
    """
    chance = random.Random(target.seed)
    run_id = from_mapping(RunConfig, read_yaml(Path(target.run_file))).run_id
    dead = [Identity.create() for _ in range(_NUM_DEAD)]
    ports = chance.sample(range(20_000, 30_000), _NUM_DEAD)
    addresses = {it.peer_id: f"{target.source_host}:{port}" for it, port in zip(dead, ports, strict=True)}
    records: dict[str, bytes] = {}
    rpc = RpcConfig(host=target.source_host, stop_grace_s=0.1)
    listening = [await _listening(run_id, rpc, records, chance) for _ in range(_NUM_LISTENING)]
    speakers: list[Endpoint | Identity] = [*listening, *dead]
    terms = await _terms(target, listening[0])
    until_s = time.monotonic() + target.seconds
    counts = {"announced": 0, "refused": 0}

    async def send(endpoint: Endpoint, address: str, name: str) -> None:
        wire = _record(endpoint, run_id, address, terms)
        records[endpoint.peer_id] = wire
        is_answered = await send_record(endpoint, target.peer(name), wire)
        counts["announced" if is_answered else "refused"] += 1

    async def speak(own: list[Endpoint | Identity]) -> None:
        while True:
            for speaker in own:
                if time.monotonic() > until_s:
                    return
                name = chance.choice(list(target.addresses))
                if isinstance(speaker, Endpoint):
                    await send(speaker, speaker.address, name)
                else:
                    endpoint = Endpoint(speaker, run_id, rpc)
                    await send(endpoint, addresses[speaker.peer_id], name)
                    await endpoint.stop()

    try:
        await asyncio.gather(*(speak(speakers[start::16]) for start in range(16)))
    finally:
        await asyncio.gather(*(endpoint.stop() for endpoint in listening))
    print(json.dumps(counts))  # noqa: T201


async def _listening(run_id: str, rpc: RpcConfig, records: dict[str, bytes], chance: random.Random) -> Endpoint:
    endpoint = Endpoint(Identity.create(), run_id, rpc)

    async def exchange(_: Request[PeerExchangeRequest]) -> Reply[PeerExchangeReply]:
        told = chance.sample(list(records.values()), min(_RECORDS_PER_ANSWER, len(records)))
        return Reply(PeerExchangeReply(sizes=tuple(map(len, told))), b"".join(told))

    async def present(_: Request[PeerExchangeRequest]) -> Reply[PresentReply]:
        return Reply(PresentReply())

    endpoint.register(EXCHANGE_METHOD, PeerExchangeRequest, exchange, any_recipient=True)
    endpoint.register(PRESENT_METHOD, PeerExchangeRequest, present, any_recipient=True)
    await endpoint.start()
    return endpoint


async def _terms(target: Target, endpoint: Endpoint) -> dict[bool, str]:
    """Digests of the terms that a worker of the body announces (True) and a driver (False)."""
    found: dict[bool, str] = {}
    for name in target.addresses:
        body, payload = pack_request(b"", [])
        reply = await endpoint.call(
            target.peer(name), EXCHANGE_METHOD, body, PeerExchangeReply, payload=payload, timeout_s=5.0
        )
        for record in split_records(reply.body, bytes(reply.payload)):
            said = json.loads(record)["announcement"]
            uid = said["stage"]["uid"] if "stage" in said else ""
            if uid.startswith("body1.") or not uid:
                found[bool(uid)] = said["terms_digest"]
    return found


def _record(endpoint: Endpoint, run_id: str, address: str, terms: dict[bool, str]) -> bytes:
    number = int(endpoint.peer_id[:6], 16)
    stage = StageReport(uid=f"body1.0.{32 + number % 9000}", incarnation="0" * 16, status="serving")
    return announce(
        endpoint.identity,
        lifetime_s=_LIFETIME_S,
        node_id=f"sybil-{number}",
        run_id=run_id,
        address=address,
        certificate_pem=(endpoint.certificate or b"").decode(),
        terms_digest=terms[bool(number % 2)],
        stage=stage if number % 2 else None,
    )
