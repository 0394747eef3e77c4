"""The moments all-reduce: sums over slices brought together, and what rules decide on each member from them.

Every member receives all members' sums from the coordinator and adds them in one order, so all decide alike. The
coordinator only carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import add

from trainer.aggregation import Moments, RuleConfig, validate
from trainer.collective.messages import Agreement, MomentsReply, Why, short
from trainer.outer.engine.collective import MemberFinding

__all__ = ["MomentsAllReduce", "add_sums", "findings_of", "join_sums", "measured_of", "split_sums", "weights_of"]


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


class MomentsAllReduce:
    """One round's sums on the node that coordinates it.

    Args:
        expected: reducers whose sums are waited for.
        patience_s: how long after the first.
    """

    def __init__(self, expected: frozenset[str], patience_s: float) -> None:
        self._expected = expected
        self._patience_s = patience_s
        self._sums: dict[str, bytes] = {}
        self._reply: tuple[bytes, ...] | None = None
        self._changed = asyncio.Condition()

    async def add(self, peer_id: str, sums: bytes) -> tuple[bytes, ...]:
        """Takes a reducer's sums and waits for the others'; the same answer for all, in the order of their ids."""
        async with self._changed:
            self._sums.setdefault(peer_id, sums)
            self._changed.notify_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s), self._changed:
                await self._changed.wait_for(lambda: self._reply is not None or not self._expected - self._sums.keys())
        async with self._changed:
            if self._reply is None:
                self._reply = tuple(self._sums[sender] for sender in sorted(self._sums))
            self._changed.notify_all()
            return self._reply


def join_sums(sums: Sequence[bytes]) -> tuple[MomentsReply, bytes]:
    """As they travel."""
    return MomentsReply(sizes_bytes=tuple(len(one) for one in sums)), b"".join(sums)


def split_sums(reply: MomentsReply, payload: bytes) -> list[bytes]:
    """The other way.

    Raises:
        ValueError: the sizes do not add up.
    """
    if sum(reply.sizes_bytes) != len(payload):
        raise ValueError(f"expected {sum(reply.sizes_bytes)} bytes of sums, found {len(payload)}")
    pieces: list[bytes] = []
    start = 0
    for size_bytes in reply.sizes_bytes:
        pieces.append(payload[start : start + size_bytes])
        start += size_bytes
    return pieces
