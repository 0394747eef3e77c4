"""What a node answers to those who want to know whether they are reached: hello, dial-back, a measured payload.

Whoever asks pays by address, not by identity: a hello costs 16 at once and then one a second, a dial-back 6 at once and
then one in 10 s, and payloads are counted up and down together, 48 MiB at once and then 128 KiB a second, of all
addresses 192 MiB and then 1 MiB a second. A dial-back goes to the address that the call came from and nowhere else, so
a node can be had to knock at nobody's door but the asker's own. A check of the asker's relay counts as a dial-back and
goes to the same address, there to ports from 1024 on; 16 go on at once. Who comes by way of a relay is not dialled:
that call comes from an address of the node's own machine, where a stranger must not have it try ports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, cast, get_args

from genesis import __version__
from trainer.errors import PeerUnavailableError, RefusedError
from trainer.network.reachability.dial_back import DialBack, NotReachedError
from trainer.network.reachability.messages import (
    BANDWIDTH_METHOD,
    DIAL_BACK_METHOD,
    HELLO_METHOD,
    PROBE_METHOD,
    RELAY_CHECK_METHOD,
    BandwidthReply,
    BandwidthRequest,
    DialBackReply,
    DialBackRequest,
    Hello,
    HelloReply,
    Outcome,
    Probe,
    ProbeReply,
    RelayCheckRequest,
)
from trainer.network.relay.probing import probe_relay
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.network.rpc.dialing import MIN_STRANGERS_PORT, address_group, parse_ip
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.messages import Reason, Reply, Request
from trainer.network.rpc.token_buckets import TokenBuckets

_HELLOS, _HELLOS_PER_S = 16.0, 1.0
_DIALS, _DIALS_PER_S = 6.0, 0.1
_MAX_RELAY_CHECKS: Final = 16
_UNIT_BYTES: Final = 64 << 10
_BYTES, _BYTES_PER_S = 48 << 20, 128 << 10
_ALL_BYTES, _ALL_BYTES_PER_S = 192 << 20, 1 << 20


def register_probe(endpoint: Endpoint) -> None:
    """Lets an endpoint answer whoever dials it back."""

    async def answer(request: Request[Probe]) -> Reply[ProbeReply]:
        return Reply(ProbeReply(challenge=request.body.challenge))

    endpoint.register(PROBE_METHOD, Probe, answer)


class ReachabilityService:
    """Answers for one endpoint, in its event loop; ``tls`` as the run has it."""

    def __init__(self, endpoint: Endpoint, *, tls: bool = True, clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._clock = clock
        self._hellos = TokenBuckets(_HELLOS, _HELLOS_PER_S)
        self._dials = TokenBuckets(_DIALS, _DIALS_PER_S)
        self._units = TokenBuckets(_BYTES / _UNIT_BYTES, _BYTES_PER_S / _UNIT_BYTES)
        self._all_units = TokenBuckets(_ALL_BYTES / _UNIT_BYTES, _ALL_BYTES_PER_S / _UNIT_BYTES)
        self._dial_back: DialBack | None = None
        self._noise = b""
        self._num_relay_checks = 0

    def register(self) -> None:
        """Makes it answerable; before the endpoint starts. With admission the endpoint answers probes already."""
        if self._endpoint.admission is None:
            register_probe(self._endpoint)
        register = self._endpoint.register
        register(HELLO_METHOD, Hello, self._hello, max_payload_bytes=0, any_recipient=True, needs_credential=False)
        register(DIAL_BACK_METHOD, DialBackRequest, self._dial, max_payload_bytes=0, any_recipient=True)
        register(RELAY_CHECK_METHOD, RelayCheckRequest, self._check_relay, max_payload_bytes=0, any_recipient=True)
        register(BANDWIDTH_METHOD, BandwidthRequest, self._measure, any_recipient=True)

    async def close(self) -> None:
        """Ends connections to those who were dialled back."""
        dial_back, self._dial_back = self._dial_back, None
        if dial_back is not None:
            await dial_back.close()

    async def _hello(self, request: Request[Hello]) -> Reply[HelloReply]:
        if not self._hellos.take(request.remote_address):
            raise _too_often("hellos")
        is_relayed = self._endpoint.may_be_relayed(request.remote_address)
        seen_host = "" if is_relayed else request.remote_address[:64]
        return Reply(HelloReply(version=__version__, now=self._clock(), seen_host=seen_host))

    def _take_dial(self, request: Request[DialBackRequest] | Request[RelayCheckRequest]) -> tuple[str, str]:
        """Returns the host that may be connected to and the whole address; raises RefusedError: none, or not now."""
        host, port = _own_host(request.body.host, request.remote_address), request.body.port
        if self._endpoint.may_be_relayed(request.remote_address):  # That address is one of this machine itself.
            raise RefusedError(
                "address", "expected a call that comes directly, found one by way of a relay; ask another"
            )
        if not self._dials.take(request.remote_address):
            raise _too_often("dial-backs")
        return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _check_relay(self, request: Request[RelayCheckRequest]) -> Reply[DialBackReply]:
        """Looks whether the sender's relay is reached at the sender's own address."""
        host, address = self._take_dial(request)
        if request.body.port < MIN_STRANGERS_PORT:
            text = f"expected a port of {MIN_STRANGERS_PORT} or above, found {request.body.port}"
            raise RefusedError("address", text)
        if self._num_relay_checks >= _MAX_RELAY_CHECKS:
            raise RefusedError(Reason.BUSY, f"expected at most {_MAX_RELAY_CHECKS} relays to be checked at once")
        self._num_relay_checks += 1
        outcome: Outcome = "reached"
        try:
            await probe_relay(host, request.body.port, request.sender, request.body.ticket)
        except PeerUnavailableError as error:
            outcome = cast("Outcome", error.cause) if error.cause in get_args(Outcome) else "failed"
        finally:
            self._num_relay_checks -= 1
        return Reply(DialBackReply(outcome=outcome, address=address))

    async def _dial(self, request: Request[DialBackRequest]) -> Reply[DialBackReply]:
        host, address = self._take_dial(request)
        if self._dial_back is None:
            endpoint = self._endpoint
            self._dial_back = DialBack(
                endpoint.identity, endpoint.run_id, allow_private=False, tls=self._tls, admission=endpoint.admission
            )
        try:
            await self._dial_back.check(request.sender, address, host)
        except NotReachedError as error:
            return Reply(DialBackReply(outcome=error.outcome, address=address))
        return Reply(DialBackReply(outcome="reached", address=address))

    async def _measure(self, request: Request[BandwidthRequest]) -> Reply[BandwidthReply]:
        asked_bytes = request.body.answer_bytes
        units = 1.0 + (len(request.payload) + asked_bytes) / _UNIT_BYTES
        if not self._units.take(request.remote_address, units):
            raise _too_often("bytes")
        if not self._all_units.take("", units):
            self._units.take(request.remote_address, -units)
            raise _too_often("bytes")
        if not self._noise:
            self._noise = os.urandom(MAX_PAYLOAD_BYTES)  # Nothing on the way can compress it.
        answer = memoryview(self._noise)[:asked_bytes]
        return Reply(BandwidthReply(received_bytes=len(request.payload)), answer)


def _own_host(named: str, remote: str) -> str:
    """Returns the address to dial, which is of the host that the call comes from; raises RefusedError (``address``)."""
    host = parse_ip(named or remote)
    if host is None or address_group(str(host)) != remote:
        raise RefusedError(
            "address", f"expected the address that the call comes from ({remote[:64]}), found {named[:64] or 'none'}"
        )
    return str(host)


def _too_often(what: str) -> RefusedError:
    return RefusedError(Reason.RATE, f"expected fewer {what} of this address; try again in a minute")
