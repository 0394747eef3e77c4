"""Bytes between the ranks of a torch process group: to each its own, or the same from everybody.

Two calls are all a round needs: ``all_to_all_single`` with uneven splits, and ``all_gather``; gloo and NCCL have both
(gloo checked with torch 2.13). Nothing is pickled. A group cannot lose a member: when a rank dies or falls silent,
the others get :class:`~trainer.errors.PeerUnavailableError` within the group's timeout (``init_process_group``), and
the job has to be started again, as torchrun does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

from trainer.errors import PeerUnavailableError, TrainerUsageError

__all__ = ["RankedBytes"]


class RankedBytes:
    """Sends and receives bytes in a process group.

    Args:
        group: whose ranks; None for all.
        device: where the backend wants its tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> RankedBytes:
        """For a group, with tensors where its backend wants them.

        Raises:
            TrainerUsageError: there is no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise TrainerUsageError("expected a process group, found none: start the ranks with torchrun")
        needs_cuda = dist.get_backend(group) == "nccl"
        return cls(group, torch.device("cuda", torch.cuda.current_device()) if needs_cuda else torch.device("cpu"))

    @property
    def rank(self) -> int:
        """This process in the group."""
        return dist.get_rank(self._group)

    @property
    def num_ranks(self) -> int:
        """Processes in the group."""
        return dist.get_world_size(self._group)

    def exchange(self, outgoing: Sequence[Buffer], incoming_bytes: int) -> list[memoryview]:
        """Give each rank its own bytes, and get from each what it has for this one.

        Args:
            outgoing: for each rank.
            incoming_bytes: how many each rank has for this one; the same of all.

        Returns:
            From each rank.

        Raises:
            PeerUnavailableError: a rank is gone.
        """
        sizes = [memoryview(buffer).nbytes for buffer in outgoing]
        sent = torch.from_numpy(np.concatenate([_bytes(buffer) for buffer in outgoing]))
        received = torch.empty(self.num_ranks * incoming_bytes, dtype=torch.uint8, device=self._device)
        with _rank_errors():
            dist.all_to_all_single(
                received,
                sent.to(self._device),
                output_split_sizes=[incoming_bytes] * self.num_ranks,
                input_split_sizes=sizes,
                group=self._group,
            )
            view = _host_bytes(received)
        return [view[start : start + incoming_bytes] for start in _starts(incoming_bytes, self.num_ranks)]

    def gather(self, own: Buffer, size_bytes: int) -> list[memoryview]:
        """Get everybody's bytes.

        Args:
            own: this rank's, up to ``size_bytes``.
            size_bytes: what each rank's are filled up to with zeros.

        Returns:
            From each rank, ``size_bytes`` long.

        Raises:
            PeerUnavailableError: a rank is gone.
        """
        padded = torch.zeros(size_bytes, dtype=torch.uint8)
        padded.numpy()[: memoryview(own).nbytes] = _bytes(own)
        received = torch.empty(self.num_ranks * size_bytes, dtype=torch.uint8, device=self._device)
        rows = list(received.view(self.num_ranks, size_bytes).unbind(0))
        with _rank_errors():
            dist.all_gather(rows, padded.to(self._device), group=self._group)
            view = _host_bytes(received)
        return [view[start : start + size_bytes] for start in _starts(size_bytes, self.num_ranks)]


def _bytes(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


def _starts(size_bytes: int, count: int) -> range:
    return range(0, size_bytes * count, size_bytes) if size_bytes else range(count)


def _host_bytes(received: Tensor) -> memoryview:
    view: memoryview = received.cpu().numpy().data
    return view


@contextmanager
def _rank_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what every backend raises, DistBackendError included
        raise PeerUnavailableError(
            f"a rank of the process group is gone or silent; start the job again from its checkpoints: {error}"
        ) from error
