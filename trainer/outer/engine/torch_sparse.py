"""A round of sparse contributions inside a trusted cluster: every rank's encoding goes to all ranks.

Headers are compared, then one all-gather; every rank decodes all contributions and aggregates them in the order of the
ranks, so all end bit for bit alike. A rank sends n − 1 contributions of 0.17 bits a parameter (for four: half a bit, of
which a dense int8 round sends 12). Rules and report are those of sparse rounds among strangers.
"""

from __future__ import annotations

import hashlib
import logging
import time

import torch
from torch import Tensor

from trainer.aggregation import DEFAULT_MAX_RATIO, RuleConfig, cap_weights, common_progress, contribution_weight
from trainer.aggregation.sparse import SPARSE_RULE, Averaging, SparseOutcome, SparseVector, aggregate_sparse
from trainer.compression.sparse import SPARSE
from trainer.errors import CodecError, RoundFailedError
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult, member_findings
from trainer.outer.engine.torch_collective import HEADER, RankedBytes, RankHeader, same_at_all_ranks

logger = logging.getLogger(__name__)


class SparseTorchCollective:
    """Aggregates over the ranks of the default process group; as `TorchCollective`, for vectors in chunk order."""

    def __init__(
        self, rule: RuleConfig, averaging: Averaging = "replicas", max_weight_ratio: float = DEFAULT_MAX_RATIO
    ) -> None:
        self._ranks = RankedBytes()
        self._rule = rule
        self._averaging = averaging
        self._max_weight_ratio = max_weight_ratio

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Goes through one round with all ranks; see :class:`~trainer.outer.engine.collective.Collective`.

        Raises:
            RoundFailedError: the ranks are not at the same round or state, or nothing can be aggregated; all raise it.
            PeerUnavailableError: a rank is gone, and with it the group.
        """
        started_s = time.monotonic()
        contribution.wait_until_filled()
        carried = contribution.vector
        if contribution.residual is not None:
            carried = carried + contribution.residual
        num_values = carried.numel()
        usable = True
        try:
            payload = bytes(SPARSE.encode(carried))
        except CodecError as error:
            logger.warning("round %d: this rank contributes nothing: %s", contribution.round_index, error)
            payload, usable = bytes(SPARSE.encode(torch.zeros(num_values))), False
        headers = self._agree(contribution, usable)
        weights = cap_weights(
            [contribution_weight(header.num_batches, header.age_s) if header.usable else 0.0 for header in headers],
            self._max_weight_ratio,
        )
        pieces = self._ranks.gather(payload, len(payload))
        found = [
            SPARSE.decode_sparse(piece, num_values) if header.usable else None
            for piece, header in zip(pieces, headers, strict=True)
        ]
        outcome = aggregate_sparse(found, weights, self._rule, self._averaging)
        return RoundResult(
            vector=outcome.vector,
            residual=self._residual(contribution, carried, found[self._ranks.rank], outcome),
            progress=common_progress([header.progress for header in headers], weights),
            report=self._report(contribution, weights, outcome, len(payload), time.monotonic() - started_s),
        )

    def requested(self) -> bool:
        """Returns False: ranks take equally many steps, and meet by themselves."""
        return False

    def close(self) -> None:
        """Does nothing: the process group belongs to its creator."""

    def _agree(self, contribution: Contribution, usable: bool) -> list[RankHeader]:
        terms = f"{contribution.state_digest}|sparse|{self._averaging}|{self._rule}|{self._max_weight_ratio}"
        own = HEADER.pack(
            contribution.round_index,
            contribution.vector.numel(),
            contribution.num_batches,
            contribution.age_s,
            contribution.progress,
            usable,
            hashlib.sha256(terms.encode()).digest(),
        )
        headers = same_at_all_ranks([RankHeader(*HEADER.unpack(each)) for each in self._ranks.gather(own, HEADER.size)])
        if not any(header.usable for header in headers):
            raise RoundFailedError("expected a usable contribution of some rank, found none; see the ranks' logs")
        return headers

    def _residual(
        self, contribution: Contribution, carried: Tensor, sent: SparseVector | None, outcome: SparseOutcome
    ) -> Tensor | None:
        """What was not sent waits; what the others found odd does not, or it would be sent again."""
        if sent is None:
            return contribution.residual
        if self._ranks.rank in outcome.decision.excluded:
            return contribution.residual if not contribution.num_batches else None
        residual = carried.clone() if carried is contribution.vector else carried
        sent.subtract_from(residual)
        return residual

    def _report(
        self, contribution: Contribution, weights: list[float], outcome: SparseOutcome, size_bytes: int, seconds: float
    ) -> RoundReport:
        names = [f"rank {rank}" for rank in range(self._ranks.num_ranks)]
        excluded = outcome.decision.excluded
        included = [rank for rank in range(self._ranks.num_ranks) if rank not in excluded]
        findings = member_findings(outcome.decision.findings, names)
        return RoundReport(
            round_index=contribution.round_index,
            members=tuple(names[rank] for rank in included),
            dropped=tuple((names[rank], reason) for rank, reason in sorted(excluded.items())),
            completeness=len(included) / self._ranks.num_ranks,
            sent_bytes=size_bytes * (self._ranks.num_ranks - 1),
            received_bytes=size_bytes * (self._ranks.num_ranks - 1),
            seconds=seconds,
            rule=SPARSE_RULE,
            weights=tuple(weights[rank] for rank in included),
            validation=tuple((finding.member, finding.reason) for finding in findings if finding.reason),
            findings=findings,
            note=outcome.decision.note,
            num_values=contribution.vector.numel(),
        )
