"""Signed calls and streams between nodes that need not trust each other: the floor under the peer-to-peer trainer.

    endpoint = Endpoint(load_or_create_identity(path), run_id="corpus-1", config=RpcConfig(port=4100))
    endpoint.register("round/propose", Proposal, answer_proposal)      # async (Request[Proposal]) -> Reply
    await endpoint.start()
    reply = await endpoint.call(peer, "round/propose", proposal, Verdict, timeout_s=30)

Guarantees: no handler runs, and no answer is returned, before sender, recipient, run, clock, replay, signature and
digest were checked; a peer that is stopped or dead is noticed after `stall_timeout_s` of silence however long its
handler may take; what a peer can make this node hold is bounded per peer and in all. The trade-off: each frame is
signed (50 µs) and verified (140 µs) by itself, so that any one of them can be shown to others as what a peer said;
at 1 MiB a frame that is some 7 % of its way over loopback.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.rpc.config import RpcConfig
    from trainer.rpc.counters import Counters
    from trainer.rpc.endpoint import Endpoint
    from trainer.rpc.identity import Identity, load_or_create_identity, verify_signature
    from trainer.rpc.messages import Frame, Message, Peer, PeerId, Reply, Request
    from trainer.rpc.reasons import Reason
    from trainer.rpc.stream import ServerStream, Stream
    from trainer.rpc.strict_json import parse_strict_json

__all__ = [
    "Counters",
    "Endpoint",
    "Frame",
    "Identity",
    "Message",
    "Peer",
    "PeerId",
    "Reason",
    "Reply",
    "Request",
    "RpcConfig",
    "ServerStream",
    "Stream",
    "load_or_create_identity",
    "parse_strict_json",
    "verify_signature",
]

_MODULES = {
    "Counters": "trainer.rpc.counters",
    "Endpoint": "trainer.rpc.endpoint",
    "Frame": "trainer.rpc.messages",
    "Identity": "trainer.rpc.identity",
    "Message": "trainer.rpc.messages",
    "Peer": "trainer.rpc.messages",
    "PeerId": "trainer.rpc.messages",
    "Reason": "trainer.rpc.reasons",
    "Reply": "trainer.rpc.messages",
    "Request": "trainer.rpc.messages",
    "RpcConfig": "trainer.rpc.config",
    "ServerStream": "trainer.rpc.stream",
    "Stream": "trainer.rpc.stream",
    "load_or_create_identity": "trainer.rpc.identity",
    "parse_strict_json": "trainer.rpc.strict_json",
    "verify_signature": "trainer.rpc.identity",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.rpc' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
