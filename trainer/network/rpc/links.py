"""Connections to peers: one gRPC channel for each (address, certificate), kept while it works.

A connection that fails is dropped together with gRPC's backoff (1 s to 120 s by default), so that the next call tries
anew at once: how often a dead peer is tried is up to who calls, and a restarted one is found by the first call. Where
addresses come from strangers `Dialing` sets the limit.

Before a channel is opened one connection looks which certificate is shown there. So an address that is somebody else's
gets one connection, and no gRPC channel that keeps trying.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from grpc import aio

from trainer.errors import PeerUnavailableError
from trainer.network.rpc.certificates import CERTIFICATE_NAME, certificate_digest, fetch_certificate
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.dialing import Dialing, Socket
from trainer.network.rpc.envelope import MAX_FRAME_BYTES
from trainer.network.rpc.messages import Peer, PeerId

__all__ = ["METHOD_PATH", "Link", "Links", "channel_options"]

METHOD_PATH = "/genesis.trainer.Rpc/Exchange"
"""The one gRPC method; which method of ours is meant stands in the signed head."""

MAX_LINKS = 256

WINDOW_BYTES = 8 << 20
"""How much of a stream gRPC takes in before its reader asks for it.

Fixed, since gRPC's own guess of a connection's bandwidth times delay has no bound: on a busy machine it let 79 MiB
pile up before a reader that had stopped. A link of 0.1 s there and back carries 640 Mbit/s a stream with it.
"""

ClientCall: TypeAlias = "aio.StreamStreamCall[bytes, bytes]"
_Options: TypeAlias = list[tuple[str, int | str]]


def channel_options(config: RpcConfig) -> _Options:
    """GRPC's settings for both sides.

    Nothing larger than a frame is read, no more than a window ahead of who reads; dead connections are found by pings.
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


@dataclass(slots=True, eq=False)
class Link:
    """A channel to one peer, and what is known of the certificate it is bound to."""

    peer: Peer
    where: Socket
    certificate_pem: bytes | None
    certificate_sha256: str
    channel: aio.Channel
    calls: set[ClientCall] = field(default_factory=set)
    retired: bool = False
    """No new calls; closed when the last one ends."""

    def begin(self, timeout_s: float) -> ClientCall:
        """Starts an exchange; nothing is sent yet."""
        method: aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(METHOD_PATH)
        call: ClientCall = method(timeout=timeout_s)
        self.calls.add(call)
        return call


