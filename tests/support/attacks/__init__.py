"""Attacks on a running swarm, as processes of their own on this machine.

    python -m tests.support.attacks NAME TARGET.json

Each attacks the nodes that ``target`` names, until ``target.seconds`` are over, and nothing else; it prints its results
as one line of JSON at its end. `tests/trainer/attacks` runs each beside a swarm at work.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from trainer.errors import RpcError
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PeerExchangeReply, pack_request
from trainer.network.rpc import Endpoint, Peer


@dataclass(frozen=True)
class Target:
    """A swarm on this machine, as anybody knows it who has its run file and the address of one node."""

    run_file: str
    addresses: dict[str, str]
    """``host:port`` of each node's RPC endpoint by its name: ``head.1`` …, ``driver-1``, ``driver-2``."""
    peer_ids: dict[str, str]
    apis: dict[str, str]
    """``http://127.0.0.1:port`` of each node that has an HTTP API, by its name."""
    seconds: float
    seed: int = 0
    source_host: str = "127.0.0.66"
    """The address to attack from, as far as an attack can choose; 127.0.0.1 is the honest nodes' own."""
    niceness: int = 19
    """Of the attack: the machine is shared with the victims, and what is measured is their defence, not the cores."""

    def peer(self, name: str) -> Peer:
        return Peer(self.peer_ids[name], self.addresses[name])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


async def send_record(endpoint: Endpoint, peer: Peer, wire: bytes) -> bool:
    """Announces an endpoint with its own record; returns whether it was answered."""
    body, payload = pack_request(wire, [])
    try:
        await endpoint.call(peer, EXCHANGE_METHOD, body, PeerExchangeReply, payload=payload, timeout_s=5.0)
    except RpcError:
        return False
    return True
