"""What a node asks the others in a round in groups: the other end of `level_service`.

Answers are bounded before they are kept: parts by their exact sizes, digests by their number. A member that does not
answer is an answer too (None), except where parts of it are needed.
"""

from __future__ import annotations

import asyncio
import logging

from trainer.collective.arithmetic import Payload
from trainer.collective.config import RoundSettings
from trainer.collective.levels import messages
from trainer.collective.levels.level_arithmetic import DIGEST_BYTES
from trainer.collective.levels.level_service import GroupedState, LevelService, ask_ballot
from trainer.collective.levels.messages import PartsKind, Stage, TallyTable
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, RefusedError, RoundFailedError, RpcError
from trainer.network.rpc import Request

logger = logging.getLogger(__name__)

_TRIES = 3
_RETRY_S = 0.3


class LevelCalls:
    """The calls of one node in one round in groups; for its endpoint's event loop."""

    def __init__(self, settings: RoundSettings, levels: LevelService, state: GroupedState) -> None:
        self._settings = settings
        self._config = settings.config
        self._own_id = settings.own_id
        self._levels = levels
        self._state = state
        self._agreement = state.agreement

    async def ballot(self, stage: Stage, subject: int, peer_id: str) -> messages.BallotReply | None:
        """Asks a member for its word in a tally; None: no answer."""
        return await ask_ballot(self._settings, self._state, stage, subject, peer_id)

    async def digests(self, peer_id: str, parts: range) -> tuple[bytes, ...] | None:
        """Asks a member what its group holds of some parts, a digest each; None: no answer, or not so many."""
        body = messages.DigestsRequest(
            agreement=self._agreement.fingerprint(), first_part=parts.start, last_part=parts.stop
        )
        silence_s = self._config.stall_timeout_s
        try:
            reply = await self._settings.endpoint.call(
                self._state.members[peer_id].peer,
                messages.DIGESTS_METHOD,
                body,
                messages.DigestsReply,
                timeout_s=silence_s,
                stall_timeout_s=silence_s,
            )
        except RpcError as error:
            logger.debug("round %d: no digests from %s: %s", self._agreement.round_index, peer_id[:8], error)
            return None
        data = bytes(reply.payload)
        if len(data) != DIGEST_BYTES * len(parts):
            return None
        return tuple(data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))

    async def parts(self, holder: str, kind: PartsKind, parts: range, codec: Codec) -> dict[int, Payload]:
        """Fetches parts in a codec from a member; each is of its exact size before it is kept.

        Raises:
            RpcError: the member is gone, or does not hold them.
            CodecError: it sent something else.
        """
        opening = messages.PartsOpen(
            agreement=self._agreement.fingerprint(),
            kind=kind,
            first_part=parts.start,
            last_part=parts.stop,
        )
        found: dict[int, Payload] = {}
        timeout_s, silence_s = self._config.round_timeout_s / 4, self._config.stall_timeout_s
        async with self._settings.endpoint.open_stream(
            self._state.members[holder].peer,
            messages.PARTS_METHOD,
            opening,
            timeout_s=timeout_s,
            stall_timeout_s=silence_s,
        ) as stream:
            await stream.end()
            for number in parts:
                frame = await stream.receive()
                start, stop = self._agreement.part_bounds(number)
                expected_bytes = codec.encoded_bytes(stop - start)
                if frame is None or frame.index != number or len(frame.payload) != expected_bytes:
                    raise CodecError(
                        f"expected part {number} in {expected_bytes} bytes from {holder[:8]}, found another"
                    )
                found[number] = bytes(frame.payload)
        return found

    async def tally(self, stage: Stage, subject: int, word: str) -> TallyTable:
        """Says this node's word to the coordinator, or to the next in its place; returns what all have come to.

        Raises:
            RoundFailedError: there is no table, or it says that the round has failed.
        """
        body = messages.TallyRequest(agreement=self._agreement.fingerprint(), stage=stage, subject=subject, word=word)
        if subject >= 0:
            self._state.ballots[stage, subject] = word
        for coordinator in self._state.coordinators:
            table = await self._tally_at(coordinator, body)
            if table is None:
                continue
            if table.failure:
                raise RoundFailedError(f"round {self._agreement.round_index}: {table.failure}")
            return table
        raise RoundFailedError(f"round {self._agreement.round_index}: no coordinator is left")

    async def _tally_at(self, coordinator: str, body: messages.TallyRequest) -> TallyTable | None:
        """Returns a coordinator's table; None if it is gone. One that is there is asked again: others ask it too."""
        if coordinator == self._own_id:
            return (await self._levels.tally(Request(self._own_id, body))).body
        for _ in range(_TRIES):
            try:
                reply = await self._settings.endpoint.call(
                    self._state.members[coordinator].peer,
                    messages.TALLY_METHOD,
                    body,
                    TallyTable,
                    timeout_s=self._config.round_timeout_s,
                    stall_timeout_s=self._config.stall_timeout_s,
                )
                return reply.body
            except RefusedError as error:
                logger.info("round %d: no tally: %s", self._agreement.round_index, error)
                if error.reason == "unknown":
                    return None
            except RpcError as error:
                logger.info("round %d: no tally: %s", self._agreement.round_index, error)
                if await ask_ballot(self._settings, self._state, Stage.HELD, 0, coordinator) is None:
                    return None
            await asyncio.sleep(_RETRY_S)
        return None
