"""Which of several data-parallel ranks this process is, and libraries that would deal its batches out once more.

Ranks that share a node id deal that node's windows out among themselves (`loader.stream.schedule.rows_of_rank`), which
takes two numbers and no communication. Who gives neither number reads alone. Strangers, who cannot number themselves,
keep node ids of their own instead.

accelerate splits what any `IterableDataset` yields among its processes: its dispatcher reads the first rank's dataset
only, its `IterableDatasetShard` keeps one of ``world_size`` batches of each. Either loses the other ranks' windows
without a word, so both are errors here. They are found by the frames that ask for the iterator: accelerate
tells a dataset nothing. That costs 1 µs an iteration, and nothing where accelerate was not imported.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Final, Literal

from loader.errors import LoaderUsageError

_ACCELERATE: Final = "accelerate.data_loader"
_LAUNCHERS: Final = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables of launchers that start several processes, but do not number them as torch has it."""


def resolve_ranks(rank: int | Literal["auto"] | None, world_size: int | None) -> tuple[int, int]:
    """The rank of this process and the number of ranks.

    Args:
        rank: a number; ``auto`` for torch.distributed's if it is initialised (accelerate and Lightning do so), else
            torchrun's ``RANK`` and ``WORLD_SIZE``, else one rank; None for one rank.
        world_size: with a number.

    Raises:
        LoaderUsageError: one of them is missing, or ``auto`` finds other processes and no rank.
    """
    if rank == "auto":
        if world_size is not None:
            raise LoaderUsageError(f"expected rank='auto' or world_size, found both (world_size={world_size})")
        return _found_ranks()
    if (rank is None) != (world_size is None):
        raise LoaderUsageError(
            f"expected both rank and world_size, found rank={rank!r} and world_size={world_size!r}; rank='auto' takes "
            "them from torch.distributed"
        )
    if isinstance(rank, str):
        raise LoaderUsageError(f"rank: expected a number or 'auto', found {rank!r}")
    return (0, 1) if rank is None or world_size is None else (rank, world_size)


def check_not_dispatched(world_size: int) -> None:
    """Checks that accelerate does not split the batches of a dataset among processes, whoever asks for its iterator.

    Args:
        world_size: ranks that the dataset deals its windows out to.

    Raises:
        LoaderUsageError: it does.
    """
    if _ACCELERATE not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _ACCELERATE:
            _check_accelerate(frame.f_locals.get("self"), world_size)
        frame = frame.f_back


def _found_ranks() -> tuple[int, int]:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if found[0] is not None and found[1] is not None:
        try:
            return int(found[0]), int(found[1])
        except ValueError:
            raise LoaderUsageError(
                f"rank='auto': expected numbers in RANK and WORLD_SIZE, found {found[0]!r} and {found[1]!r}"
            ) from None
    for name in _LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            raise LoaderUsageError(
                f"rank='auto': expected torch.distributed to be initialised, since {name} is {os.environ[name]}, found "
                "it is not; initialise it first, or give rank= and world_size="
            )
    return 0, 1


def _check_accelerate(caller: object, world_size: int) -> None:
    name = type(caller).__name__
    if name == "DataLoaderDispatcher":
        processes = getattr(getattr(caller, "state", None), "num_processes", 1)
        problem = "reads the first rank's dataset only and sends its batches to all"
    elif name == "IterableDatasetShard" and world_size > 1:
        processes = getattr(caller, "num_processes", 1)
        problem = f"drops all but one of {processes} of each rank's batches"
    else:
        return
    if processes > 1:
        raise LoaderUsageError(
            f"expected each of {processes} ranks to iterate over its own GenesisDataset(..., rank='auto'), found "
            f"accelerate's {name}, which {problem}; leave the data loader out of accelerator.prepare() and move its "
            "batches to accelerator.device"
        )
