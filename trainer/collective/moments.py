"""The moments all-reduce: reducers' sums over their slices, collected by the coordinator, and what follows from them.

Every member receives all reducers' sums and adds them in one order, so all decide alike. The coordinator only carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import add

from trainer.aggregation import Moments, RuleConfig, validate
from trainer.collective.messages import Agreement, MemberReason, MomentsReply, short
from trainer.outer.engine.collective import MemberFinding, member_findings

__all__ = ["MomentsAllReduce", "add_sums", "findings_of", "join_sums", "measured_of", "split_sums", "weights_of"]


def add_sums(sums: Sequence[Moments]) -> Moments:
    """Adds sums in the given order: the same numbers wherever the same sums are added."""
    return reduce(add, sums)


def weights_of(agreement: Agreement) -> list[float]:
    """Returns the members' weights, in their order."""
    return [member.weight for member in agreement.members]


def measured_of(agreement: Agreement, sums: Sequence[Moments], rule: RuleConfig) -> tuple[MemberFinding, ...]:
    """Validates the contributions (spec T-20) from some sums; returns nothing without sums, or if validation is off."""
    if rule.validation == "off" or not sums:
        return ()
    return member_findings(validate(add_sums(sums), rule, weights_of(agreement)), agreement.peer_ids)


def findings_of(agreement: Agreement, sums: Sequence[Moments], rule: RuleConfig) -> tuple[MemberReason, ...]:
    """Returns the members that gradient validation finds odd, from the sums that members sent."""
    usable = [one for one in sums if one.num_members == len(agreement.members)]
    return tuple(
        MemberReason(peer_id=finding.member, reason=short(finding.reason))
        for finding in measured_of(agreement, usable, rule)
        if finding.reason
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
        """Takes a reducer's sums and waits for the others'; returns the same to all, in the order of their ids."""
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
    """Returns message and payload of several sums."""
    return MomentsReply(sizes_bytes=tuple(len(one) for one in sums)), b"".join(sums)


def split_sums(reply: MomentsReply, payload: bytes) -> list[bytes]:
    """Returns the sums in message and payload.

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
