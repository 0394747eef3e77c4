"""Connections to peers: one gRPC channel for each (address, certificate), kept while it works.

A connection that fails is dropped together with gRPC's backoff (1 s to 120 s by default), so that the next call tries
anew at once: how often a dead peer is tried is up to who calls, and a restarted one is found by the first call.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from grpc import aio

from trainer.errors import PeerUnavailableError
from trainer.rpc.certificates import CERTIFICATE_NAME, certificate_digest, fetch_certificate
from trainer.rpc.config import RpcConfig, split_address
from trainer.rpc.envelope import MAX_FRAME_BYTES
from trainer.rpc.messages import Peer, PeerId

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
    """The channels of one endpoint."""

    def __init__(self, config: RpcConfig) -> None:
        self._config = config
        self._links: OrderedDict[tuple[str, str], Link] = OrderedDict()
        self._retired: set[Link] = set()
        self._pins: OrderedDict[tuple[PeerId | None, str], bytes] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._links)

    async def get(self, peer: Peer) -> Link:
        """The channel to ``peer``; where its certificate is unknown, whatever certificate is shown there.

        Raises:
            PeerUnavailableError: no certificate is to be had.
            TrainerUsageError: the address is none.
        """
        certificate = await self._certificate_of(peer)
        digest = _digest_or_unavailable(peer, certificate)
        key = (peer.address, digest)
        if key not in self._links:
            await self._make_room()
        if self._closed:
            raise PeerUnavailableError(f"{peer.address}: expected a running endpoint, found it stopped on this side")
        if key not in self._links:
            await self._retire_others(key)
        if key not in self._links:
            self._links[key] = Link(peer, certificate, digest, self._open_channel(peer, certificate))
        self._links.move_to_end(key)
        return self._links[key]

    def confirm(self, peer: Peer, link: Link, sender: PeerId) -> None:
        """Pins the certificate: a frame signed by ``sender`` has named it."""
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
        self._pins.pop((peer.peer_id, peer.address), None)
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

    async def _certificate_of(self, peer: Peer) -> bytes | None:
        if not self._config.tls:
            return None
        if peer.certificate is not None:
            return peer.certificate
        pinned = self._pins.get((peer.peer_id, peer.address))
        if pinned is not None:
            return pinned
        host, port = split_address(peer.address)
        return await fetch_certificate(host, port, self._config.connect_timeout_s)

    def _open_channel(self, peer: Peer, certificate_pem: bytes | None) -> aio.Channel:
        split_address(peer.address)
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
            return aio.insecure_channel(peer.address, options=options)
        options.append(("grpc.ssl_target_name_override", CERTIFICATE_NAME))
        credentials = grpc.ssl_channel_credentials(root_certificates=certificate_pem)
        return aio.secure_channel(peer.address, credentials, options=options)

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
