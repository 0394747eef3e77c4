"""The set of files that makes the model of a moment: of every stage the newest whole one up to then.

All files of a set belong to one run, architecture and cut. If a run changed its shape there are several candidates; the
complete one whose oldest file is the newest is taken. Only headers are read first (10 ms a file), and the chosen files
are then read whole against their digests (1.8 GB/s).

Rolling back to an earlier moment renames newer files into ``{run}/set-aside/{now}/{stage}/``, from where they can be
moved back; the same call completes one that was interrupted. While this machine runs a worker, which would go on
writing its own state, it is refused. If stages are on several machines, roll each machine back to the same time.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from genesis.file_lock import FileLockedError
from genesis.store.durable import make_folders, sync_folder
from trainer.checkpoint.stages.contents import RunShape, StageCheckpoint, StageHeader, peek, read_stage
from trainer.checkpoint.stages.naming import (
    StageName,
    format_time_us,
    misnamed_files,
    named_files,
    run_folder,
    stage_lock,
)
from trainer.errors import CheckpointError, CheckpointMismatchError
from trainer.model import ModelConfig
from trainer.model.plan import StagePlan
from trainer.model.stages import stage_shapes

logger = logging.getLogger(__name__)

SET_ASIDE = "set-aside"


@dataclass(frozen=True, slots=True)
class StageFile:
    """A stage's checkpoint on the disk, with its header."""

    named: StageName
    header: StageHeader

    def read(self) -> StageCheckpoint:
        """See `read_stage`."""
        return read_stage(self.named)


@dataclass(frozen=True, slots=True)
class StageSet:
    """One file of every stage, or of the requested ones."""

    files: Mapping[str, StageFile]  # By stage, head first.

    @property
    def shape(self) -> RunShape:
        """What all files share."""
        return next(iter(self.files.values())).header.shape

    @property
    def first_us(self) -> int:
        """Time of the oldest state."""
        return min(file.header.saved_us for file in self.files.values())

    @property
    def last_us(self) -> int:
        """Time of the newest state."""
        return max(file.header.saved_us for file in self.files.values())


def newest_set(
    directory: str | Path, run_id: str, at_us: int, *, plan: StagePlan | None = None, stages: Collection[str] = ()
) -> StageSet:
    """The newest set at or before a time in microseconds since 1970; damaged files are passed over.

    Only files of the architecture and cut of ``plan`` count, if there is one, and only some ``stages``, such as a
    worker's own where the others' files are elsewhere. Raises `CheckpointError`: a stage has no such file.
    """
    named = (found for found in named_files(directory, run_id) if not stages or found.stage in stages)
    for stage, path in misnamed_files(directory, run_id):
        if not stages or stage in stages:
            logger.warning("%s: expected a checkpoint's name, TIME-WORKER.pt, found another; going on without it", path)
    files = list(_openable(named))
    whole: set[Path] = set()
    while True:
        found = choose(files, at_us, plan, stages)
        if found is None:
            raise CheckpointError(_none(run_folder(directory, run_id), files, at_us, plan, stages))
        damaged = {file.named.path for file in found.values() if file.named.path not in whole and not _is_whole(file)}
        if not damaged:
            return StageSet(found)
        whole |= {file.named.path for file in found.values()} - damaged
        files = [file for file in files if file.named.path not in damaged]


def choose(
    files: Iterable[StageFile], at_us: int, plan: StagePlan | None = None, stages: Collection[str] = ()
) -> dict[str, StageFile] | None:
    """Of files not known to be damaged those of the newest set, by stage; None if no shape has a file of all."""
    newest = _newest_by_shape(files, at_us, plan)
    complete = [
        {name: found[name] for name in _wanted(shape, stages)}
        for shape, found in newest.items()
        if found.keys() >= set(_wanted(shape, stages))
    ]
    return max(complete, key=_order, default=None)


def _wanted(shape: RunShape, stages: Collection[str]) -> tuple[str, ...]:
    """The stages of a set, head first; unknown names come last, and are never found."""
    if not stages:
        return shape.plan.names
    return (*(name for name in shape.plan.names if name in stages), *sorted(set(stages) - set(shape.plan.names)))


