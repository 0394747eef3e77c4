"""Transfers the shared state of a run to nodes that join or are behind, as files that any node can serve unaltered.

    descriptor = write_snapshot(directory, {"outer_step": 7}, {"anchor": anchor, "momentum": momentum})
    StateDonor(endpoint, directory, StateConfig()).start()
    wanted = choose_state((outer_step, own_digest), await discovery.peers())
    snapshot = await fetch_state(endpoint, donors, wanted, directory, expectation=Expectation(max_bytes), timeout_s=600)

Guarantees: a digest verifies every byte; whatever donors do, a fetch returns what the digest names or raises
`StateTransferError`; a transfer resumes where it stopped, after kill -9 too. The trade-off: state passes through the
disk (twice its size with the two snapshots kept), so that serving it needs no memory.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
