"""Checkpoints that earlier releases named by the SHA-256 of the token: found, and given their name of today."""

from __future__ import annotations

import hashlib
import logging
import os

from filelock import FileLock, Timeout

from trainer.checkpoint.node.naming import WALLET_DIGITS, checkpoint_path, kept_path, kept_paths, lock_path, wallet_id
from trainer.errors import CheckpointError

__all__ = ["former_wallet_id", "take_over_former_names"]

logger = logging.getLogger(__name__)


def former_wallet_id(token: str) -> str:
    """What earlier releases called it: whoever reads it can try a thousand million tokens a second."""
    return hashlib.sha256(token.encode()).hexdigest()[:WALLET_DIGITS]


def take_over_former_names(directory: str | os.PathLike[str], token: str, instance: str = "") -> None:
    """Renames a token's checkpoints; nothing happens where there are none under their former name.

    It may be interrupted, and goes on the next time.

    Args:
        directory: of all checkpoints.
        token: the user's secret.
        instance: as for `checkpoint_path`.

    Raises:
        CheckpointError: they are in use, cannot be renamed, or there are such under the new name already.
    """
    former = checkpoint_path(directory, former_wallet_id(token), instance)
    newest = checkpoint_path(directory, wallet_id(token, ""), instance)
    names = {path: kept_path(newest, int(path.stem.rpartition("-")[2])) for path in reversed(kept_paths(former))}
    names |= {former.with_suffix(".yaml"): newest.with_suffix(".yaml"), former: newest}
    found = {source: target for source, target in names.items() if source.is_file()}
    if not found:
        return
    try:
        with FileLock(lock_path(former), timeout=0):
            for source, target in found.items():
                if target.exists() and target.suffix == ".pt":
                    raise CheckpointError(
                        f"expected this token's checkpoints under one name, found {source.name} of an earlier release "
                        f"and {target.name} in {former.parent}; move one of the two away"
                    )
                source.rename(target)
        lock_path(former).unlink(missing_ok=True)
    except Timeout:
        raise CheckpointError(
            f"expected {former.name} to be in nobody's use, found an earlier release training with the same token; "
            "stop it first"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{former} cannot be renamed to {newest.name}: {error}") from error
    logger.info("checkpoints named by a plain hash of the token are called %s from now on", newest.name)
