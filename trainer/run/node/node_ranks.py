"""The processes that torchrun started as one node: rank 0 decides, the others do as they are told.

Whatever changes what a node computes is told by rank 0 over a process group of its own (gloo), in the order in which it
happens; so no two ranks ever wait for each other in different places. A rank that is told nothing for too long, or
whose connection to rank 0 breaks, raises `PeerUnavailableError`. torchrun then starts all ranks again, and they go on
from the checkpoint.

Vectors (DiLoCo's, a checkpoint's) are in rank 0's host memory only. Each rank of its machine maps them while they are
filled or read, and copies its own part: of FSDP's shards its rows, of DDP's replicas an equal stretch. Further machines
hold copies of the first one's ranks, and get their values from those through the process group.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.errors import PeerUnavailableError, TrainerUsageError
from trainer.inner import use_device
from trainer.inner.parallel import local_part
from trainer.inner.rank_place import RankPlace
from trainer.network.discovery.parent import die_with_parent
from trainer.outer.diloco import FlatLayout
from trainer.outer.diloco.access import HostSnapshot, Merge, Snapshot, merge_into
from trainer.run.config import RunConfig
from trainer.run.node.lent_memory import Loan, borrowed, lent
from trainer.run.node.process_group import join_process_group
from trainer.run.node.training import FIRST_STATE_S

logger = logging.getLogger(__name__)

_WAITS_IN_A_ROW: Final = 6
"""Rank 0 may fetch the others' state five times, and take part in a round, before it tells the ranks anything; at the
beginning it may wait for their first state besides."""
_SLACK_S: Final = 600.0


class Told(IntEnum):
    """What rank 0 tells the other ranks to do."""

    BEGIN = 1  # With the configuration, and how the model is shared.
    BUILD = 2
    STEP = 3
    SET_STEP = 4
    FILL = 5  # Their part of a vector.
    TAKE = 6  # Their part of a vector.
    LOAD = 7  # The optimizer's state, but for its tensors.
    LIMIT_IDS = 8
    READ_FROM = 9  # A state of the loader.
    FORWARD = 10  # A pass without gradients, with the shapes of its inputs, which follow.
    STOP = 11
    CONFIGURE = 12  # With the options of the inner loop from now on.


@dataclass(frozen=True, slots=True)
class Message:
    """What rank 0 tells, and its details, plain JSON values."""

    told: Told
    details: Mapping[str, Any]


class NodeRanks:
    """This process among its node's."""

    def __init__(self, place: RankPlace, control: dist.ProcessGroup, copies: dist.ProcessGroup | None) -> None:
        self.place = place
        self._control = control
        self._copies = copies
        """The ranks of all machines that hold the same part of the model; None on one machine."""

    def tell(self, told: Told, **details: Any) -> None:
        """Tells the other ranks what to do; for rank 0."""
        payload = json.dumps(details).encode() if details else b""
        dist.broadcast(torch.tensor([told, len(payload)]), src=0, group=self._control)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0, group=self._control)

    def send(self, ids: Tensor) -> None:
        """Gives the other ranks int64 values, for which they `receive`; for rank 0."""
        dist.broadcast(ids.cpu().contiguous(), src=0, group=self._control)

    def receive(self, shape: Sequence[int]) -> Tensor:
        """Returns the values of this shape that rank 0 sends."""
        ids = torch.empty(tuple(shape), dtype=torch.int64)
        dist.broadcast(ids, src=0, group=self._control)
        return ids

    def stop(self) -> None:
        """Ends the other ranks, and waits until each has heard it; for rank 0."""
        self.tell(Told.STOP)
        dist.barrier(self._control)

    def heard(self) -> Message:
        """Waits for what rank 0 tells; raises `PeerUnavailableError` where it is gone or silent."""
        head = torch.zeros(2, dtype=torch.int64)
        try:
            dist.broadcast(head, src=0, group=self._control)
            told, size = head.tolist()
            payload = torch.zeros(size, dtype=torch.uint8)
            if size:
                dist.broadcast(payload, src=0, group=self._control)
        except RuntimeError as error:
            text = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise PeerUnavailableError(
                f"rank {self.place.rank} has lost rank 0 of its node, and ends; torchrun --max-restarts N starts the "
                f"node again from its checkpoint: {text}"
            ) from error
        if told == Told.STOP:
            dist.barrier(self._control)
        return Message(Told(told), json.loads(bytes(payload.numpy())) if size else {})

    def filled(self, layout: FlatLayout, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns a vector of what all ranks hold of these tensors; for rank 0."""
        with lent(layout.num_values) as (vector, loan):
            self.tell(Told.FILL, names=list(layout.names), loan=_numbers(loan))
            self._fill(vector, layout, tensors)
            return_freed_memory()
            dist.barrier(self._control)
        return vector

    def take(self, layout: FlatLayout, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Gives all ranks the values of these tensors; for rank 0, which has the values by name, or as a vector."""
        with lent(layout.num_values) as (vector, loan), torch.no_grad():
            for name, shape, where in layout.slices():
                vector[where].view(shape).copy_(values[name])
            self._hand_out(vector, loan, layout, tensors, 0.0)

    def lend_ahead(self, layout: FlatLayout, values: Tensor, tensors: Mapping[str, Tensor]) -> Merge:
        """Puts a vector where all ranks can read it, in any thread; what it returns merges it, for rank 0 (`Merge`)."""
        memory = ExitStack()
        vector, loan = memory.enter_context(lent(layout.num_values))
        vector.copy_(values)

        def merge(keep: float) -> None:
            with memory:
                self._hand_out(vector, loan, layout, tensors, keep)

        return merge

    def _hand_out(
        self, vector: Tensor, loan: Loan, layout: FlatLayout, tensors: Mapping[str, Tensor], keep: float
    ) -> None:
        self.tell(Told.TAKE, names=list(layout.names), loan=_numbers(loan), keep=keep)
        self._take(vector, layout, tensors, keep)
        return_freed_memory()
        dist.barrier(self._control)

    def follow_vector(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Does this rank's part of `filled` or `take`."""
        layout = FlatLayout.of({name: tensors[name] for name in message.details["names"]})
        vector = borrowed(Loan(*message.details["loan"])) if self.place.is_on_first_host else None
        if message.told is Told.TAKE:
            self._take(vector, layout, tensors, message.details["keep"])
        elif vector is not None:
            self._fill(vector, layout, tensors)
        return_freed_memory()
        dist.barrier(self._control)

    @torch.no_grad()
    def _fill(self, vector: Tensor, layout: FlatLayout, tensors: Mapping[str, Tensor]) -> None:
        for name, _, where in layout.slices():
            start, part = self._own_stretch(tensors[name], where, layout.num_values)
            vector[start : start + part.numel()].copy_(part)

    @torch.no_grad()
    def _take(self, vector: Tensor | None, layout: FlatLayout, tensors: Mapping[str, Tensor], keep: float) -> None:
        for name, _, where in layout.slices():
            part = local_part(tensors[name])
            if vector is not None:
                start = where.start + self._first_value(tensors[name])
                merge_into(part, vector[start : start + part.numel()].view(part.shape).to(part.device), keep)
            if self._copies is not None:
                dist.broadcast(part, group_src=0, group=self._copies)

    def _own_stretch(self, tensor: Tensor, where: slice, num_values: int) -> tuple[int, Tensor]:
        """Returns where this rank's part of a tensor begins in a vector, and its values, flat."""
        flat = local_part(tensor).reshape(-1)
        if isinstance(tensor, DTensor):
            return where.start + self._first_value(tensor), flat
        begin, end = (num_values * (self.place.local_rank + more) // self.place.local_size for more in (0, 1))
        start, stop = max(begin, where.start), min(end, where.stop)
        return start, flat[max(0, start - where.start) : max(0, stop - where.start)]

    def _first_value(self, tensor: Tensor) -> int:
        """Returns which value of a tensor is the first of this rank's part: FSDP cuts rows into equal shards."""
        if not isinstance(tensor, DTensor):
            return 0
        rows = tensor.shape[0]
        first_row = min(rows, self.place.local_rank * -(-rows // self.place.local_size))
        return first_row * (tensor.numel() // rows)


class RankParameters:
    """The parameters of a model whose parts are at all ranks, as DiLoCo reads and sets them; for rank 0.

    See `trainer.outer.diloco.access.ParameterAccess`. Each rank reads and merges its own part.
    """

    def __init__(self, ranks: NodeRanks, tensors: Mapping[str, Tensor]) -> None:
        self._ranks = ranks
        self._tensors = tensors

    def gather(self, layout: FlatLayout) -> Tensor:
        """See `ParameterAccess`."""
        return self._ranks.filled(layout, self._tensors)

    def scatter(self, layout: FlatLayout, vector: Tensor) -> None:
        """See `ParameterAccess`."""
        values = {name: vector[where].view(shape) for name, shape, where in layout.slices()}
        self._ranks.take(layout, values, self._tensors)

    def snapshot(self, layout: FlatLayout) -> Snapshot:
        """See `ParameterAccess`."""
        return HostSnapshot(self._ranks.filled(layout, self._tensors))

    def prepare_merge(self, layout: FlatLayout, values: Tensor) -> Merge:
        """See `ParameterAccess`."""
        return self._ranks.lend_ahead(layout, values, self._tensors)


def return_freed_memory() -> None:
    """Has glibc give the system what this process has freed; elsewhere nothing.

    By itself it keeps tensors of up to 32 MB for later ones. Each rank gathers blocks and begins with a model for
    itself, and a round or a checkpoint comes on top of what is kept of that: on a CPU a third of a node's memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _numbers(loan: Loan) -> list[int]:
    return [loan.pid, loan.descriptor, loan.num_values]


def longest_silence_s(config: RunConfig) -> float:
    """Returns for how long rank 0 may have nothing to tell; a rank that hears nothing for longer has lost it."""
    return FIRST_STATE_S + _WAITS_IN_A_ROW * (config.collective.round_timeout_s + _SLACK_S)


@contextmanager
def joined_node(config: RunConfig) -> Iterator[NodeRanks]:
    """Joins this node's other processes, which torchrun started with this one, for as long as the node runs."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = RankPlace(*(int(os.environ.get(name, "-1")) for name in names))
    if min(place.rank, place.local_rank) < 0 or place.local_size < 1 or place.size % place.local_size:
        raise TrainerUsageError(
            f"expected torchrun to start equally many ranks on each machine, found {place.size} ranks, "
            f"{place.local_size} here; take one --nproc-per-node for all"
        )
    if config.device.startswith("cuda:"):
        raise TrainerUsageError(f"device: expected auto or cuda for a node of several ranks, found {config.device}")
    die_with_parent(signal.SIGTERM)  # A killed torchrun can no longer end its ranks: rank 0 saves, and ends them.
    device = use_device(config.device)
    try:
        # Between two steps a rank may wait for its data.
        together = timedelta(seconds=config.data.timeout_s + _SLACK_S)
        join_process_group(device, together)
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest_silence_s(config)))
        copies = _copies_of_one_part(place, together) if place.num_hosts > 1 else None
    except (RuntimeError, ValueError) as error:
        raise TrainerUsageError(f"the node's ranks cannot find each other: {error}") from error
    try:
        yield NodeRanks(place, control, copies)
    finally:
        dist.destroy_process_group()


def _copies_of_one_part(place: RankPlace, timeout: timedelta) -> dist.ProcessGroup | None:
    own = None
    for local_rank in range(place.local_size):
        members = list(range(local_rank, place.size, place.local_size))
        group = dist.new_group(members, timeout=timeout)
        own = group if local_rank == place.local_rank else own
    return own
