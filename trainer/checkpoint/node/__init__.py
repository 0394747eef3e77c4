"""Checkpoints of a node, from which training resumes bit for bit.

    wallet = wallet_id(token, node_id)
    with Checkpointer(directory, wallet) as checkpointer:
        contents = load_newest(directory, wallet)          # None: there is none yet
        checkpointer.save(contents.to_mapping())           # every 10 steps

Guarantees: a node killed at any moment finds a whole checkpoint when it comes back; a file that is damaged, cut short
or foreign is passed over for the one before it; nothing in a file is executed.
"""

from __future__ import annotations

from trainer.checkpoint.files import read_checkpoint
from trainer.checkpoint.node.checkpointer import CheckpointContents, Checkpointer, load_newest
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
