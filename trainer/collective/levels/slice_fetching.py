"""The slices of a round's result that a member has not reduced itself: fetched from their holders, by their digests.

    own group's holder ─▶ holders in other groups, in an order of this member's own ─▶ the same once more ─▶ missing

Guarantees: a slice is taken only with the digest that the round's table names for it, and if it is finite. A holder
that serves another is asked for nothing more, once its column has been asked what it has told: where that is not what
the table names, it is the coordinator that lies, and the round has failed here instead.

The trade-off: each slice comes from one holder at a time, eight slices at once, in an order that begins behind the
member's own: holders serve √n members each and nobody is asked by all, but one that stalls costs its silence before the
next is asked. The digest is checked when all of a slice is here, so a liar costs a slice of traffic, 1/√n of the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

import torch

from trainer.aggregation import finite_rows
from trainer.collective.arithmetic import Payload
from trainer.collective.levels.level_arithmetic import slice_digest
from trainer.collective.levels.level_calls import LevelCalls
from trainer.collective.levels.level_service import GroupedState
from trainer.collective.levels.messages import Stage, TallyTable
from trainer.collective.levels.tally import agreed_word
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, RoundFailedError, RpcError

logger = logging.getLogger(__name__)

_FETCHES_AT_ONCE = 8
_FETCH_ROUNDS = 2


class SliceFetcher:
    """One member's fetching in one round in groups; for its endpoint's event loop.

    ``values``, fp32[P], is written to; ``codec`` is that of the result.
    """

    def __init__(self, own_id: str, state: GroupedState, calls: LevelCalls, codec: Codec, values: torch.Tensor) -> None:
        self._own_id = own_id
        self._state = state
        self._calls = calls
        self._codec = codec
        self._values = values
        self.liars: dict[str, str] = {}
        """Members that have served something else than was agreed, and what."""

    async def fetch_missing(self, table: TallyTable, survivors: Mapping[int, Collection[str]]) -> list[int]:
        """Fetches the slices that this node does not hold; returns those that are nowhere to be had.

        Args:
            table: The result's slices, by digest.
            survivors: Who is left of each group that has a result.

        Raises:
            RoundFailedError: the table is not what a column has told.
        """
        places = asyncio.Semaphore(_FETCHES_AT_ONCE)
        plan, held = self._state.plan, self._state.parts["result"]
        # Each begins with the slice after its own, so that no holder is asked by all at once.
        wanted = [number for number in table.words() if self._state.parts_of(number)[0] not in held]
        own_number = plan.groups[plan.group_of(self._own_id)].index(self._own_id)
        wanted.sort(key=lambda number: (number <= own_number, number))

        async def fetch(number: int) -> int | None:
            async with places:
                column = plan.column(number, survivors)
                return None if await self._fetch(number, table.words()[number], column) else number

        found = await asyncio.gather(*(fetch(number) for number in wanted))
        return [number for number in found if number is not None]

    async def _fetch(self, number: int, digest: str, column: Mapping[str, int]) -> bool:
        """Fetches a slice from its holder in this group, or from those in others."""
        state, parts, is_asked = self._state, self._state.parts_of(number), False
        for holder in state.plan.fetch_order(self._own_id, number, column) * _FETCH_ROUNDS:
            if holder in self.liars or holder == self._own_id:
                continue
            try:
                found = await self._calls.parts(holder, "result", parts, self._codec)
                if slice_digest(found, parts) != digest:
                    if not is_asked:
                        await self._check_told(number, digest, column)
                        is_asked = True
                    self.liars[holder] = f"served another slice {number} than was agreed"
                    continue
                await asyncio.to_thread(self._decode, found)
                return True
            except (RpcError, CodecError, TimeoutError) as error:
                logger.info("round %d: slice %d from %s: %s", state.agreement.round_index, number, holder[:8], error)
        return False

    async def _check_told(self, number: int, digest: str, column: Collection[str]) -> None:
        """Asks a column what its slice is, where a holder serves another than the coordinator has named.

        Raises:
            RoundFailedError: most of those that answer have told another: it is the coordinator that lies.
        """
        voters = sorted(column)
        ballots = await asyncio.gather(*(self._calls.ballot(Stage.SLICES, number, peer_id) for peer_id in voters))
        told = zip(voters, ballots, strict=True)
        words = {peer_id: ballot.word for peer_id, ballot in told if ballot is not None and ballot.word}
        if words and agreed_word(words, voters) != digest and 2 * list(words.values()).count(digest) <= len(words):
            raise RoundFailedError(
                f"round {self._state.agreement.round_index}: slice {number}: the coordinator names another result than "
                "its column has told"
            )

    def _decode(self, parts: Mapping[int, Payload]) -> None:
        for part, payload in parts.items():
            start, stop = self._state.agreement.part_bounds(part)
            values = self._codec.decode(payload, stop - start, out=self._values[start:stop])
            if not finite_rows([values])[0]:
                raise CodecError(f"part {part}: expected finite results, found NaN or infinity")
