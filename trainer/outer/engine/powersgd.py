"""`PowerSgdCollective`: rounds in which matrices travel as two thin factors (`trainer.compression.powersgd`).

    collective = PowerSgdCollective(peer_collective, lambda round_index: layout.shapes)
    result = collective.reduce(contribution)          # as any collective; P in the first phase, Q in the second

It is a function of its argument, as every collective: what a member keeps for itself (error feedback) travels as the
residual of contribution and result, and what all members share (the Q that the next round begins with) as their basis.
A round that fails in either phase leaves both as they were, because it returns neither; a strategy that takes up the
state of another member takes its basis and drops its own residual. The basis counts for the state digest: a joiner
without it is told to fetch the state, as with any other difference.

Rules and validation apply to P and to Q as to any vector. P is orthonormal in the second phase, so distances, norms and
cosines between members' Q are those of their gradients in the space that P spans, and a rule does there what it does to
plain vectors. In the first phase a liar can only turn that space: what the honest have outside of it stays in their
residuals. So no rule is refused. What is refused, by those who configure it, is averaging parameters this way: a weight
matrix is no change of low rank, and would be replaced by its projection.

The price is a second exchange, and the processor time of four products of each matrix with a thin one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.compression.powersgd import (
    DEFAULT_RANK,
    LowRankPlan,
    compress_p,
    compress_q,
    decompress,
    left_out,
    low_rank_plan,
    orthonormalise,
)
from trainer.errors import RoundFailedError, TrainerUsageError
from trainer.outer.engine.collective import Collective, Contribution, PhasedCollective, RoundResult
from trainer.outer.engine.daemon_call import start_daemon

ShapesOfRound = Callable[[int], Sequence[Sequence[int]]]
"""Shapes of the tensors that a round's vector consists of, in its order; by the round's number."""


def with_powersgd(collective: Collective, shapes: ShapesOfRound, rank: int) -> Collective:
    """Returns a collective whose matrices travel as factors of this rank; the same collective for 0.

    Raises:
        TrainerUsageError: the collective has no rounds of two phases, or the rank is out of range.
    """
    return PowerSgdCollective(phased(collective), shapes, rank) if rank else collective


def phased(collective: Collective) -> PhasedCollective:
    """Returns a collective that has rounds of two phases; raises TrainerUsageError where it has not."""
    if not isinstance(collective, PhasedCollective):
        raise TrainerUsageError(
            f"collective.powersgd_rank: expected a collective with rounds of two phases, found "
            f"{type(collective).__name__}; set it to 0"
        )
    return collective


class PowerSgdCollective:
    """Another collective's rounds, with fewer bytes.

    Args:
        collective: whose members, rules and codec these are; the caller closes it by closing this one.
        shapes: they may grow between rounds; the basis then begins anew, at all members alike.
        rank: columns of the factors.
        seed: of the first directions; the same at all members.

    Raises:
        TrainerUsageError: the rank is out of range.
    """

    def __init__(
        self, collective: PhasedCollective, shapes: ShapesOfRound, rank: int = DEFAULT_RANK, seed: int = 0
    ) -> None:
        low_rank_plan((), rank)
        self._collective = collective
        self._shapes = shapes
        self._rank = rank
        self._seed = seed

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Takes part in one round; see `trainer.outer.engine.collective.Collective`.

        A contribution without batches counts for nothing, and leaves its residual as it was.

        Raises:
            RoundFailedError: also where P overflows; nothing happened.
            TrainerUsageError: the vector is not of the shapes of its round.
        """
        plan = self.plan_of(contribution.round_index)
        if contribution.vector.numel() != plan.num_values:
            raise TrainerUsageError(
                f"round {contribution.round_index}: expected {plan.num_values} values, as many as its tensors have, "
                f"found {contribution.vector.numel()}"
            )
        if not plan.matrices:
            return self._collective.reduce(contribution)
        factored = _FactoredRound.of(plan, contribution, self._seed)
        return factored.result(self._collective.reduce_in_phases(factored.first(), factored.second))

    def plan_of(self, round_index: int) -> LowRankPlan:
        """Returns how a round's vector is cut and factored."""
        return low_rank_plan(tuple(tuple(shape) for shape in self._shapes(round_index)), self._rank)

    def requested(self) -> bool:
        """See `trainer.outer.engine.collective.Collective`."""
        return self._collective.requested()

    def close(self) -> None:
        """See `trainer.outer.engine.collective.Collective`."""
        self._collective.close()


