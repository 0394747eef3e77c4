"""The shared state of a run as files that anyone can hand out and nobody can alter: for nodes that join or were behind.

    descriptor = write_snapshot(directory, {"outer_step": 7}, {"anchor": anchor, "momentum": momentum})
    StateDonor(endpoint, directory, StateConfig()).start()
    wanted = choose_state((outer_step, own_digest), await discovery.peers())
    snapshot = await fetch_state(endpoint, donors, wanted, directory, expectation=Expectation(max_bytes), timeout_s=600)

Guarantees: a digest vouches for every byte; whatever donors do, what is returned is what the digest names, or a
`StateTransferError`; a transfer goes on where it stopped, after kill -9 too. The trade-off: state passes through the
disk (twice its size with the two snapshots kept), so that memory is not needed for serving it.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
