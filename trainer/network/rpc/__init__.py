"""Signed calls and streams between nodes that need not trust each other.

    endpoint = Endpoint(load_or_create_identity(path), run_id="corpus-1", config=RpcConfig(port=4100))
    endpoint.register("round/propose", Proposal, answer_proposal)      # async (Request[Proposal]) -> Reply
    await endpoint.start()
    reply = await endpoint.call(peer, "round/propose", proposal, Verdict, timeout_s=30)

Guarantees: no handler runs, and no answer is returned, before sender, recipient, run, clock, replay, signature and
digest were checked. A silent peer is noticed after `stall_timeout_s`. What peers can make this node hold is bounded for
each peer, for each address and in all. The trade-off: each frame is signed (50 µs) and verified (140 µs) by itself, so
that any one of them proves to others what a peer said. gRPC (0.2 s) is imported only where calls are made.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