class Links:
    """The channels of one endpoint.

    Args:
        config: times and limits.
        dialing: where to connect.
    """

    def __init__(self, config: RpcConfig, dialing: Dialing) -> None:
        self._config = config
        self._dialing = dialing
        self._links: OrderedDict[tuple[str, str], Link] = OrderedDict()
        self._retired: set[Link] = set()
        self._pins: OrderedDict[tuple[PeerId | None, str], bytes] = OrderedDict()
        self._shown: OrderedDict[str, tuple[Socket, bytes | None]] = OrderedDict()
        """By address: where it was connected to last, and the certificate that was shown there."""
        self._looking: dict[tuple[str, PeerId | None], asyncio.Task[tuple[Socket, bytes | None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._links)

    async def get(self, peer: Peer) -> Link:
        """The channel to ``peer``; where its certificate is unknown, whatever certificate is shown there.

        Raises:
            PeerUnavailableError: it is not to be dialled, cannot be reached, or shows another certificate.
            TrainerUsageError: the address is none.
        """
        expected = self._expected_certificate(peer)
        if expected is not None or not self._config.tls:
            key = (peer.address, _digest_or_unavailable(peer, expected))
            if key in self._links and not self._closed:
                self._links.move_to_end(key)
                return self._links[key]
        where, certificate = await self._find(peer, expected)
        digest = _digest_or_unavailable(peer, certificate)
        key = (peer.address, digest)
        if key not in self._links:
            await self._make_room()
        if self._closed:
            raise PeerUnavailableError(f"{peer.address}: expected a running endpoint, found it stopped on this side")
        if key not in self._links:
            await self._retire_others(key)
        if key not in self._links:
            self._links[key] = Link(peer, where, certificate, digest, self._open_channel(where, certificate))
        self._links.move_to_end(key)
        return self._links[key]

    def confirm(self, peer: Peer, link: Link, sender: PeerId) -> None:
        """Pins the certificate: a frame signed by ``sender`` has named it."""
        self._dialing.answered(link.where)
        if link.certificate_pem is None:
            return
        for key in ((sender, peer.address), (peer.peer_id, peer.address)):
            self._pins[key] = link.certificate_pem
            self._pins.move_to_end(key)
        while len(self._pins) > 2 * MAX_LINKS:
            self._pins.popitem(last=False)

    def failed(self, peer: Peer, link: Link) -> None:
        """Drops a channel that cannot connect, and what was pinned for it: the peer may have restarted."""
        if self._closed or link.channel.get_state() is grpc.ChannelConnectivity.READY:
            return
        self._dialing.failed(link.where)
        self._pins.pop((peer.peer_id, peer.address), None)
        self._shown.pop(peer.address, None)
        self._retire(link)

    async def finish(self, link: Link, call: ClientCall) -> None:
        """Ends an exchange, whatever state it is in."""
        link.calls.discard(call)
        call.cancel()
        if link.retired and not link.calls:
            self._retired.discard(link)
            await link.channel.close()

    async def close(self) -> None:
        """Ends all calls and connections."""
        self._closed = True
        for task in self._looking.values():
            task.cancel()
        for link in (*self._links.values(), *self._retired):
            await link.channel.close()
        self._links.clear()
        self._retired.clear()

    async def _retire_others(self, key: tuple[str, str]) -> None:
        """A node that shows another certificate has restarted: its old channel would try to connect for ever."""
        for other in [other for other in self._links if other[0] == key[0] and other != key]:
            link = self._links[other]
            self._retire(link)
            if not link.calls:
                self._retired.discard(link)
                await link.channel.close()

    def _retire(self, link: Link) -> None:
        """Takes a link out of use; the last call on it closes it."""
        key = (link.peer.address, link.certificate_sha256)
        if self._links.get(key) is link:
            del self._links[key]
            link.retired = True
            self._retired.add(link)

    def _expected_certificate(self, peer: Peer) -> bytes | None:
        """The certificate it has to show; None: any, or there is no TLS."""
        if not self._config.tls:
            return None
        if peer.certificate is not None:
            return peer.certificate
        return self._pins.get((peer.peer_id, peer.address))

    async def _find(self, peer: Peer, expected: bytes | None) -> tuple[Socket, bytes | None]:
        """Where the peer is, and its certificate.

        Raises:
            PeerUnavailableError: not to be had, or not the expected one.
        """
        shown = self._shown.get(peer.address)
        if shown is not None and expected is not None and shown[1] == expected:
            # Whoever was claimed to be there before: the one that is meant now has shown itself. Not another dial.
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
        if task.cancelled() or task.exception() is not None:
            return
        self._shown[key[0]] = task.result()
        self._shown.move_to_end(key[0])
        while len(self._shown) > 2 * MAX_LINKS:
            self._shown.popitem(last=False)

    async def _look(self, peer: Peer) -> tuple[Socket, bytes | None]:
        """Connects once to each address there may be, until one answers."""
        places = await self._dialing.admit(peer)
        if not self._config.tls:
            return places[0], None
        for host, port in places[:-1]:
            try:
                return (host, port), await fetch_certificate(host, port, self._config.connect_timeout_s)
            except PeerUnavailableError:
                continue
        host, port = places[-1]
        try:
            return (host, port), await fetch_certificate(host, port, self._config.connect_timeout_s)
        except PeerUnavailableError:
            self._dialing.failed((host, port))
            raise

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

    async def _make_room(self) -> None:
        for key, link in list(self._links.items()):
            if len(self._links) >= MAX_LINKS and not link.calls:
                del self._links[key]
                await link.channel.close()


def _digest_or_unavailable(peer: Peer, certificate_pem: bytes | None) -> str:
    if certificate_pem is None:
        return ""
    try:
        return certificate_digest(certificate_pem)
    except ValueError as error:
        raise PeerUnavailableError(f"{peer.address}: expected a certificate in PEM, found none ({error})") from None
