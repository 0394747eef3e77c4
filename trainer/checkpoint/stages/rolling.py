"""Back to an earlier moment: what is newer is set aside, so that workers that start find that moment's state.

Files are renamed into ``{run}/set-aside/{now}/{stage}/``, from where they can be moved back; nothing is deleted, then
or later. Killed half-way, the same call again does the rest. The run's workers must be stopped: one that runs knows
nothing of it, and goes on writing its own; while this machine has one it is refused. Where stages are on several
machines it is done on each, to the same time.
"""

from __future__ import annotations

import errno
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.stages.in_use import alone_with, locked_stages
from trainer.checkpoint.stages.naming import StageName, named_files, run_folder, spell_time
from trainer.checkpoint.stages.sets import StageSet, newest_set
from trainer.errors import CheckpointError
from trainer.model.plan import StagePlan

__all__ = ["SET_ASIDE", "RollBack", "roll_back"]

SET_ASIDE = "set-aside"


@dataclass(frozen=True, slots=True)
class RollBack:
    """What was done, or would be."""

    found: StageSet
    """The state that is the newest now."""
    folder: Path
    """Where newer files went."""
    moved: tuple[Path, ...]
    """Their paths before."""


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
    """Makes the newest set at or before a time the newest there is.

    Args:
        directory: of `StagewiseConfig.directory`.
        run_id: the run's.
        at_us: the time, microseconds since 1970.
        now_us: names the folder that newer files go to.
        plan: as for `newest_set`.
        stages: as for `newest_set`; others' files stay where they are.
        dry_run: only say what would be done.
        in_use: also while workers of this machine write there, as when one of them goes back alone.

    Raises:
        CheckpointError: there is no such set, workers write there, or files cannot be moved. Only in the last case was
            anything moved.
    """
    found = newest_set(directory, run_id, at_us, plan=plan, stages=stages)
    run = run_folder(directory, run_id)
    folder = run / SET_ASIDE / spell_time(now_us)
    if dry_run:
        return RollBack(found, folder, tuple(named.path for named in _newer(directory, run_id, at_us, stages)))
    try:
        with nullcontext() if in_use else alone_with(run, stages or {*found.files, *locked_stages(run)}):
            newer = _newer(directory, run_id, at_us, stages)
            moved = [named.path for named in newer if _move(named.path, folder / named.stage / named.path.name)]
    except OSError as error:
        raise CheckpointError(
            f"expected to move newer checkpoints to {folder}, found: {error}; mend that and do it again"
        ) from error
    return RollBack(found, folder, tuple(moved))


def _newer(directory: str | Path, run_id: str, at_us: int, stages: Collection[str]) -> list[StageName]:
    """Newest first: killed in between, what is left still reaches up to one moment."""
    named = named_files(directory, run_id)
    newer = (each for each in named if each.saved_us > at_us and (not stages or each.stage in stages))
    return sorted(newer, key=lambda each: each.saved_us, reverse=True)


def _move(path: Path, target: Path) -> bool:
    """Whether it was there; another worker that begins at the same time may be at it too."""
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