@dataclass(slots=True)
class _FactoredRound:
    """One round of one member, between its phases."""

    plan: LowRankPlan
    contribution: Contribution
    seed: int
    basis: Tensor | None
    digest: str  # Of the state, and of the basis.
    carried: Tensor = field(default_factory=lambda: torch.empty(0))  # [P] the vector, and what was left out before.
    p: Tensor = field(default_factory=lambda: torch.empty(0))  # Orthonormal.
    q: Tensor = field(default_factory=lambda: torch.empty(0))  # This member's own.

    @classmethod
    def of(cls, plan: LowRankPlan, contribution: Contribution, seed: int) -> _FactoredRound:
        basis = contribution.basis
        if basis is not None and basis.shape != (plan.num_basis,):
            basis = None  # Of a model that has grown since, at all members at once.
        digest = _digest([contribution.state_digest, plan.digest, seed], [] if basis is None else [basis])
        return cls(plan, contribution, seed, basis, digest)

    def first(self) -> Contribution:
        """The contribution of P; members may agree on the round before the vector is there that it is made of."""
        if self.contribution.filled is None:
            return self._phase(self._p(), self.digest)
        p = torch.empty(self.plan.num_p)
        filled = start_daemon(lambda: self._fill(p), "powersgd-factors")
        return self._phase(p, self.digest, filled)

    def _fill(self, p: Tensor) -> None:
        self.contribution.wait_until_filled()
        p.copy_(self._p())

    def _p(self) -> Tensor:
        round_index, residual = self.contribution.round_index, self.contribution.residual
        self.carried = self.contribution.vector if residual is None else self.contribution.vector + residual
        # A direction that brought nothing is replaced by another one each round.
        p = compress_p(self.plan, self.carried, self.basis, _round_seed(self.seed, round_index))
        if not bool(torch.isfinite(p).all()):
            raise RoundFailedError(f"round {round_index}: expected finite factors, found a vector too large for them")
        return p

    def second(self, agreed: RoundResult) -> Contribution:
        """The contribution of Q, once P is agreed."""
        self.p = orthonormalise(self.plan, agreed.vector)
        self.q = compress_q(self.plan, self.carried, self.p)
        return self._phase(self.q, _digest([self.digest], [agreed.vector]))

    def result(self, agreed: RoundResult) -> RoundResult:
        """The result of the round, once Q is agreed."""
        residual = self.contribution.residual
        if self.contribution.num_batches:
            sent = self.q if agreed.residual is None else self.q - agreed.residual
            residual = left_out(self.plan, self.carried, self.p, sent)
        return replace(
            agreed,
            report=replace(agreed.report, num_values=self.plan.num_values),
            vector=decompress(self.plan, self.p, agreed.vector),
            residual=residual,
            basis=self.plan.basis_of(agreed.vector),
        )

    def _phase(self, vector: Tensor, digest: str, filled: Future[None] | None = None) -> Contribution:
        # The last result is no reference for P, whose directions are others each round, nor bit for bit one for Q.
        return Contribution(
            round_index=self.contribution.round_index,
            vector=vector,
            num_batches=self.contribution.num_batches,
            age_s=self.contribution.age_s,
            progress=self.contribution.progress,
            reference=torch.zeros_like(vector),
            state_digest=digest,
            filled=filled,
        )


def _round_seed(seed: int, round_index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"powersgd {seed} {round_index}".encode()).digest()[:8], "little")


def _digest(facts: Sequence[str | int], tensors: Sequence[Tensor]) -> str:
    running = hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode())
    for tensor in tensors:
        running.update(tensor.contiguous().numpy().data)
    return running.hexdigest()
