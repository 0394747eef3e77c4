"""Checkpoints of a node, from which training resumes bit for bit (spec T-23): their names, fields, and who saves them.

    wallet = wallet_id(token, node_id)
    with Checkpointer(directory, wallet) as checkpointer:
        contents = load_newest(directory, wallet)          # None: there is none yet
        checkpointer.save(contents.to_mapping())           # every 10 steps

``dynamic_node_{wallet}.pt`` (spec T-24) is always the newest. ``dynamic_node_{wallet}.step-{N}.pt`` are the kept ones,
the newest among them under a second name for the same file. A node that runs several instances, or holds only some
layers, adds an instance to the name. Checkpoints that earlier releases named by the SHA-256 of the token are renamed.

A node killed at any moment finds a whole checkpoint when it comes back; a file that is damaged, cut short or foreign is
passed over for the one before it. The fields lie at the top of the file, so ``torch.load(path,
weights_only=True)["layers"]`` is the model's; ``optimizer`` is AdamW's state, ``schedule`` the rest of the inner
loop's. A slow disk makes checkpoints rarer and never delays training; an error of the disk is raised by the next call,
and the save after that tries again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor

from genesis.file_lock import FileLock, FileLockedError
from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.files import DIGEST, FORMAT_KEY, read_checkpoint, write_file
from trainer.checkpoint.saver import TIMEOUT_S, BackgroundSaver, Staged
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError, TrainerUsageError

logger = logging.getLogger(__name__)

WALLET_DIGITS: Final = 16
_SALT: Final = b"genesis checkpoint name 2"
_SCRYPT_COST: Final = 1 << 15  # With blocks of 8: 32 MiB and some 0.1 s for each token that somebody tries.
_INSTANCE: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_WALLET: Final = re.compile(r"[0-9a-f]{1,64}")
_VERSION: Final = 1
_OPTIONAL: Final = frozenset({"num_ids"})
_STEP: Final = "training_rounds"


def wallet_id(token: str | None, node_id: str) -> str:
    """Identifies the owner of checkpoints: 16 hex digits of the token's scrypt, or without one the node id's SHA-256.

    The name is visible to all who see the folder, and a plain hash would let a weak token be guessed. Raises
    `TrainerUsageError`: both are missing.
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

    ``instance`` distinguishes what one wallet runs side by side: a layer range, a rank. Raises `TrainerUsageError`:
    wallet or instance cannot be part of a file name.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Everything a node resumes from: tensors, and plain values that ``weights_only`` loads."""

    layer_ids: tuple[int, ...]
    architecture: Mapping[str, Any]
    """The model's configuration, which wins over the run file's when the node starts again."""
    layers: Mapping[str, Mapping[str, Tensor]]  # Parameters by stage or layer, then by name.
    optimizer: Mapping[str, Any]  # AdamW's state, ``optimizer`` of `InnerLoop.state_dict`.
    diloco: Mapping[str, Any]  # Anchor, outer momentum, position within the inner steps; empty without DiLoCo.
    training_rounds: int  # Steps taken, which names the file.
    current_loss: float
    timestamp: float  # Seconds since 1970.
    loader: Mapping[str, Any]
    rng: Mapping[str, Any]  # From `rng_state`.
    config: Mapping[str, Any]  # The run's resolved configuration.
    schedule: Mapping[str, Any]  # The inner loop's state without ``optimizer``: step index, steps dropped.
    num_ids: int | None = None  # Size of the vocabulary that losses are over; None in checkpoints of earlier releases.
    version: int = _VERSION

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name; nothing is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`. Raises `CheckpointMismatchError`: other fields, or of another release."""
        if mapping.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected a checkpoint of version {_VERSION}, found {mapping.get('version')!r}; "
                "use the release that wrote it"
            )
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - set(mapping) - _OPTIONAL), sorted(set(mapping) - names)
        if missing or unknown:
            raise CheckpointMismatchError(
                f"expected the fields of a checkpoint, found {missing or 'none'} missing, {unknown or 'none'} unknown"
            )
        return cls(**mapping)

    def inner_state(self) -> dict[str, Any]:
        """For `InnerLoop.load_state_dict`."""
        return {**self.schedule, "optimizer": self.optimizer}


