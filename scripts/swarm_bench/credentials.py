"""What credentials cost: processor time of a message and of a connection, with and without; bytes of a node at rest.

Both ends run in this process, so a figure is that of caller and callee together. Turns with and without alternate, and
the median of their ratios counts. Connections are new ones over TLS. A node at rest asks the authority every 20 s and
two peers every 15 s, and answers as many; bytes of HTTP are counted by a relay in between, TCP's own left out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from genesis.serve.server import listen
from trainer.network.rpc import Admission, Credential, Endpoint, Identity, Message, Reply, Request, RpcConfig
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.run.authority.app import serve
from trainer.run.authority.messages import CHECK_PATH, CheckInReply, invitation_key, new_invitation
from trainer.run.authority.register import Register
from trainer.run.authority.service import AuthorityConfig, AuthorityService
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.admission import AdmissionClient
from trainer.run.node.revocation_news import INTERVAL_S, NUM_ASKED

_RUN = "bench"
_LOCAL = "127.0.0.1"
_CPU_LIMIT, _BYTES_LIMIT_PER_S = 0.01, 1000.0
_MESSAGES_PER_S = 50.0  # Of a busy node: micro-batches, rounds and exchanges.
_CONNECTIONS_PER_H = 256.0  # All that an endpoint keeps, opened anew.


class _Text(Message):
    text: str = ""


@asynccontextmanager
async def _endpoint(authority: Identity | None) -> AsyncIterator[Endpoint]:
    identity, admission = Identity.create(), None
    if authority is not None:
        admission = Admission(_RUN, [authority.peer_id])
        admission.take_own(Credential.issue(authority, _RUN, identity.peer_id, "node", None, time.time(), 14_400.0))

    async def echo(request: Request[_Text]) -> Reply[_Text]:
        return Reply(request.body)

    endpoint = Endpoint(identity, _RUN, RpcConfig(host=_LOCAL), admission)
    endpoint.register("bench/echo", _Text, echo)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


async def _calls(authority: Identity | None, count: int) -> float:
    """Seconds of processor time of a call on a connection that is open."""
    async with _endpoint(authority) as caller, _endpoint(authority) as callee:
        await caller.call(callee.peer, "bench/echo", _Text(), _Text, timeout_s=10)
        began_s = time.process_time()
        for _ in range(count):
            await caller.call(callee.peer, "bench/echo", _Text(), _Text, timeout_s=10)
        return (time.process_time() - began_s) / count


async def _connections(authority: Identity | None, count: int) -> float:
    """Seconds of processor time of a first call, to a node that knows nothing of the caller."""
    async with _endpoint(authority) as callee, AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(_endpoint(authority)) for _ in range(count)]
        began_s = time.process_time()
        for caller in callers:
            await caller.call(callee.peer, "bench/echo", _Text(), _Text, timeout_s=10)
        return (time.process_time() - began_s) / count


class _Relay:
    """Passes connections on to a port, and counts their bytes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(_LOCAL, self._port)
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while chunk := await source.read(1 << 16):
            self.num_bytes += len(chunk)
            target.write(chunk)
            await target.drain()
        target.close()


