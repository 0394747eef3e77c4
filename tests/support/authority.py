"""An authority in the test's own event loop, served over real HTTP, and nodes that are admitted by it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genesis.serve.server import listen
from tests.support.rpc_node import RUN_ID, fast_config, register_test_methods
from trainer.network.discovery.record_kinds import check_stored
from trainer.network.reachability import PROBE_METHOD, Probe, ProbeReply
from trainer.network.rpc import Endpoint, Identity, Reply, Request
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.credential import Credential, Role
from trainer.run.authority.app import serve
from trainer.run.authority.messages import (
    JoinRequest,
    invitation_key,
    new_invitation,
    sign_join,
)
from trainer.run.authority.register import Register
from trainer.run.authority.service import AuthorityConfig, AuthorityService
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.admission import AdmissionClient

LOCAL = "127.0.0.1"


@dataclass
class Authority:
    """One process of an authority."""

    service: AuthorityService
    register: Register
    url: str = ""
    _ended: bool = False
    _serving: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.service.identity.peer_id

    def invite(self, role: Role = "worker", uses: int = 1, life_s: float = 3600.0) -> str:
        invitation = new_invitation()
        now = self.service.clock()
        self.register.invite(invitation_key(invitation).peer_id, role, uses, now, life_s)
        return invitation

    async def serve(self, port: int = 0) -> None:
        listener = listen(LOCAL, port)
        self.url = f"http://{LOCAL}:{listener.getsockname()[1]}"
        self._ended = False
        self._serving = asyncio.create_task(serve(self.service, listener, lambda: self._ended))
        self._serving.add_done_callback(lambda _: listener.close())

    async def kill(self) -> None:
        """Ends it; the file stays."""
        self._ended = True
        if self._serving is not None:
            await self._serving
        else:
            await self.service.close()


@asynccontextmanager
async def running_authority(
    path: Path,
    *,
    identity: Identity | None = None,
    clock: Callable[[], float] = time.time,
    over_http: bool = True,
    **options: Any,
) -> AsyncIterator[Authority]:
    register = Register(path / "authority.sqlite")
    register.bind(RUN_ID)
    config = AuthorityConfig(tls=False, **options)
    service = AuthorityService(RUN_ID, identity or Identity.create(), register, config, clock)
    authority = Authority(service, register)
    if over_http:
        await authority.serve()
    try:
        yield authority
    finally:
        await authority.kill()
        register.close()


@dataclass
class Node:
    """A node with an endpoint, admitted or not."""

    identity: Identity
    endpoint: Endpoint
    client: AdmissionClient
    peers: list[Node] = field(default_factory=list)
    records: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """What a DHT keeps, by key and subkey; nodes that have the same one know one DHT."""

    @property
    def admission(self) -> Admission:
        return self.client.admission

    def start(self) -> None:
        """Begins to renew and to spread news among `peers`."""
        self.client.start(lambda: self.endpoint.address, _Found(self), self.endpoint)  # type: ignore[arg-type]


@dataclass
class _Found:
    """Stands where a node's discovery does; what its DHT keeps is checked as a real one does."""

    node: Node

    async def peers(self) -> list[Any]:
        return [_Known(each.endpoint) for each in self.node.peers]

    async def store_record(self, key: str, subkey: str, wire: bytes, expires_at: float) -> None:
        assert check_stored(wire, subkey, expires_at, now=time.time(), max_clock_skew_s=120.0) == key
        self.node.records.setdefault(key, {})[subkey] = wire

    async def stored_records(self, key: str) -> list[tuple[str, bytes]]:
        return list(self.node.records.get(key, {}).items())


@dataclass
class _Known:
    """Stands where an announcement of a reached peer does."""

    endpoint: Endpoint

    def peer(self) -> Any:
        return self.endpoint.peer


@asynccontextmanager
async def admitted_node(
    folder: Path,
    authority: Authority | None,
    *,
    role: Role = "worker",
    stage: str = "",
    invitation: str = "",
    identity: Identity | None = None,
    keys: tuple[str, ...] = (),
    clock: Callable[[], float] = time.time,
    joins: bool = True,
    **options: Any,
) -> AsyncIterator[Node]:
    own = identity or Identity.create()
    urls = (authority.url,) if authority is not None else ()
    token = invitation or (authority.invite(role) if authority is not None and joins else "")
    config = AdmissionConfig(
        authorities=keys or ((authority.key,) if authority is not None else ()), urls=urls, token=token, **options
    )
    client = AdmissionClient(config, own, RUN_ID, role, folder / f"{own.peer_id[:8]}.json", stage=stage, clock=clock)
    endpoint = Endpoint(own, RUN_ID, fast_config(), client.admission)
    register_test_methods(endpoint)
    client.register(endpoint)
    await endpoint.start()
    try:
        if joins:
            await client.join(endpoint.address)
        yield Node(own, endpoint, client)
    finally:
        await client.stop()
        await endpoint.stop()


@asynccontextmanager
async def endpoint_with(
    authority: Identity, *, role: Role = "worker", clock: Callable[[], float] = time.time, life_s: float = 3600.0
) -> AsyncIterator[Endpoint]:
    """An endpoint with a credential that nobody had to ask for."""
    identity = Identity.create()
    admission = Admission(RUN_ID, [authority.peer_id], clock)
    admission.take_own(Credential.issue(authority, RUN_ID, identity.peer_id, role, None, clock(), life_s))
    endpoint = Endpoint(identity, RUN_ID, fast_config(), admission)
    register_test_methods(endpoint)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


@asynccontextmanager
async def answering_endpoint(identity: Identity) -> AsyncIterator[Endpoint]:
    """An endpoint that answers whoever dials back."""

    async def answer(request: Request[Probe]) -> Reply[ProbeReply]:
        return Reply(ProbeReply(challenge=request.body.challenge))

    endpoint = Endpoint(identity, RUN_ID, fast_config())
    endpoint.register(PROBE_METHOD, Probe, answer)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


def join_wire(
    identity: Identity,
    address: str,
    invitation: str = "",
    *,
    now: float | None = None,
    signer: Identity | None = None,
    token_signer: Identity | None = None,
    **changes: Any,
) -> bytes:
    """A join request; ``signer`` and ``token_signer`` sign in place of those that should."""
    token = invitation_key(invitation) if invitation else None
    content: dict[str, Any] = {
        "run_name": RUN_ID,
        "peer_id": identity.peer_id,
        "role": "worker",
        "address": address,
        "token_key": "" if token is None else token.peer_id,
        "nonce": secrets.token_hex(16),
        "sent_at": time.time() if now is None else now,
    }
    return sign_join(JoinRequest(**(content | changes)), signer or identity, token_signer or token)


async def eventually(holds: Callable[[], object] | Callable[[], Awaitable[object]], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            found = holds()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.05)
