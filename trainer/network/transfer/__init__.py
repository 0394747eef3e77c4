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

from trainer.network.transfer.descriptor import Descriptor, Expectation, TensorSpec
from trainer.network.transfer.donor import StateConfig, StateDonor
from trainer.network.transfer.fetch import choose_state, fetch_descriptor, fetch_state
from trainer.network.transfer.snapshot import Snapshot, describe, load_snapshot, snapshots_in, write_snapshot

__all__ = [
    "Descriptor",
    "Expectation",
    "Snapshot",
    "StateConfig",
    "StateDonor",
    "TensorSpec",
    "choose_state",
    "describe",
    "fetch_descriptor",
    "fetch_state",
    "load_snapshot",
    "snapshots_in",
    "write_snapshot",
]
