"""Sums over slices, brought together by the coordinator: what rules that look at whole vectors are decided on.

Everybody gets everybody's sums and adds them in one order, so all decide alike; the coordinator only carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from trainer.collective.messages import MomentsReply

__all__ = ["Consultation", "join_sums", "split_sums"]


class Consultation:
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
