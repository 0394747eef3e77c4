"""A round inside a trusted cluster: the ranks of a torch process group, each reducing one slice.

Headers are compared, slices exchanged all to all, each rank reduces its own with the configured rule, and the encoded
results go to all ranks, which take what they decode to: all end bit-identical under any codec. A rank sends
``2·(n−1)/n`` vectors, as in an all-reduce, but the rule sees single contributions, and all ranks leave out the same
ones. Rules and report are those of the rounds among strangers. A rank that dies ends the job.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Buffer

from trainer.aggregation import (
    DEFAULT_MAX_RATIO,
    Moments,
    RuleConfig,
    RuleDecision,
    cap_weights,
    common_progress,
    contribution_weight,
    decide,
    moments,
    reduce_part,
)
from trainer.compression.vectors import BLOCK_VALUES, Codec
from trainer.errors import CodecError, PeerUnavailableError, RoundFailedError, TrainerError, TrainerUsageError
from trainer.outer.engine.collective import (
    Contribution,
    FollowingPhase,
    RoundReport,
    RoundResult,
    member_findings,
    reduce_each_phase,
)

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<QQQdd?32s")
"""Of a `RankHeader`."""
_OK, _FAILED = b"\x01", b"\x00"


@dataclass(frozen=True, slots=True)
class RankHeader:
    """What the ranks compare before any tensor moves."""

    round_index: int
    num_values: int
    num_batches: int
    age_s: float
    progress: float
    usable: bool
    terms: bytes


class TorchCollective:
    """Aggregates over the ranks of the default process group; for one thread at a time, all ranks in the same order.

    A rank weighs at most ``max_weight_ratio`` times the median rank.
    """

    def __init__(self, codec: Codec, rule: RuleConfig, max_weight_ratio: float = DEFAULT_MAX_RATIO) -> None:
        self._ranks = RankedBytes()
        self._codec = codec
        self._rule = rule
        self._max_weight_ratio = max_weight_ratio

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Goes through one round with all ranks; see :class:`~trainer.outer.engine.collective.Collective`.

        Raises:
            RoundFailedError: the ranks are not at the same round or state, or nothing can be aggregated; all raise it.
            PeerUnavailableError: a rank is gone, and with it the group.
        """
        started_s = time.monotonic()
        places = rank_slices(contribution.vector.numel(), self._ranks.num_ranks)
        own_place = places[self._ranks.rank]
        reference = contribution.reference[own_place]
        slices, residual, usable = self._encode(contribution, places)
        headers = self._agree(contribution, usable)
        weights = cap_weights(
            [contribution_weight(header.num_batches, header.age_s) if header.usable else 0.0 for header in headers],
            self._max_weight_ratio,
        )
        rows = self._exchange(slices, own_place.stop - own_place.start)
        decision = self._decide(rows, reference, weights)
        try:
            own = _OK + self._codec.encode(reduce_part(rows, weights, self._rule, decision, reference))
        except TrainerError as error:
            # The others wait for this rank's slice: they are told, and all ranks fail the round together.
            logger.warning("round %d: this rank cannot reduce its slice: %s", contribution.round_index, error)
            own = _FAILED
        return RoundResult(
            vector=self._collect(own, places),
            residual=residual,
            progress=common_progress([header.progress for header in headers], weights),
            report=self._report(contribution, places, weights, decision, time.monotonic() - started_s),
        )

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        """Goes through two rounds; see :class:`~trainer.outer.engine.collective.PhasedCollective`."""
        return reduce_each_phase(self, contribution, following)

    def requested(self) -> bool:
        """Returns False: ranks take equally many steps, and meet by themselves."""
        return False

    def close(self) -> None:
        """Does nothing: the process group belongs to its creator."""

    def _encode(
        self, contribution: Contribution, places: Sequence[slice]
    ) -> tuple[list[memoryview], Tensor | None, bool]:
        """A slice of vector plus residual for each rank, what encoding leaves out, and whether it counts.

        Zeros that do not count if it is not finite, so that no rank waits in vain.
        """
        carried = contribution.vector
        if contribution.residual is not None:
            carried = carried + contribution.residual
        is_lossless = self._codec.name == "fp32"
        try:
            slices = [self._codec.encode(carried[place]) for place in places]
        except CodecError as error:
            logger.warning("round %d: this rank contributes nothing: %s", contribution.round_index, error)
            zeros = torch.zeros_like(carried)
            slices = [self._codec.encode(zeros[place]) for place in places]
            return slices, None if is_lossless else contribution.residual, False
        if is_lossless:
            return slices, None, True
        residual = carried.clone()
        for place, piece in zip(places, slices, strict=True):
            residual[place].sub_(self._codec.decode(piece, place.stop - place.start))
        return slices, residual, True

    def _agree(self, contribution: Contribution, usable: bool) -> list[RankHeader]:
        """Returns the headers of all ranks; every rank sees the same, and fails if they differ."""
        terms = f"{contribution.state_digest}|{self._codec.name}|{self._rule}|{self._max_weight_ratio}"
        own = HEADER.pack(
            contribution.round_index,
            contribution.vector.numel(),
            contribution.num_batches,
            contribution.age_s,
            contribution.progress,
            usable,
            hashlib.sha256(terms.encode()).digest(),
        )
        return same_at_all_ranks([RankHeader(*HEADER.unpack(it)) for it in self._ranks.gather(own, HEADER.size)])

    def _exchange(self, slices: Sequence[memoryview], num_values: int) -> Tensor:
        """Returns all contributions to this rank's slice, fp32[n, values of the slice]."""
        pieces = self._ranks.exchange(slices, self._codec.encoded_bytes(num_values))
        rows = torch.empty(len(pieces), num_values)
        for row, piece in zip(rows, pieces, strict=True):
            self._codec.decode(piece, num_values, out=row)
        return rows

    def _decide(self, rows: Tensor, reference: Tensor, weights: Sequence[float]) -> RuleDecision:
        """Returns the same decision at every rank, from the moments of all slices added in the order of the ranks."""
        own = moments(rows, reference).to_bytes()
        found = [Moments.from_bytes(theirs, len(rows)) for theirs in self._ranks.gather(own, len(own))]
        decision = decide(reduce(add, found), weights, self._rule)
        if decision.rule_used == "none":
            raise RoundFailedError(f"expected a usable contribution of {len(rows)} ranks, found none: {decision.note}")
        return decision

    def _collect(self, own: bytes, places: Sequence[slice]) -> Tensor:
        """Returns the whole result, from all ranks' slices."""
        sizes = [len(_OK) + self._codec.encoded_bytes(place.stop - place.start) for place in places]
        pieces = self._ranks.gather(own, max(sizes))
        failed = [rank for rank, piece in enumerate(pieces) if bytes(piece[:1]) != _OK]
        if failed:
            raise RoundFailedError(f"expected a result from every rank, found none from rank {failed[0]}; see its log")
        vector = torch.empty(places[-1].stop)
        for place, size, piece in zip(places, sizes, pieces, strict=True):
            self._codec.decode(piece[len(_OK) : size], place.stop - place.start, out=vector[place])
        return vector

    def _report(
        self,
        contribution: Contribution,
        places: Sequence[slice],
        weights: Sequence[float],
        decision: RuleDecision,
        seconds: float,
    ) -> RoundReport:
        slice_bytes = [self._codec.encoded_bytes(place.stop - place.start) for place in places]
        own_bytes, num_others = slice_bytes[self._ranks.rank], self._ranks.num_ranks - 1
        others_bytes = sum(slice_bytes) - own_bytes
        names = [f"rank {rank}" for rank in range(self._ranks.num_ranks)]
        included = [rank for rank in range(self._ranks.num_ranks) if rank not in decision.excluded]
        findings = member_findings(decision.findings, names)
        return RoundReport(
            round_index=contribution.round_index,
            members=tuple(names[rank] for rank in included),
            dropped=tuple((names[rank], reason) for rank, reason in sorted(decision.excluded.items())),
            completeness=len(included) / self._ranks.num_ranks,
            sent_bytes=others_bytes + own_bytes * num_others,
            received_bytes=own_bytes * num_others + others_bytes,
            seconds=seconds,
            rule=decision.rule_used,
            weights=tuple(weights[rank] for rank in included),
            validation=tuple((finding.member, finding.reason) for finding in findings if finding.reason),
            findings=findings,
            note=decision.note,
            num_values=contribution.vector.numel(),
        )


