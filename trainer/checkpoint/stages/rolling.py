"""Rolling stages back to an earlier moment: newer files are set aside, so that workers start from that moment's state.

Files are renamed into ``{run}/set-aside/{now}/{stage}/``, from where they can be moved back. The same call completes
one that was interrupted. While this machine runs a worker, which would go on writing its own state, it is refused. If
stages are on several machines, roll each machine back to the same time.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from genesis.file_lock import FileLockedError
from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.stages.naming import StageName, format_time_us, named_files, run_folder, stage_lock
from trainer.checkpoint.stages.sets import StageSet, newest_set
from trainer.errors import CheckpointError
from trainer.model.plan import StagePlan

SET_ASIDE = "set-aside"


@dataclass(frozen=True, slots=True)
class RollBack:
    """The effect of rolling back, or of a rehearsal: the newest state, the folder of newer files, their old paths."""

    found: StageSet
    folder: Path
    moved: tuple[Path, ...]


def roll_back(
    directory: str | Path,
    run_id: str,
    at_us: int,
    now_us: int,
    *,
    plan: StagePlan | None = None,
    stages: Collection[str] = (),
    dry_run: bool = False,
    in_use: bool = False,
) -> RollBack:
    """Makes the newest set (`newest_set`) at or before a time the newest there is; files of other stages stay.

    ``now_us`` names the folder of newer files; ``in_use`` allows workers of this machine to write meanwhile, as when
    one of them goes back alone.

    Raises:
        CheckpointError: there is no such set, workers are running, or files cannot be moved; only in the last case
            may some have been moved.
    """
    found = newest_set(directory, run_id, at_us, plan=plan, stages=stages)
    run = run_folder(directory, run_id)
    folder = run / SET_ASIDE / format_time_us(now_us)
    if dry_run:
        return RollBack(found, folder, tuple(named.path for named in _newer(directory, run_id, at_us, stages)))
    try:
        with ExitStack() as locks:
            if not in_use:
                known = {lock.name[1 : -len(".lock")] for lock in run.glob(".*.lock")}
                _lock(locks, run, stages or known.union(found.files))
            newer = _newer(directory, run_id, at_us, stages)
            moved = [named.path for named in newer if _move(named.path, folder / named.stage / named.path.name)]
    except OSError as error:
        raise CheckpointError(
            f"expected to move newer checkpoints to {folder}, found: {error}; mend that and do it again"
        ) from error
    return RollBack(found, folder, tuple(moved))


def _lock(locks: ExitStack, run: Path, stages: Collection[str]) -> None:
    """Keeps workers of this machine from writing checkpoints of these stages, or raises `CheckpointError`."""
    in_use = []
    for stage in sorted(stages):
        try:
            locks.enter_context(stage_lock(run, stage, shared=False))
        except FileLockedError:
            in_use.append(stage)
    if in_use:
        raise CheckpointError(
            f"{run}: expected no worker that writes here, found one or more of {', '.join(in_use)} running, which "
            "would go on from what they know; stop the run's workers first, and do it again"
        )


def _newer(directory: str | Path, run_id: str, at_us: int, stages: Collection[str]) -> list[StageName]:
    """Newest first, so that after an interruption the remaining files end at one moment."""
    named = named_files(directory, run_id)
    newer = (each for each in named if each.saved_us > at_us and (not stages or each.stage in stages))
    return sorted(newer, key=lambda each: each.saved_us, reverse=True)


def _move(path: Path, target: Path) -> bool:
    """Moves a file; False if another worker that starts at the same time has moved it."""
    make_folders(target.parent)
    if target.exists():
        raise FileExistsError(errno.EEXIST, "there is a file of that name", str(target))
    try:
        path.rename(target)
    except FileNotFoundError:
        return False
    sync_folder(target.parent)
    sync_folder(path.parent)
    return True
