"""Signed calls and streams between nodes that need not trust each other: the floor under the peer-to-peer trainer.

    endpoint = Endpoint(load_or_create_identity(path), run_id="corpus-1", config=RpcConfig(port=4100))
    endpoint.register("round/propose", Proposal, answer_proposal)      # async (Request[Proposal]) -> Reply
    await endpoint.start()
    reply = await endpoint.call(peer, "round/propose", proposal, Verdict, timeout_s=30)

Guarantees: no handler runs, and no answer is returned, before sender, recipient, run, clock, replay, signature and
digest were checked; a peer that is stopped or dead is noticed after `stall_timeout_s` of silence however long its
handler may take; what peers can make this node hold is bounded for each, for each address and in all, and what one of
them takes and leaves lying goes to the next that comes. The trade-off: each frame is
signed (50 µs) and verified (140 µs) by itself, so that any one of them can be shown to others as what a peer said;
at 1 MiB a frame that is some 7 % of its way over loopback.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