def same_at_all_ranks(headers: list[RankHeader]) -> list[RankHeader]:
    """Returns the headers; raises RoundFailedError, at all ranks alike, if they are of different rounds or states."""
    for field in ("round_index", "num_values", "terms"):
        values = [getattr(header, field) for header in headers]
        if len(set(values)) > 1:
            what = "state, rule or codec" if field == "terms" else field
            found = [value.hex()[:12] if isinstance(value, bytes) else value for value in values]
            raise RoundFailedError(f"expected one {what} at all ranks, found {found}; restart from one checkpoint")
    return headers


def rank_slices(num_values: int, num_ranks: int) -> list[slice]:
    """Cuts a vector into a slice a rank at the borders of codec blocks; sizes differ by one block at most."""
    num_blocks = -(-num_values // BLOCK_VALUES)
    borders = [min(num_values, BLOCK_VALUES * (rank * num_blocks // num_ranks)) for rank in range(num_ranks)]
    return [slice(start, stop) for start, stop in zip(borders, [*borders[1:], num_values], strict=True)]


class RankedBytes:
    """Sends and receives bytes in a process group (None: of all ranks), without pickling; gloo and NCCL.

    A group cannot lose a member: if a rank dies or falls silent, the others get `PeerUnavailableError` within the
    group's timeout (``init_process_group``), and the job has to be started again, as torchrun does.

    Raises:
        TrainerUsageError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise TrainerUsageError("expected a process group, found none: start the ranks with torchrun")
        self._group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        needs_cuda = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if needs_cuda else torch.device("cpu")

    def exchange(self, outgoing: Sequence[Buffer], incoming_bytes: int) -> list[memoryview]:
        """Sends each rank its own bytes; returns what each has for this one, ``incoming_bytes`` of each."""
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
        """Sends this rank's bytes to all; returns each rank's, padded to ``size_bytes`` with zeros."""
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
