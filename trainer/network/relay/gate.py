"""Who gets a port of a relay: whoever proves its key and, in a run with an authority, shows its credential.

The checks go from cheap to expensive: version, rate of the host (8 registrations and then one in ten seconds), form,
the signature of the node's key (140 µs), which relay it is meant for, how many nodes there are, and the authority's
signature of the credential, once for each that is new. So strangers, a flood of them too, cost a host's ration of
signatures and no more. A relay of a run with an authority carries for its members (roles node, worker and driver) and,
for some minutes, for those to whom the authority gave a pass to join by. They have a quarter of its places at most,
since one invitation is good for passes of any number of keys. Both lose their port when what they have shown expires
without a newer one, and within seconds once the authority has revoked them. A relay without one takes anybody.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.relay.config import RelayConfig
from trainer.network.relay.protocol import (
    PROOF_LINE,
    PROTOCOL_VERSION,
    Challenge,
    Proof,
    Register,
    proof_text,
    read_line,
    unpack_credential,
    write_line,
)
from trainer.network.rpc.admission import Admission
from trainer.network.rpc.config import split_address
from trainer.network.rpc.credential import is_relay_pass
from trainer.network.rpc.dialing import address_group, host_kind
from trainer.network.rpc.identity import verify_signature
from trainer.network.rpc.messages import Reason
from trainer.network.rpc.token_buckets import TokenBuckets

LINE_S: Final = 10.0
"""Time for a line to come, or to be taken."""
_REGISTRATION_BURST: Final = 8.0
_REGISTRATIONS_PER_S: Final = 0.1
_PASSES_SHARE: Final = 4
"""One place in so many is for those who only have a pass."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a node that has, or gets, a port has shown for it."""

    host: str
    until: float
    """Seconds since 1970, when it expires."""
    is_by_pass: bool


class Gate:
    """Judges registrations; ``admission`` is that of the run whose members alone are relayed, None: anybody is."""

    def __init__(self, config: RelayConfig, admission: Admission | None) -> None:
        self._config = config
        self._admission = admission
        self._registrations = TokenBuckets(_REGISTRATION_BURST, _REGISTRATIONS_PER_S)

    def take(self, host: str) -> bool:
        """Counts something of a host that costs as much as a registration; returns whether it is within its rate."""
        return self._registrations.take(host)

    async def pass_through(
        self,
        asked: Register,
        host: str,
        port: int,
        others: Callable[[], Collection[Place]],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> Place:
        """Has a node prove that it may have a port; returns what it has then, and until when.

        ``port`` is the relay's own; ``others`` returns what the other nodes have, and is asked once nothing is waited
        for any more, so that nodes that come at once do not all get the last place. Raises RefusedError: it may not,
        and why; PeerUnavailableError: it says nothing more.
        """
        reader, writer = streams
        if asked.version != PROTOCOL_VERSION:
            text = f"expected version {PROTOCOL_VERSION} of the relay's protocol, found {asked.version}"
            raise RefusedError(Reason.PROTOCOL, text)
        if not self.take(host):
            text = f"expected fewer registrations of one host, found too many of {host}; try again in a minute"
            raise RefusedError(Reason.RATE, text)
        nonce = secrets.token_hex(16)
        run_name = "" if self._admission is None else self._admission.run_name
        await write_line(writer, Challenge(nonce=nonce, members_of=run_name), LINE_S, host)
        proof = await read_line(reader, PROOF_LINE, LINE_S, host)
        signed = proof_text(nonce, proof.relay, asked.peer_id, proof.dialled_ip)
        if not verify_signature(asked.peer_id, signed, bytes.fromhex(proof.signature)):
            raise RefusedError(Reason.SIGNATURE, "expected the nonce signed by the node's key, found another signature")
        self._check_is_own(proof, port, str(writer.get_extra_info("sockname", ("",))[0]))
        found = others()
        self._check_room(host, found)
        is_by_pass = self._admission is not None and is_relay_pass(unpack_credential(proof.credential))
        if is_by_pass and sum(other.is_by_pass for other in found) >= max(1, self._config.max_nodes // _PASSES_SHARE):
            text = "expected fewer newcomers at this relay, found too many that only have a pass; choose another"
            raise RefusedError(Reason.BUSY, text)
        return Place(host, self.until(asked.peer_id, proof.credential), is_by_pass)

    def until(self, peer_id: str, credential: str) -> float:
        """Returns until when a node may be relayed that shows this; raises RefusedError where it may not be."""
        if self._admission is None:
            return float("inf")
        return self._admission.until_relayed(peer_id, unpack_credential(credential))

    def check_still(self, peer_id: str, until: float) -> None:
        """Raises RefusedError once a node that has a port may not have it any more."""
        if self._admission is not None:
            self._admission.check_still_relayed(peer_id, until)

    def _check_room(self, host: str, others: Collection[Place]) -> None:
        config = self._config
        if len(others) >= config.max_nodes:
            text = f"expected fewer than {config.max_nodes} nodes at this relay, found it full; choose another"
            raise RefusedError(Reason.BUSY, text)
        if sum(other.host == host for other in others) >= config.max_nodes_per_host:
            text = f"expected fewer than {config.max_nodes_per_host} nodes of {host}, found as many already"
            raise RefusedError(Reason.BUSY, text)

    def _check_is_own(self, proof: Proof, port: int, own_ip: str) -> None:
        """Raises RefusedError where a node that has dialled ``proof.relay`` meant another relay.

        Else another, with which the node registers, could pass its proof on, and take the node's place here. A relay
        that was not told its public host knows itself by the address that it is connected to at, where that is a public
        one; behind a router it is called by another, and knows itself by its port alone.
        """
        public = self._config.public_host
        try:
            host, named_port = split_address(proof.relay)
        except TrainerUsageError:
            host, named_port = "", 0
        is_own_ip = address_group(host) == address_group(own_ip)
        is_dialled = not proof.dialled_ip or address_group(proof.dialled_ip) == address_group(own_ip)
        is_host = host == public or is_own_ip if public else is_dialled or host_kind(own_ip) != "public"
        if named_port != port or not is_host:
            own = f"{public}:{port}" if public else f"port {port}"
            text = f"expected a proof for {own}, found one for {proof.relay[:80]}; name the relay so"
            raise RefusedError(Reason.RECIPIENT, text)
