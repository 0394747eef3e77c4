"""Checkpoints of a node, from which training resumes bit for bit.

    wallet = wallet_id(token, node_id)
    with Checkpointer(directory, wallet) as checkpointer:
        contents = load_newest(directory, wallet)          # None: there is none yet
        ...
        checkpointer.save(contents.to_mapping())           # every 10 steps
        checkpointer.save(contents.to_mapping(), wait=True)  # on the way out

Guarantees: a node killed at any moment finds a whole checkpoint when it comes back; a file that is damaged, cut short
or foreign is passed over for the one before it; nothing in a file is executed. The training thread pays for one copy
into buffers that are reused: for 30M parameters with two moments (360 MB) 43 ms of one core, 18 ms on two; digest,
writing and fsync, half a second of one core, run in one background thread. The trade-off: host memory for a second copy
of the state.
"""

from __future__ import annotations

from trainer.checkpoint.node.checkpointer import Checkpointer
from trainer.checkpoint.node.contents import CheckpointContents, load_newest, read_checkpoint
from trainer.checkpoint.node.naming import checkpoint_path, former_wallet_id, take_over_former_names, wallet_id

__all__ = [
    "CheckpointContents",
    "Checkpointer",
    "checkpoint_path",
    "former_wallet_id",
    "load_newest",
    "read_checkpoint",
    "take_over_former_names",
    "wallet_id",
]
