"""Names of a node's checkpoints.

``dynamic_node_{wallet}.pt`` (spec T-24) is always the newest. ``dynamic_node_{wallet}.step-{N}.pt`` are the kept ones,
the newest among them under a second name for the same file. A node that runs several instances, or holds only some
layers, adds an instance to the name. Checkpoints that earlier releases named by the SHA-256 of the token are renamed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Final

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import CheckpointError, TrainerUsageError

logger = logging.getLogger(__name__)

WALLET_DIGITS: Final = 16
_SALT: Final = b"genesis checkpoint name 2"
_SCRYPT_COST: Final = 1 << 15  # With blocks of 8: 32 MiB and some 0.1 s for each token that somebody tries.
_INSTANCE: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_WALLET: Final = re.compile(r"[0-9a-f]{1,64}")


def wallet_id(token: str | None, node_id: str) -> str:
    """Identifies the owner of checkpoints: 16 hex digits of the token's scrypt, or without one the node id's SHA-256.

    The name is visible to all who see the folder, and a plain hash would let a weak token be guessed.

    Raises:
        TrainerUsageError: both are missing.
    """
    if token:
        hashed = hashlib.scrypt(
            token.encode(), salt=_SALT, n=_SCRYPT_COST, r=8, p=1, maxmem=1 << 26, dklen=WALLET_DIGITS // 2
        )
        return hashed.hex()
    if not node_id:
        raise TrainerUsageError("expected a token or a node id to name checkpoints by, found neither; give --node-id")
    return hashlib.sha256(node_id.encode()).hexdigest()[:WALLET_DIGITS]


def checkpoint_path(directory: str | os.PathLike[str], wallet: str, instance: str = "") -> Path:
    """The path of the newest checkpoint of a `wallet_id` below a folder, ``~`` expanded.

    ``instance`` distinguishes what one wallet runs side by side: a layer range, a rank.

    Raises:
        TrainerUsageError: wallet or instance cannot be part of a file name.
    """
    if not _WALLET.fullmatch(wallet):
        raise TrainerUsageError(f"wallet: expected the hex digits of wallet_id(), found {wallet!r}")
    if instance and not _INSTANCE.fullmatch(instance):
        raise TrainerUsageError(f"instance: expected at most 64 letters, digits and '-', found {instance!r}")
    return Path(directory).expanduser() / f"dynamic_node_{wallet}{'_' if instance else ''}{instance}.pt"


def kept_path(newest: Path, step: int) -> Path:
    """The path of the kept checkpoint of a step."""
    return newest.with_name(f"{newest.stem}.step-{step:012d}.pt")


def kept_paths(newest: Path) -> list[Path]:
    """All kept checkpoints, the highest step first; a copy or a restored backup changes file times."""
    return [path for _, path in sorted(_steps_kept(newest), reverse=True)]


def set_aside_later(newest: Path, step: int) -> list[Path]:
    """Renames the kept checkpoints of later steps, which a run that went back gave up; returns the new paths."""
    later = [path for kept_step, path in _steps_kept(newest) if kept_step > step]
    return [path.replace(path.with_name(f"replaced-{path.name}")) for path in later]


def _steps_kept(newest: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(newest.stem) + r"\.step-([0-9]{1,18})\.pt")
    if not newest.parent.is_dir():
        return []
    named = [(pattern.fullmatch(path.name), path) for path in newest.parent.iterdir()]
    return [(int(match[1]), path) for match, path in named if match is not None]


def lock_path(newest: Path) -> Path:
    """The file that the writer of these checkpoints holds locked."""
    return newest.with_suffix(".lock")


def former_wallet_id(token: str) -> str:
    """The wallet id of earlier releases, for which a thousand million tokens can be tried a second."""
    return hashlib.sha256(token.encode()).hexdigest()[:WALLET_DIGITS]


def take_over_former_names(directory: str | os.PathLike[str], token: str, instance: str = "") -> None:
    """Renames a token's checkpoints of earlier releases. Raises `CheckpointError`: in use, or new ones are there."""
    former = checkpoint_path(directory, former_wallet_id(token), instance)
    newest = checkpoint_path(directory, wallet_id(token, ""), instance)
    names = {path: kept_path(newest, int(path.stem.rpartition("-")[2])) for path in reversed(kept_paths(former))}
    names |= {former.with_suffix(".yaml"): newest.with_suffix(".yaml"), former: newest}
    found = {source: target for source, target in names.items() if source.is_file()}
    if not found:
        return
    try:
        with FileLock(lock_path(former)):
            for source, target in found.items():
                if target.exists() and target.suffix == ".pt":
                    raise CheckpointError(
                        f"expected this token's checkpoints under one name, found {source.name} of an earlier release "
                        f"and {target.name} in {former.parent}; move one of the two away"
                    )
                source.rename(target)
        lock_path(former).unlink(missing_ok=True)
    except FileLockedError:
        raise CheckpointError(
            f"expected {former.name} to be in nobody's use, found an earlier release training with the same token; "
            "stop it first"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{former} cannot be renamed to {newest.name}: {error}") from error
    logger.info("checkpoints named by a plain hash of the token are called %s from now on", newest.name)
