"""Where a node keeps its key: one file a name, so that several nodes of one machine are several peers."""

from __future__ import annotations

from pathlib import Path

from trainer.network.rpc import Identity, load_or_create_identity
from trainer.run.config import RunConfig

__all__ = ["identity_of", "identity_path"]


def identity_path(config: RunConfig) -> Path:
    """The file of this node's key."""
    return Path(config.state_dir).expanduser() / "identity" / f"{config.node_id}.pem"


def identity_of(config: RunConfig) -> Identity:
    """This node's key, made where there is none yet; errors as of `load_or_create_identity`."""
    return load_or_create_identity(identity_path(config))
