"""`StageCheckpoints`: writes a stage's state periodically without delaying training.

While a save is being written, the next is left out and counted. A disk that is full or slow makes checkpoints rarer,
which the log and `failed` tell, and never ends a worker.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack

from genesis.file_lock import FileLockedError
from genesis.store.durable import make_folders
from trainer.checkpoint.files import write_file
from trainer.checkpoint.saver import TIMEOUT_S, BackgroundSaver, Staged
from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.checkpoint.stages.contents import StageState, document_of
from trainer.checkpoint.stages.naming import StageName, file_name, named_files, stage_folder, stage_lock, time_us
from trainer.errors import CheckpointError
from trainer.model.plan import StagePlan

_ANY_TIME = "????????T??????.??????Z-"  # In a pattern for names; as long as a time is.

_LOCK_WITHIN_S = 20.0  # For somebody who rolls back to have moved the files.

logger = logging.getLogger(__name__)


class StageCheckpoints(BackgroundSaver):
    """Writes the checkpoints of one worker of a stage; used by one thread.

    ``who`` is its uid or the beginning of its peer id; no two workers that run at a time have the same. Raises
    `TrainerUsageError`: the run has no such stage, or a name would not do as part of a path.
    """

    def __init__(self, config: StagewiseConfig, run_id: str, plan: StagePlan, stage: str, who: str) -> None:
        plan.index(stage)
        self._config = config
        self._run_id = run_id
        self._plan = plan
        self._stage = stage
        self._who = who
        self._folder = stage_folder(config.directory, run_id, stage)
        super().__init__(self._folder, "stage-checkpoint")
        self._leftovers = f".{_ANY_TIME}{file_name(0, who)[len(_ANY_TIME) :]}.tmp"
        self._in_use = ExitStack()
        self._slot: int | None = None
        self._opened_us = 0
        self.failed = 0
        self.failure = ""  # Why the checkpoint that was due last is not on the disk; empty if it is, or none was due.
        self.last_saved_us = 0  # Time of this process's newest checkpoint on the disk; 0 for none.
        self.last_version = 0
        self.last_mark: Hashable = None
        """Mark of the newest state that need not be saved: of that checkpoint, or as set."""

    def open(self, now: float) -> None:
        """Makes the folder and removes temporary files that a killed process of the same name left.

        Until `close` the stage cannot be rolled back; so call this before reading the state to resume from. The save of
        the present interval (``now``: seconds since 1970) is taken as done. Raises `CheckpointError`: not writable.
        """
        try:
            make_folders(self._folder)
            lock = stage_lock(self._folder.parent, self._stage, shared=True)
            lock.acquire(_LOCK_WITHIN_S)
            self._in_use.enter_context(lock)
            for leftover in self._folder.glob(self._leftovers):
                leftover.unlink(missing_ok=True)
        except FileLockedError:
            raise CheckpointError(
                f"{self._folder.parent}: expected to begin with checkpoints of {self._stage}, found them being rolled "
                f"back for more than {_LOCK_WITHIN_S:g} s; start again when that has ended"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self._folder}: expected a folder for checkpoints that can be written to, found: {error}"
            ) from error
        self._slot, self._opened_us = self._slot_of(now), time_us(now)

    def unsaved_s(self, now: float) -> float:
        """Seconds since the newest checkpoint was taken, or since `open`; 0 without checkpoints or before `open`."""
        since_us = max(self.last_saved_us, self._opened_us)
        is_known = self._config.interval_s and self._slot is not None
        return max(0.0, (time_us(now) - since_us) / 1e6) if is_known else 0.0

    def maybe_save(self, now: float, state_fn: Callable[[], StageState], mark: Hashable = None) -> bool:
        """Saves if a multiple of the interval has passed since the last save, and returns whether it has begun to.

        ``now`` is the wall clock; one that is set back saves at once, and goes on from there. ``state_fn`` is called
        only if it is saved; ``mark`` differs from that of any other state, for `save_changes`. Raises
        `CheckpointError`: the folder cannot be written to (at the first call only), or the state cannot be saved.
        """
        if not self._config.interval_s:
            return False
        if self._slot is None:
            self.open(now)
        slot = self._slot_of(now)
        if slot == self._slot:
            return False
        self._slot = slot
        if self.busy:
            self.skipped += 1
            self.failure = "the one before is still being written"
            return False
        self._save(now, state_fn(), mark)
        return True

    def save_changes(self, now: float, state_fn: Callable[[], StageState], mark: Hashable) -> bool:
        """Saves unless this state is on the disk already; whether it did. Raises `CheckpointError`: as `save`."""
        self.flush()
        if mark is not None and mark == self.last_mark:
            return False
        self.save(now, state_fn(), mark=mark)
        return True

    def save(self, now: float, state: StageState, *, mark: Hashable = None, timeout_s: float = TIMEOUT_S) -> None:
        """Saves now, and waits for it. Raises `CheckpointError`: it could not be written, or not in time."""
        if self._slot is None:
            self.open(now)
        deadline_s = time.monotonic() + timeout_s
        self.flush(timeout_s)
        failed = self.failed
        self._save(now, state, mark)
        self.flush(max(0.0, deadline_s - time.monotonic()))
        if self.failed > failed:
            raise CheckpointError(f"{self._folder}: the checkpoint could not be written: {self.failure}")

    def _release(self) -> None:
        self._in_use.close()

    def _slot_of(self, now: float) -> int:
        return time_us(now) // time_us(self._config.interval_s) if self._config.interval_s else 0

    def _save(self, now: float, state: StageState, mark: Hashable) -> None:
        saved_us, version = time_us(now), state.version
        document = document_of(self._run_id, self._plan, self._stage, saved_us, state)
        self._begin(document, lambda staged: self._write(staged, saved_us, version, mark))

    def _write(self, staged: Staged, saved_us: int, version: int, mark: Hashable) -> None:
        path = self._folder / file_name(saved_us, self._who)
        try:
            write_file(path, staged())
        except (OSError, RuntimeError) as error:
            self.failed += 1
            # In a line that others see: without paths.
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.failure = said.partition("\n")[0].encode("utf-8", "replace").decode() or type(error).__name__
            logger.error(
                "%s: expected to write a checkpoint, found: %s; free some space or name another folder (those before "
                "are whole)",
                path,
                error,
            )
            return
        self.saved += 1
        self.last_saved_us, self.last_version, self.failure = saved_us, version, ""
        self.last_mark = mark
        try:
            # Of all workers: one that has left cannot remove its own.
            named = named_files(self._config.directory, self._run_id)
            files = [found for found in named if found.stage == self._stage and not found.path.is_dir()]
            for found in _too_many(files, self._config.keep, max(1, time_us(self._config.interval_s))):
                found.path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: old checkpoints cannot be removed: %s", self._folder, error)


def _too_many(named: Iterable[StageName], keep: int, interval_us: int) -> list[StageName]:
    """All files but each worker's newest ``keep``, of the stage's newest ``keep`` intervals.

    A worker that is restarted often writes several within an interval, so files are counted by worker; those of workers
    that have left would stay for ever, so intervals count too.
    """
    newest_first = sorted(named, key=lambda found: found.saved_us, reverse=True)
    intervals = sorted({found.saved_us // interval_us for found in newest_first}, reverse=True)[:keep]
    ranks: Counter[str] = Counter()
    dropped = []
    for found in newest_first:
        ranks[found.who] += 1
        if ranks[found.who] > keep or found.saved_us // interval_us not in intervals:
            dropped.append(found)
    return dropped
