"""Keys on disk, signatures, and the certificates they vouch for: who is in the middle, and who has restarted."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from tests.support.rpc_pair import ask, endpoint_pair, refused, running_endpoint
from trainer.errors import PeerUnavailableError, TrainerUsageError
from trainer.network.rpc import Identity, Peer, load_or_create_identity, verify_signature
from trainer.network.rpc.channels import METHOD_PATH, fetch_certificate, generic_handler
from trainer.network.rpc.identity import CERTIFICATE_NAME, certificate_digest, make_certificate

_MAKE = """
import sys
from trainer.network.rpc import load_or_create_identity
sys.stdout.write(load_or_create_identity(sys.argv[1]).peer_id)
"""


def test_an_identity_is_made_once_and_kept_to_its_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys" / "node.pem"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["node.pem"]
    assert not caplog.records
    path.chmod(0o644)
    load_or_create_identity(path)
    assert "chmod 600" in caplog.text


@pytest.mark.slow
def test_processes_that_start_together_share_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    makers = [
        subprocess.Popen([sys.executable, "-c", _MAKE, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ids = {maker.communicate(timeout=30)[0] for maker in makers}
    assert ids == {load_or_create_identity(path).peer_id}


@pytest.mark.parametrize("content", [b"", b"not a key", b"\x00" * 32])
def test_a_file_that_is_no_key_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "node.pem"
    path.write_bytes(content)
    with pytest.raises(TrainerUsageError, match=r"node\.pem.*move it away"):
        load_or_create_identity(path)
    assert path.read_bytes() == content
    with pytest.raises(TrainerUsageError, match="cannot be used"):
        load_or_create_identity(path / "node.pem")


def test_signatures_are_of_one_key_under_one_name_over_one_message() -> None:
    signer, other = Identity.create(), Identity.create()
    name, signature = signer.peer_id, signer.sign(b"message")
    assert verify_signature(name, b"message", signature)
    assert not verify_signature(name, b"massage", signature)
    assert not verify_signature(name, b"message", signature[:-1])
    for wrong in {other.peer_id, name.upper(), f" {name}", name[:32] + " " + name[32:], "", "zz"} - {name}:
        assert not verify_signature(wrong, b"message", signature)
    assert "Ed25519PrivateKey" not in repr(signer) and name in repr(signer)


@asynccontextmanager
async def _man_in_the_middle(victim: Peer) -> AsyncIterator[str]:
    """Ends TLS with a certificate of its own and passes every byte on; gives its address."""
    assert victim.certificate is not None
    credentials = grpc.ssl_channel_credentials(victim.certificate)
    override = [("grpc.ssl_target_name_override", CERTIFICATE_NAME)]
    async with aio.secure_channel(victim.address, credentials, options=override) as channel:

        async def relay(requests: AsyncIterator[bytes], context: aio.ServicerContext) -> AsyncIterator[bytes]:
            try:
                async for raw in channel.stream_stream(METHOD_PATH)(requests):
                    yield raw
            except aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

        server = aio.server()
        server.add_generic_rpc_handlers((generic_handler(relay),))
        certificate_pem, key_pem = make_certificate()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key_pem, certificate_pem)]))
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


@pytest.mark.slow
async def test_nothing_passes_through_a_man_in_the_middle() -> None:
    async with endpoint_pair(tls=True) as (caller, callee):
        async with _man_in_the_middle(callee.peer) as address:
            for _ in range(2):
                # Nothing is known of the certificate: what the relay shows is taken, and named in the signed request.
                with refused("certificate"):
                    await ask(caller, Peer(callee.peer_id, address))
            with refused("certificate"):
                await ask(caller, Peer(None, address))
            # The certificate is known from an announcement: there is not even a connection.
            with pytest.raises(PeerUnavailableError):
                await ask(caller, Peer(callee.peer_id, address, callee.certificate))
        assert callee.counters.refused == {"certificate": 3}
        assert (await ask(caller, Peer(callee.peer_id, callee.address))).sender == callee.peer_id


async def test_a_certificate_is_fetched_once_and_pinned_when_a_signed_answer_named_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched = 0

    async def counting(host: str, port: int, timeout_s: float) -> bytes:
        nonlocal fetched
        fetched += 1
        return await fetch_certificate(host, port, timeout_s)

    monkeypatch.setattr("trainer.network.rpc.channels.fetch_certificate", counting)
    async with endpoint_pair(tls=True) as (caller, callee):
        unknown = Peer(callee.peer_id, callee.address)
        with refused("recipient"):
            await ask(caller, Peer(Identity.create().peer_id, callee.address))
        for _ in range(3):
            await ask(caller, unknown)
        assert fetched == 2
        await ask(caller, callee.peer)
        assert fetched == 2


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('192.0.2.9', 1)"), "cannot be reached: no route to host"),
        (
            OSError("Multiple exceptions: [Errno 113] Connect call failed ('::1', 1), [Errno 111] Connect call failed"),
            "cannot be reached: connection refused, no route to host",
        ),
        (
            OSError("Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed"),
            "refuses connections: nothing listens there (any more)",
        ),
        (socket.gaierror(socket.EAI_AGAIN, "Failure"), "cannot be reached: its name cannot be looked up now"),
    ],
)
def test_what_the_network_says_is_said_in_words(failure: OSError, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no machine that runs tests can be counted on to answer."""

    async def failing(_host: str, _port: int) -> None:
        raise failure

    monkeypatch.setattr("trainer.network.rpc.channels.asyncio.open_connection", failing)
    with pytest.raises(PeerUnavailableError, match=f"^{re.escape(f'gpu-7:4100 {said}')}$"):
        asyncio.run(fetch_certificate("gpu-7", 4100, 5.0))


