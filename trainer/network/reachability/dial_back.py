"""Calls a node back at the address it has announced: its key must answer there, over the protocol of the run.

An authority dials for those who have shown an invitation or are members, at the address they announce; a node dials
for anybody of its run, at the address that the call comes from (`service`). Both must be of no use as a scanner of
ports or a way into a private network. The address is resolved here, once, and judged: loopback, private and link-local
ones are dialled only for a requester that comes from an address of the same kind itself, or where the operator allows
them. What is sent is the run's gRPC handshake and no more. An authority tells only whether the key has answered. How
often hosts and ports are tried `Dialing` bounds, by address; ports below 1024 are never tried.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from typing import Final, cast, get_args

from trainer.errors import PeerUnavailableError, RefusedError, RpcError, TrainerUsageError
from trainer.network.reachability.messages import PROBE_METHOD, Outcome, Probe, ProbeReply
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.config import RpcConfig, split_address
from trainer.network.rpc.dialing import DialRefusedError, address_group, host_kind
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer, PeerId, Reason
from trainer.network.rpc.token_buckets import count_down

_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 4.0
_MAX_AT_ONCE, _MAX_OF_ADDRESS = 32, 16
"""Nodes that are dialled at once: all, and of requesters at one address."""


_OTHERS: Final = frozenset({Reason.RECIPIENT, Reason.RUN, Reason.SENDER, Reason.PROTOCOL})
"""Refusals by which it is another node, or one of another run, that answers at an address."""


class NotReachedError(RefusedError):
    """The key has not answered at its address (``unreachable``); ``outcome`` says what was found there."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__("unreachable", text)
        self.outcome: Outcome = outcome


class DialBack:
    """Dials for an authority or a node; for one event loop. ``tls`` as the run's nodes have it (`RpcConfig.tls`).

    A node of a run with an authority dials by its ``admission``, and believes members only.
    """

    def __init__(
        self,
        identity: Identity,
        run_name: str,
        *,
        allow_private: bool,
        tls: bool = True,
        admission: Admission | None = None,
    ) -> None:
        config = RpcConfig(host="127.0.0.1", tls=tls, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self._endpoint = Endpoint(identity, run_name, config, admission)  # It calls, and is never started to answer.
        # Kinds of address are judged here, for each requester; the rest there.
        self._endpoint.dialing.guard((), allow_private=True)
        self._allow_private = allow_private
        self._under_way = Counter[str]()  # By the requester's address.

    async def check(self, peer_id: PeerId, address: str, remote_host: str) -> None:
        """Checks that ``peer_id`` answers at ``address``, for a requester at ``remote_host``.

        Raises RefusedError: ``address`` (not to be dialled), ``busy``, ``rate``, or a NotReachedError.
        """
        group = address_group(remote_host)
        if self._under_way.total() >= _MAX_AT_ONCE or self._under_way[group] >= _MAX_OF_ADDRESS:
            raise RefusedError(Reason.BUSY, f"expected at most {_MAX_AT_ONCE} nodes to be dialled at once; try again")
        self._under_way[group] += 1
        try:
            where = await self._judged(address, remote_host)
            await self._probe(Peer(peer_id, where), address)
        finally:
            count_down(self._under_way, group)

    async def close(self) -> None:
        """Ends all connections."""
        await self._endpoint.stop()

    async def _judged(self, address: str, remote_host: str) -> str:
        """Returns where to dial, without a name in it."""
        try:
            host, port = split_address(address)
        except TrainerUsageError as error:
            raise RefusedError("address", str(error)) from None
        ip = host if host_kind(host) is not None else await _resolved(host)
        kind = host_kind(ip)
        is_alike = kind == host_kind(remote_host)
        if kind == "unusable" or (kind != "public" and not self._allow_private and not is_alike):
            raise RefusedError(
                "address",
                f"expected an address that others reach, found {address} ({kind}); give --public-address, or let the "
                "authority dial private addresses (--allow-private)",
            )
        if address_group(ip) == address_group(remote_host):
            self._endpoint.dialing.in_contact(address_group(ip))
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    async def _probe(self, peer: Peer, address: str) -> None:
        challenge, who = secrets.token_hex(16), f"{str(peer.peer_id)[:16]}…"
        try:
            answer = await self._asked(peer, challenge)
        except DialRefusedError as error:
            word = "rate" if error.reason in ("pause", "budget") else "address"
            raise RefusedError(word, f"{address} is not dialled now ({error.reason}); try again in a minute") from None
        except (RpcError, TrainerUsageError) as error:
            kind = "no answer" if isinstance(error, PeerUnavailableError) else "a refusal"
            raise NotReachedError(
                _outcome_of(error),
                f"expected {who} to answer at {address}, found {kind}; open that port to the internet, or give the "
                "address at which it is open (--public-address)",
            ) from None
        if answer != challenge:
            raise NotReachedError("another", f"expected {who} to answer the challenge at {address}, found another")

    async def _asked(self, peer: Peer, challenge: str) -> str:
        """Returns the answer; asks a second time, since a node that has restarted shows another certificate."""
        body = Probe(challenge=challenge)
        try:
            reply = await self._endpoint.call(peer, PROBE_METHOD, body, ProbeReply, timeout_s=_TIMEOUT_S)
        except DialRefusedError:
            raise
        except PeerUnavailableError as first:
            try:
                reply = await self._endpoint.call(peer, PROBE_METHOD, body, ProbeReply, timeout_s=_TIMEOUT_S)
            except DialRefusedError:  # No node has ever answered there, so it is not dialled again so soon.
                raise first from None
        return reply.body.challenge


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, RefusedError) and error.reason in _OTHERS:
        return "another"
    cause = error.cause if isinstance(error, PeerUnavailableError) else ""
    return cast("Outcome", cause) if cause in get_args(Outcome) else "failed"


async def _resolved(host: str) -> str:
    """Returns the first address of a name."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        raise RefusedError("address", f"expected a host that can be looked up, found {host[:80]!r}") from None
    return str(found[0][4][0])