def load_newest(directory: str | os.PathLike[str], wallet: str, instance: str = "") -> dict[str, Any] | None:
    """The contents of the newest checkpoint that is whole, tensors on the CPU; None if there is no file at all.

    Raises `CorruptCheckpointError`: there are files, and none is whole; `CheckpointMismatchError`: a later release
    wrote the newest one.
    """
    newest = checkpoint_path(directory, wallet, instance)
    damaged: list[str] = []
    seen: list[os.stat_result] = []
    for path in (newest, *kept_paths(newest)):
        try:
            status = path.stat()
        except FileNotFoundError:  # There is none, or the writer has just removed it.
            continue
        if any(os.path.samestat(status, other) for other in seen):  # The second name of the newest.
            continue
        seen.append(status)
        try:
            contents = read_checkpoint(path)
        except CorruptCheckpointError as error:
            logger.warning("%s; going on to the one before it", error)
            damaged.append(path.name)
            continue
        if damaged:
            logger.warning("took %s in the place of %s", path.name, ", ".join(damaged))
        return contents
    if damaged:
        raise CorruptCheckpointError(
            f"expected a whole checkpoint in {newest.parent}, found only damaged ones ({', '.join(damaged)}); "
            "move them away to begin anew"
        )
    return None


class Checkpointer(BackgroundSaver):
    """Writes the checkpoints of a wallet; keeps so many. Raises `TrainerUsageError`: an argument is out of range."""

    def __init__(self, directory: str | os.PathLike[str], wallet: str, keep: int = 3, *, instance: str = "") -> None:
        if keep < 1:
            raise TrainerUsageError(f"keep: expected 1 or more checkpoints, found {keep}")
        self.path: Path = checkpoint_path(directory, wallet, instance)
        super().__init__(self.path, "checkpoint")
        self._keep = keep
        self._lock = FileLock(lock_path(self.path))

    def open(self) -> None:
        """Takes the wallet's lock. Raises `CheckpointError`: another process has it, or the folder is not writable."""
        if self._lock.is_locked:
            return
        try:
            make_folders(self.path.parent)
            self._lock.acquire()
        except FileLockedError:
            raise CheckpointError(
                f"expected {self.path.name} to be this process's alone, found another one training with the same "
                f"wallet ({lock_path(self.path)} is locked); stop it, or give this one another --token, --node-id or "
                "checkpoint folder"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path.parent}: expected a folder for checkpoints that can be written to, found: {error}"
            ) from error

    def leaves_out(self) -> bool:
        """Whether a save without ``wait`` would be left out now, since another is being written; it then counts so."""
        is_busy = self.busy
        self.skipped += is_busy
        return is_busy

    def save(self, contents: Mapping[str, object], *, wait: bool = False, timeout_s: float = TIMEOUT_S) -> bool:
        """Saves the state as it is now; returns whether it was begun, which it is not while another is being written.

        The contents (`CheckpointContents.to_mapping`) may change afterwards. With ``wait`` it is never left out, is on
        the disk when this returns, and a failure of the save before is only logged. Raises `CheckpointError`: this
        save, or without ``wait`` the one before, could not be written, or ``contents`` cannot be saved. The state is
        unchanged, and the checkpoint before is whole.
        """
        deadline = time.monotonic() + timeout_s
        self.open()
        if wait:
            try:
                self.flush(timeout_s)
            except CheckpointError as failure:
                if not self._is_settled:
                    raise
                logger.warning("%s; trying again", failure)
        elif self.leaves_out():
            return False
        self.flush(timeout_s)
        step = contents.get(_STEP)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"contents[{_STEP!r}]: expected the number of steps taken, found {step!r}")
        for reserved in (FORMAT_KEY, DIGEST):
            if reserved in contents:
                raise CheckpointError(f"contents: expected no key {reserved!r}, which the file itself uses; rename it")
        self._begin(contents, lambda staged: self._write(staged, step))
        if wait:
            self.flush(max(0.0, deadline - time.monotonic()))
        return True

    def __enter__(self) -> Self:
        self.open()
        return self

    def _release(self) -> None:
        if self._is_settled:  # A write that hangs still needs the lock.
            self._lock.release()

    def _write(self, staged: Staged, step: int) -> None:
        began = time.perf_counter()
        contents = staged()
        try:
            write_file(self.path, contents, second_name=kept_path(self.path, step))
            set_aside = set_aside_later(self.path, step)
            if set_aside:
                sync_folder(self.path.parent)
                names = ", ".join(path.name for path in set_aside)
                logger.warning(
                    "the run went back to step %d: checkpoints of later steps are set aside as %s", step, names
                )
            for path in kept_paths(self.path)[self._keep :]:
                path.unlink()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: expected to write the checkpoint of step {step}, found: {error}; free some space or "
                "name another folder (the checkpoint before is whole)"
            ) from error
        self.saved += 1
        logger.debug("checkpoint of step %d written in %.2f s", step, time.perf_counter() - began)
