"""Connections to peers: one gRPC channel for each (address, certificate), kept while it works.

A channel that fails is dropped together with gRPC's backoff, so that the next call tries anew at once: callers decide
how often a dead peer is tried, and `Dialing` where addresses come from strangers. Before a channel is opened, one
connection fetches the certificate that is shown there, so an address of another service gets no more than that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from grpc import aio

from trainer.errors import PeerUnavailableError
from trainer.network.rpc.admission import CREDENTIAL_KEY
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.dialing import Dialing, Socket
from trainer.network.rpc.envelope import MAX_FRAME_BYTES
from trainer.network.rpc.identity import CERTIFICATE_NAME, certificate_digest
from trainer.network.rpc.messages import Peer, PeerId
from trainer.network.rpc.token_buckets import remember

METHOD_PATH = "/genesis.trainer.Rpc/Exchange"
"""The one gRPC method; the signed header names the method of this protocol."""

MAX_CHANNELS = 256

WINDOW_BYTES = 8 << 20
"""How much of a stream gRPC takes in before its reader asks for it (640 Mbit/s at 0.1 s there and back). Fixed, since
gRPC's own guess has no bound: on a busy machine it let 79 MiB pile up before a reader that had stopped."""

_CAUSES = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timeout",
    errno.ENETUNREACH: "no_route",
    errno.EHOSTUNREACH: "no_route",
}
_ERRNO = re.compile(r"\[Errno ([0-9]+)\]")

ClientCall: TypeAlias = "aio.StreamStreamCall[bytes, bytes]"


