"""From sums over slices to what the rules, and the report, say of each member."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from trainer.aggregation import Moments, RuleConfig, validate
from trainer.collective.messages import Agreement, Why, short
from trainer.outer.engine.collective import MemberFinding

__all__ = ["add_sums", "findings_of", "measured_of", "weights_of"]


def add_sums(sums: Sequence[Moments]) -> Moments:
    """All of them added in the order given: the same numbers wherever the same sums are added."""
    return reduce(add, sums)


def weights_of(agreement: Agreement) -> list[float]:
    """The members' weights, in their order."""
    return [member.weight for member in agreement.members]


def findings_of(agreement: Agreement, sums: Sequence[Moments], rule: RuleConfig) -> tuple[Why, ...]:
    """What gradient validation (spec T-20) says of whole contributions; nothing where there are no sums."""
    usable = [one for one in sums if one.num_members == len(agreement.members)]
    if rule.validation == "off" or not usable:
        return ()
    return tuple(
        Why(peer_id=agreement.peer_ids[finding.member], reason=short(finding.reason))
        for finding in validate(add_sums(usable), rule, weights_of(agreement))
        if not finding.passed
    )


def measured_of(agreement: Agreement, sums: Sequence[Moments], rule: RuleConfig) -> tuple[MemberFinding, ...]:
    """What this node's own sums say of each member; nothing where there are none.

    Args:
        agreement: of the round.
        sums: over the slices this node has reduced, or, of rules that look at whole vectors, over all.
        rule: of the run.
    """
    if rule.validation == "off" or not sums:
        return ()
    return tuple(
        MemberFinding(
            member=agreement.peer_ids[finding.member],
            reason="" if finding.passed else finding.reason,
            cosine=finding.cosine,
            norm_ratio=finding.norm_ratio,
        )
        for finding in validate(add_sums(sums), rule, weights_of(agreement))
    )