def _newest_by_shape(
    files: Iterable[StageFile], at_us: int, plan: StagePlan | None
) -> dict[RunShape, dict[str, StageFile]]:
    newest: dict[RunShape, dict[str, StageFile]] = {}
    for file in files:
        header = file.header
        if header.saved_us > at_us or (plan is not None and header.shape.plan != plan):
            continue
        of_shape = newest.setdefault(header.shape, {})
        # Of two files of the same moment, more steps win; then the name, so that all nodes choose alike.
        of_shape[header.stage] = max(
            of_shape.get(header.stage, file),
            file,
            key=lambda each: (each.header.saved_us, each.header.version, each.named.who),
        )
    return newest


def _order(found: Mapping[str, StageFile]) -> tuple[int, int, int]:
    times = [file.header.saved_us for file in found.values()]
    return min(times), max(times), sum(file.header.version for file in found.values())


def _openable(names: Iterable[StageName]) -> Iterable[StageFile]:
    for named in names:
        try:
            yield StageFile(named, peek(named))
        except CheckpointError as error:
            logger.warning("%s; going on without it", error)


def _is_whole(file: StageFile) -> bool:
    try:
        return file.read().header == file.header
    except CheckpointError as error:
        logger.warning("%s; going on to the one before it", error)
        return False


def _none(folder: Path, files: list[StageFile], at_us: int, plan: StagePlan | None, stages: Collection[str]) -> str:
    """The error message that names what is missing."""
    moment = format_time_us(at_us)
    if not files:
        return (
            f"expected checkpoints of {', '.join(stages) or 'all stages'} in {folder}, found no whole one; check the "
            "folder and run_id"
        )
    fitting = [file for file in files if plan is None or file.header.shape.plan == plan]
    if not fitting:
        return (
            f"{folder}: expected checkpoints of the run's architecture and cut, found {len(files)} of others; "
            "check model and swarm.num_stages"
        )
    newest = _newest_by_shape(fitting, at_us, plan)
    if not newest:
        oldest = min(file.header.saved_us for file in fitting)
        return f"{folder}: expected checkpoints at or before {moment}, found none before {format_time_us(oldest)}"
    shape, found = max(newest.items(), key=lambda pair: (len(pair[1]), _order(pair[1])))
    missing = [name for name in _wanted(shape, stages) if name not in found]
    times = [file.header.saved_us for file in fitting if file.header.stage in missing]
    oldest_of_them = f" (the oldest is of {format_time_us(min(times))})" if times else ""
    return (
        f"{folder}: expected a whole checkpoint of every stage at or before {moment}, found none of "
        f"{', '.join(missing)}{oldest_of_them}; name a later time, or copy the files of the machine that "
        "holds it here"
    )


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A whole model; a subspace network stays one until it is exported."""

    shape: RunShape
    state: Mapping[str, Tensor]  # For `Transformer.load_state_dict`.

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.shape.config


def assemble(found: StageSet) -> WholeModel:
    """Reads the files of a set and merges their parameters.

    Raises `CheckpointMismatchError`: a stage has other parameters than its cut; `CorruptCheckpointError`: a file was
    damaged or removed since it was chosen.
    """
    shape = found.shape
    plan = shape.plan
    state: dict[str, Tensor] = {}
    for name, file in found.files.items():
        parameters = file.read().state.parameters
        wrong = _differences(parameters, stage_shapes(plan, name))
        if wrong:
            raise CheckpointMismatchError(
                f"{file.named.path}: expected the parameters of {name} of {shape.run_id}, found {wrong}"
            )
        state.update(parameters)
    return WholeModel(shape, state)


def _differences(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describes how a state differs from these names and shapes; empty if it does not."""
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    if missing or unknown:
        return f"missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}"
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            return f"{name} of shape {tuple(state[name].shape)} in the place of {shape}"
    return ""


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
    one of them goes back alone. Raises `CheckpointError`: there is no such set, workers are running, or files cannot be
    moved; only in the last case may some have been moved.
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