def channel_options(config: RpcConfig) -> list[tuple[str, int | str]]:
    """Returns gRPC's settings for both sides.

    Nothing larger than a frame is read, no more than a window ahead of the reader; pings find dead connections.
    """
    silence_ms = int(config.stall_timeout_s * 1000)
    return [
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_metadata_size", 8192),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.keepalive_time_ms", silence_ms),
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        # No message is decompressed: 1 MiB of gzip could be 1 GiB.
        ("grpc.per_message_decompression", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def generic_handler(serve: Callable[..., object]) -> grpc.GenericRpcHandler:
    """Returns what has a gRPC server answer `METHOD_PATH` by ``serve``."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(serve)
    service, _, name = METHOD_PATH.lstrip("/").partition("/")
    return grpc.method_handlers_generic_handler(service, {name: handler})


@dataclass(slots=True, eq=False)
class PeerChannel:
    """A channel to one peer, and the certificate it is bound to."""

    address: str
    certificate_sha256: str
    where: Socket
    certificate_pem: bytes | None
    channel: aio.Channel
    calls: set[ClientCall] = field(default_factory=set)
    peer_id: PeerId = ""  # Who has answered on it; empty: nobody yet.
    shown: bytes = b""
    """This node's credential as that peer has taken it (`trainer.network.rpc.admission`)."""

    def begin(self, timeout_s: float, credential: bytes = b"") -> ClientCall:
        """Starts a call, beside which this node's credential is shown unless it is empty; nothing is sent yet."""
        method: aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(METHOD_PATH)
        metadata = ((CREDENTIAL_KEY, credential),) if credential else None
        call: ClientCall = method(timeout=timeout_s, metadata=metadata)
        self.calls.add(call)
        return call


class ChannelPool:
    """The channels of one endpoint, to where ``dialing`` admits."""

    def __init__(self, config: RpcConfig, dialing: Dialing) -> None:
        self._config = config
        self._dialing = dialing
        self._channels: OrderedDict[tuple[str, str], PeerChannel] = OrderedDict()
        self._retired: set[PeerChannel] = set()  # Taken out of use; each is closed when its last call ends.
        self._pins: OrderedDict[tuple[PeerId | None, str], bytes] = OrderedDict()
        self._shown: OrderedDict[str, tuple[Socket, bytes | None]] = OrderedDict()
        """By address: where it was connected to last, and the certificate that was shown there."""
        self._looking: dict[tuple[str, PeerId | None], asyncio.Task[tuple[Socket, bytes | None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._channels)

    async def get(self, peer: Peer) -> PeerChannel:
        """Returns the channel to ``peer``; where its certificate is unknown, any certificate shown there is taken.

        Raises PeerUnavailableError where it is not to be dialled, cannot be reached, or shows another certificate.
        """
        expected = None
        if self._config.tls:
            expected = self._pins.get((peer.peer_id, peer.address)) if peer.certificate is None else peer.certificate
        if expected is not None or not self._config.tls:
            key = (peer.address, _digest_or_unavailable(peer, expected))
            if key in self._channels and not self._closed:
                self._channels.move_to_end(key)
                return self._channels[key]
        where, certificate = await self._find(peer, expected)
        key = (peer.address, _digest_or_unavailable(peer, certificate))
        for other in list(self._channels.values()) if key not in self._channels else ():
            # A node that shows another certificate has restarted: its old channel would try to connect for ever.
            if other.address == peer.address or (len(self._channels) >= MAX_CHANNELS and not other.calls):
                await self._retire(other)
        if self._closed:
            raise PeerUnavailableError(f"{peer.address}: expected a running endpoint, found it stopped on this side")
        if key not in self._channels:
            self._channels[key] = PeerChannel(*key, where, certificate, self._open_channel(where, certificate))
        self._channels.move_to_end(key)
        return self._channels[key]

    def confirm(self, peer: Peer, channel: PeerChannel, sender: PeerId) -> None:
        """Pins the certificate, because a frame signed by ``sender`` has named it."""
        self._dialing.answered(channel.where)
        channel.peer_id = sender
        if channel.certificate_pem is not None:
            for key in ((sender, peer.address), (peer.peer_id, peer.address)):
                remember(self._pins, key, channel.certificate_pem, 2 * MAX_CHANNELS)

    async def drop_if_dead(self, peer: Peer, channel: PeerChannel) -> None:
        """Drops a channel that cannot connect, and what was pinned for it: the peer may have restarted."""
        if self._closed or channel.channel.get_state() is grpc.ChannelConnectivity.READY:
            return
        self._dialing.failed(channel.where)
        self._pins.pop((peer.peer_id, peer.address), None)
        self._shown.pop(peer.address, None)
        await self._retire(channel)

    async def part_with(self, is_out: Callable[[PeerId], bool]) -> None:
        """Ends all calls to peers that are out, and the channels to them."""
        for channel in [each for each in (*self._channels.values(), *self._retired) if is_out(each.peer_id)]:
            for call in list(channel.calls):
                call.cancel()
            await self._retire(channel)

    async def finish(self, channel: PeerChannel, call: ClientCall) -> None:
        """Ends a call, whatever state it is in."""
        channel.calls.discard(call)
        call.cancel()
        if channel in self._retired:
            await self._retire(channel)

    async def close(self) -> None:
        """Ends all calls and connections."""
        self._closed = True
        for task in self._looking.values():
            task.cancel()
        for channel in (*self._channels.values(), *self._retired):
            await channel.channel.close()
        self._channels.clear()
        self._retired.clear()

    async def _retire(self, channel: PeerChannel) -> None:
        """Takes a channel out of use; the last call on it closes it."""
        key = (channel.address, channel.certificate_sha256)
        if self._channels.get(key) is channel:
            del self._channels[key]
            self._retired.add(channel)
        if channel in self._retired and not channel.calls:
            self._retired.discard(channel)
            await channel.channel.close()

    async def _find(self, peer: Peer, expected: bytes | None) -> tuple[Socket, bytes | None]:
        """Returns where the peer is, and its certificate, which must be the expected one."""
        shown = self._shown.get(peer.address)
        if shown is not None and expected is not None and shown[1] == expected:
            # The expected peer has shown itself there before, under whatever claim: no further dial is needed.
            return shown
        key = (peer.address, peer.peer_id if peer.peer_id == self._dialing.peer_id else None)
        looking = self._looking.get(key)
        if looking is None:
            looking = self._looking[key] = asyncio.create_task(self._look(peer))
            looking.add_done_callback(lambda task: self._looked(key, task))
        try:
            where, certificate = await asyncio.shield(looking)
        except asyncio.CancelledError:
            if self._closed and looking.cancelled():
                raise PeerUnavailableError(f"{peer.address}: this endpoint stops") from None
            raise
        if expected is not None and certificate != expected:
            self._pins.pop((peer.peer_id, peer.address), None)
            raise PeerUnavailableError(
                f"{peer.address} shows another TLS certificate: the node restarted, or it is another one"
            )
        return where, certificate

    def _looked(self, key: tuple[str, PeerId | None], task: asyncio.Task[tuple[Socket, bytes | None]]) -> None:
        self._looking.pop(key, None)
        if not task.cancelled() and task.exception() is None:
            remember(self._shown, key[0], task.result(), 2 * MAX_CHANNELS)

    async def _look(self, peer: Peer) -> tuple[Socket, bytes | None]:
        """Connects once to each address there may be, until one answers."""
        places = await self._dialing.admit(peer)
        if not self._config.tls:
            return places[0], None
        for host, port in places:
            try:
                return (host, port), await fetch_certificate(host, port, self._config.connect_timeout_s)
            except PeerUnavailableError as error:
                failure = error
        self._dialing.failed(places[-1])
        raise failure

    def _open_channel(self, where: Socket, certificate_pem: bytes | None) -> aio.Channel:
        host, port = where
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = channel_options(self._config)
        options += [
            # The least backoff is also the time a connection attempt is given.
            ("grpc.min_reconnect_backoff_ms", int(self._config.connect_timeout_s * 1000)),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if certificate_pem is None:
            return aio.insecure_channel(target, options=options)
        options.append(("grpc.ssl_target_name_override", CERTIFICATE_NAME))
        credentials = grpc.ssl_channel_credentials(root_certificates=certificate_pem)
        return aio.secure_channel(target, credentials, options=options)


def _digest_or_unavailable(peer: Peer, certificate_pem: bytes | None) -> str:
    if certificate_pem is None:
        return ""
    try:
        return certificate_digest(certificate_pem)
    except ValueError as error:
        raise PeerUnavailableError(f"{peer.address}: expected a certificate in PEM, found none ({error})") from None


async def fetch_certificate(host: str, port: int, timeout_s: float) -> bytes:
    """Fetches the certificate (PEM) that is shown at an address: no more than a claim until a signed reply confirms it.

    Raises PeerUnavailableError where none is, or not in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
            await writer.start_tls(context)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    except (OSError, UnicodeError) as error:
        if writer is not None:
            reason = str(error) or f"no answer in {timeout_s:g} s"
            raise PeerUnavailableError(f"{host}:{port} shows no TLS certificate ({reason})", "tls") from None
        reason, cause = _why_unreachable(error, timeout_s)
        if cause == "refused":
            text = f"{host}:{port} refuses connections: nothing listens there (any more)"
            raise PeerUnavailableError(text, cause) from None
        raise PeerUnavailableError(f"{host}:{port} cannot be reached: {reason}", cause) from None
    finally:
        if writer is not None:
            writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(der).encode()


def _why_unreachable(error: OSError | UnicodeError, timeout_s: float) -> tuple[str, str]:
    """Returns why connecting has failed, for people and as `PeerUnavailableError.cause`."""
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout_s:g} s", "timeout"
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return "its name cannot be looked up now", "name"
    if isinstance(error, UnicodeError | socket.gaierror):  # The former: no name at all, such as one of 70 letters.
        return "no such host", "name"
    # Of a host with several addresses asyncio makes one error, which has the others' texts only.
    numbers = {error.errno} if error.errno is not None else {int(number) for number in _ERRNO.findall(str(error))}
    text = ", ".join(os.strerror(number).lower() for number in sorted(numbers)) or str(error)
    return text, next((cause for number, cause in _CAUSES.items() if number in numbers), "")
