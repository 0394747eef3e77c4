"""Bytes between the ranks of a torch process group: to each its own, or the same from everybody.

A round needs two calls: ``all_to_all_single`` with uneven splits, and ``all_gather``. gloo and NCCL have both (gloo
checked with torch 2.13), and nothing is pickled. A group cannot lose a member: if a rank dies or falls silent, the
others get :class:`~trainer.errors.PeerUnavailableError` within the group's timeout (``init_process_group``), and the
job has to be started again, as torchrun does.
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
        group: the ranks; None for all.

    Raises:
        TrainerUsageError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise TrainerUsageError("expected a process group, found none: start the ranks with torchrun")
        self._group = group
        needs_cuda = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if needs_cuda else torch.device("cpu")

    @property
    def rank(self) -> int:
        """This process in the group."""
        return dist.get_rank(self._group)

    @property
    def num_ranks(self) -> int:
        """Processes in the group."""
        return dist.get_world_size(self._group)

    def exchange(self, outgoing: Sequence[Buffer], incoming_bytes: int) -> list[memoryview]:
        """Sends each rank its own bytes and receives from each what it has for this one.

        Args:
            outgoing: for each rank.
            incoming_bytes: size of what each rank has for this one, the same for all.

        Returns:
            The bytes from each rank.

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
            return self._by_rank(received, incoming_bytes)

    def gather(self, own: Buffer, size_bytes: int) -> list[memoryview]:
        """Receives every rank's bytes.

        Args:
            own: this rank's, up to ``size_bytes``.
            size_bytes: size that each rank's bytes are padded to with zeros.

        Returns:
            The bytes from each rank, ``size_bytes`` long.

        Raises:
            PeerUnavailableError: a rank is gone.
        """
        padded = torch.zeros(size_bytes, dtype=torch.uint8)
        padded.numpy()[: memoryview(own).nbytes] = _bytes(own)
        received = torch.empty(self.num_ranks * size_bytes, dtype=torch.uint8, device=self._device)
        rows = list(received.view(self.num_ranks, size_bytes).unbind(0))
        with _rank_errors():
            dist.all_gather(rows, padded.to(self._device), group=self._group)
            return self._by_rank(received, size_bytes)

    def _by_rank(self, received: Tensor, size_bytes: int) -> list[memoryview]:
        view = received.cpu().numpy().data
        return [view[rank * size_bytes : (rank + 1) * size_bytes] for rank in range(self.num_ranks)]


def _bytes(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview(buffer), dtype=np.uint8)


@contextmanager
def _rank_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what every backend raises, DistBackendError included
        raise PeerUnavailableError(
            f"a rank of the process group is gone or silent; start the job again from its checkpoints: {error}"
        ) from error
