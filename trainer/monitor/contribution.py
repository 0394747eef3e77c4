"""What a node has contributed: its own figures, and how much of that somebody else's word confirms.

A report is signed, so it is its node's; that does not make it true. Of a swarm's worker the account says how many
micro-batches drivers settled with it. What that many take by the model's arithmetic is *confirmed*; the rest is a
claim. Nothing confirms a node that holds a whole model, nor memory, bandwidth and version of any: the monitor says so.
The account lags behind by what is under way and not settled, and knows no worker that settled through a resolved lease:
a claim may exceed it by a tenth and 64 micro-batches before that is called a doubt.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Final

_SLACK_SHARE: Final = 0.1
_SLACK_MICRO_BATCHES: Final = 64
_MIN_WORKERS: Final = 3
"""Workers of a stage by whose median the FLOPs of a micro-batch are judged, where the run file does not tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one process says it has done since it became this incarnation."""

    incarnation: str
    stage: str = ""
    flops: float = 0.0
    micro_batches: int = 0

    @property
    def flops_per_micro_batch(self) -> float:
        """By its own word; 0: it says nothing."""
        return self.flops / self.micro_batches if self.micro_batches else 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """A claim beside what is known; ``doubts`` are lines for people."""

    confirmed_flops: float | None  # None: nothing says anything about it.
    doubts: tuple[str, ...] = ()


def usual_flops_per_micro_batch(claims: Collection[Claim]) -> float | None:
    """Returns what most workers of a stage say that a micro-batch takes there; None: too few say anything."""
    said = [claim.flops_per_micro_batch for claim in claims if claim.micro_batches]
    return median(said) if len(said) >= _MIN_WORKERS else None


def check(claim: Claim, counted: int | None, flops_per_micro_batch: float | None) -> Checked:
    """Compares a worker's claim with the account.

    Args:
        claim: what it says.
        counted: micro-batches that drivers settled with it; None: there is no account, or it does not know it.
        flops_per_micro_batch: in its stage, by the run file or by what most of its workers say; None: not known, then
            its own word is taken for that.
    """
    if counted is None:
        return Checked(None)
    doubts = []
    each = claim.flops_per_micro_batch
    if flops_per_micro_batch is not None:
        if claim.micro_batches and each > (1 + _SLACK_SHARE) * flops_per_micro_batch:
            doubts.append(f"claims {each:.3g} FLOPs a micro-batch where {flops_per_micro_batch:.3g} are usual")
        each = flops_per_micro_batch
    if claim.micro_batches > (1 + _SLACK_SHARE) * counted + _SLACK_MICRO_BATCHES:
        doubts.append(f"claims {claim.micro_batches:,} micro-batches, the account has {counted:,} of it")
    return Checked(min(claim.micro_batches, counted) * each, tuple(doubts))
