"""hivemind: a `Server` with one expert, and its `RemoteExpert` in another process.

Each side has a DHT node and libp2p daemon of its own. Four connection handlers are what its documentation recommends.
"""

from __future__ import annotations

from typing import Any

import torch
from hivemind import DHT
from hivemind.moe import ModuleBackend, RemoteExpert, Server
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.p2p import PeerID
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from scripts.baselines.swarm.stage_call import DIM, NUM_POSITIONS, Scale, activation, session_cpu_s, timed_calls
from scripts.baselines.trainer.serving import serve

_UID = "scale.0"
_HANDLERS = 4
_MAX_BATCH = 64


class ExpertMember:
    """One process: a server, or who asks it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._expert: RemoteExpert | None = None

    def serve(self) -> dict[str, Any]:
        """Starts a server; how to reach it."""
        self._dht = self._join([])
        form = BatchTensorDescriptor(NUM_POSITIONS, DIM)
        backend = ModuleBackend(
            _UID, Scale(), optimizer=None, args_schema=(form,), outputs_schema=form, max_batch_size=_MAX_BATCH
        )
        self._server = Server(self._dht, {_UID: backend}, num_connection_handlers=_HANDLERS)
        self._server.run_in_background(await_ready=True)
        return {"peer_id": str(self._dht.peer_id), "addresses": [str(each) for each in self._dht.get_visible_maddrs()]}

    def connect(self, peer_id: str, addresses: list[str]) -> dict[str, Any]:
        """Gets ready to ask the expert."""
        self._dht = self._join(addresses)
        (self._expert,) = create_remote_experts([ExpertInfo(_UID, PeerID.from_base58(peer_id))], self._dht)
        return {}

    def call(self, rows: int, count: int, in_flight: int) -> dict[str, Any]:
        """Forward passes."""
        x, expert = activation(rows), self._expert
        if expert is None:
            raise SystemExit("expected connect before call")
        if not torch.equal(expert(x), 2 * x):
            raise SystemExit("expected twice the input, found something else")
        return timed_calls(lambda: expert(x), count, in_flight)

    def cpu(self) -> dict[str, Any]:
        """Processor time so far."""
        return {"session_cpu_s": session_cpu_s()}

    def _join(self, addresses: list[str]) -> DHT:
        return DHT(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_auto_relay=False, start=True)


if __name__ == "__main__":
    member = ExpertMember()
    serve({"serve": member.serve, "connect": member.connect, "call": member.call, "cpu": member.cpu})