async def _at_rest() -> dict[str, float]:
    """Bytes and processor time of a question to the authority, and of one to a peer, nothing being new."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        register = Register(folder / "authority.sqlite")
        stack.callback(register.close)
        register.bind(_RUN)
        identity = Identity.create()
        service = AuthorityService(_RUN, identity, register, AuthorityConfig(requests_at_once=1e6))
        listener = listen(_LOCAL, 0)
        stack.callback(listener.close)
        ended = False
        serving = asyncio.create_task(serve(service, listener, lambda: ended))
        relay = _Relay(listener.getsockname()[1])
        server = await stack.enter_async_context(await asyncio.start_server(relay.serve, _LOCAL, 0))
        url = f"http://{_LOCAL}:{server.sockets[0].getsockname()[1]}"
        nodes: list[tuple[Endpoint, AdmissionClient]] = []
        for number in range(2):
            invitation, own = new_invitation(), Identity.create()
            register.invite(invitation_key(invitation).peer_id, "node", 1, time.time(), 3600.0)
            config = AdmissionConfig(authorities=(identity.peer_id,), urls=(url,), token=invitation)
            client = AdmissionClient(config, own, _RUN, "node", folder / f"{number}.json")
            endpoint = Endpoint(own, _RUN, RpcConfig(host=_LOCAL), client.admission)
            client.register(endpoint)
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
            await client.join(endpoint.address)
            nodes.append((endpoint, client))
        (endpoint, client), (other, other_client) = nodes
        other_client._news._answers = TokenBuckets(1e6, 1e6)
        await client._news.exchange(endpoint, other.peer)
        count = 50
        before, began_s = _bytes_of(endpoint), time.process_time()
        for _ in range(count):
            await client._news.exchange(endpoint, other.peer)
        peer_cpu_s = (time.process_time() - began_s) / count
        peer_bytes = (_bytes_of(endpoint) - before) / count
        before, began_s = relay.num_bytes, time.process_time()
        for _ in range(count):
            await client._authorities.ask_any(CHECK_PATH, client._check_request, CheckInReply, 10.0)
        check_cpu_s = (time.process_time() - began_s) / count
        check_bytes = (relay.num_bytes - before) / count
        ended = True
        await serving
    asked_per_s = 2 * NUM_ASKED / INTERVAL_S  # It asks as many as ask it.
    checks_per_s = 1.0 / AdmissionConfig().check_interval_s
    return {
        "peer_bytes": peer_bytes,
        "check_bytes": check_bytes,
        "bytes_per_s": asked_per_s * peer_bytes + checks_per_s * check_bytes,
        # Of both ends, though each is only one of them.
        "cpu_share": asked_per_s * peer_cpu_s + checks_per_s * check_cpu_s,
    }


def _bytes_of(endpoint: Endpoint) -> int:
    return endpoint.counters.sent_bytes + endpoint.counters.received_bytes


def bench_credentials(arguments: argparse.Namespace) -> dict[str, Any]:
    """Processor time of messages and connections with credentials over without; bytes of a node at rest."""
    authority = Identity.create()
    rows: dict[str, dict[str, float]] = {}
    for name, measure, count in (
        ("message", _calls, arguments.credentials_calls),
        ("connection", _connections, arguments.credentials_connections),
    ):
        turns = [
            (asyncio.run(measure(None, count)), asyncio.run(measure(authority, count)))
            for _ in range(arguments.credentials_turns)
        ]
        without_s, with_s = (statistics.median(each) for each in zip(*turns, strict=True))
        ratio = statistics.median(with_ / without for without, with_ in turns)
        rows[name] = {"without_s": without_s, "with_s": with_s, "ratio": ratio}
    rest = asyncio.run(_at_rest())
    added_s = {name: max(0.0, row["with_s"] - row["without_s"]) for name, row in rows.items()}
    share = rest["cpu_share"] + _MESSAGES_PER_S * added_s["message"]
    share += _CONNECTIONS_PER_H / 3600.0 * added_s["connection"]
    report: dict[str, Any] = {**rows, "rest": rest, "cpu_share": share}
    print(_as_text(report))
    return report


def _as_text(report: dict[str, Any]) -> str:
    lines = ["credentials, processor time of both ends together, medians"]
    for name in ("message", "connection"):
        row = report[name]
        without_ms, with_ms = row["without_s"] * 1e3, row["with_s"] * 1e3
        lines.append(f"  {name:11} {without_ms:7.3f} ms without, {with_ms:7.3f} ms with: {row['ratio']:.3f}")
    rest = report["rest"]
    lines.append(
        f"  a node at rest: {rest['bytes_per_s']:.0f} bytes/s ({rest['bytes_per_s'] / _BYTES_LIMIT_PER_S:.2f} of "
        f"{_BYTES_LIMIT_PER_S:.0f}): {rest['peer_bytes']:.0f} a question to a peer, {rest['check_bytes']:.0f} to the "
        "authority"
    )
    lines.append(
        f"  a busy node ({_MESSAGES_PER_S:.0f} messages a second, {_CONNECTIONS_PER_H:.0f} connections an hour): "
        f"{report['cpu_share']:.2%} of a core ({report['cpu_share'] / _CPU_LIMIT:.2f} of {_CPU_LIMIT:.0%})"
    )
    return "\n".join(lines)
