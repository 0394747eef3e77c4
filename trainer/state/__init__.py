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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.state.choose import choose_state
    from trainer.state.config import StateConfig
    from trainer.state.descriptor import Descriptor, Expectation, TensorSpec
    from trainer.state.donor import StateDonor
    from trainer.state.fetch import fetch_descriptor, fetch_state
    from trainer.state.layout import snapshots_in
    from trainer.state.snapshot import Snapshot, describe, load_snapshot, write_snapshot

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

_MODULES = {
    "Descriptor": "trainer.state.descriptor",
    "Expectation": "trainer.state.descriptor",
    "Snapshot": "trainer.state.snapshot",
    "StateConfig": "trainer.state.config",
    "StateDonor": "trainer.state.donor",
    "TensorSpec": "trainer.state.descriptor",
    "choose_state": "trainer.state.choose",
    "describe": "trainer.state.snapshot",
    "fetch_descriptor": "trainer.state.fetch",
    "fetch_state": "trainer.state.fetch",
    "load_snapshot": "trainer.state.snapshot",
    "snapshots_in": "trainer.state.layout",
    "write_snapshot": "trainer.state.snapshot",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'trainer.state' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