@pytest.mark.slow
async def test_where_no_certificate_is_to_be_had_it_is_said_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = silent.getsockname()
        with pytest.raises(PeerUnavailableError, match=r"shows no TLS certificate \(no answer in 1 s\)"):
            await fetch_certificate(*where, 1.0)
    for host, said in ((where[0], "refuses connections"), ("x" * 70, "cannot be reached: no such host")):
        with pytest.raises(PeerUnavailableError, match=f"^{host}:{where[1]} {said}"):
            await fetch_certificate(host, where[1], 20.0)


async def test_each_start_makes_another_certificate_and_none_and_others_do_not_mix() -> None:
    async with endpoint_pair(tls=True) as (one, other), running_endpoint(tls=False) as plain:
        assert one.certificate != other.certificate and plain.certificate is None
        host, _, port = one.address.rpartition(":")
        shown = await fetch_certificate(host, int(port), 5.0)
        assert certificate_digest(shown) == certificate_digest(one.certificate or b"")
        header, footer = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"
        for certificate in (b"", b"\xff\xfe", header, header + b"QUJD\n" + footer, header + b"?\n" + footer):
            with pytest.raises(PeerUnavailableError):
                await ask(one, Peer(other.peer_id, other.address, certificate))
        for caller, callee in ((one, plain), (plain, one)):
            with pytest.raises(PeerUnavailableError):
                await ask(caller, Peer(callee.peer_id, callee.address))
        assert (await ask(one, other.peer)).sender == other.peer_id


async def test_a_request_to_a_nodes_former_life_is_refused_by_its_next() -> None:
    """The replay guard forgets with the process; the certificate, which requests name, is a new one each time."""
    identity = Identity.create()
    async with running_endpoint(tls=True) as caller, running_endpoint(identity, tls=True) as second:
        former, _ = make_certificate()
        channel = await caller._channels.get(second.peer)
        channel.certificate_sha256 = certificate_digest(former)
        with refused("certificate"):
            await ask(caller, second.peer)


@pytest.mark.slow
async def test_many_peers_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are bounded: the longest unused goes first, and one in use never."""
    monkeypatch.setattr("trainer.network.rpc.channels.MAX_CHANNELS", 3)
    async with running_endpoint() as caller, running_endpoint() as first:
        waiting = asyncio.create_task(ask(caller, first.peer, sleep_s=1.0))
        await asyncio.sleep(0.1)
        for _ in range(6):
            async with running_endpoint() as other:
                await ask(caller, other.peer)
        assert len(caller._channels) == 3
        assert (await waiting).sender == first.peer_id
