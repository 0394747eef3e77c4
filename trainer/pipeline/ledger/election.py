"""Who keeps a replicated journal: a member that the others promise to follow, with whatever most of them have.

A member stands when it has heard of no keeper for `takeover_s`, nor promised itself to another for half of that. It
first asks whether the others would follow, so that one that is cut off does not raise ballots in vain. The rules are in
`replicated_journal`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from typing import Final

from genesis.populate.crashpoint import crash_point
from trainer.errors import JournalLostError, RpcError
from trainer.network.rpc import Endpoint, PeerId
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.outer.engine.daemon_call import in_daemon_thread
from trainer.pipeline.ledger.journal_lines import decode_lines
from trainer.pipeline.ledger.replica import Replica, ReplicaState
from trainer.pipeline.ledger.replica_service import (
    KEEPER,
    PROMISE,
    READ,
    KeeperAnswer,
    KeeperAsk,
    Members,
    PromiseAnswer,
    PromiseAsk,
    ReadAnswer,
    ReadAsk,
    ReplicaService,
)
from trainer.pipeline.ledger.replicated_journal import ReplicatedTarget
from trainer.pipeline.ledger.succession import TakenJournal
from trainer.pipeline.protocol.work import boottime_s

logger = logging.getLogger(__name__)

_CALL_S: Final = 5.0
_LOOKS: Final = 5  # In `takeover_s`.
_STAGGER: Final = 20  # Members that begin together stand so many parts of `takeover_s` apart.
_LOG_EVERY_S: Final = 60.0


class ReplicatedSite:
    """A `JournalSite` of members; ``service`` is this driver's copy, None if it is no member and only follows."""

    def __init__(self, endpoint: Endpoint, service: ReplicaService | None, members: Members, takeover_s: float) -> None:
        self._endpoint = endpoint
        self._service = service
        self._members = members
        self._takeover_s = takeover_s
        self._told: PeerId | None = None  # Who keeps the account, by a member's word.
        self._random = random.Random(endpoint.peer_id)
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_EVERY_S)

    @property
    def keeper(self) -> PeerId | None:
        """See `JournalSite`."""
        own = None if self._service is None else self._service.keeper
        return own or self._told

    def register(self) -> None:
        """See `JournalSite`."""
        if self._service is not None:
            self._service.register()

    async def check(self) -> None:
        """Nothing can be said before the other members are there."""

    async def follow(self) -> TakenJournal:
        """See `JournalSite`."""
        if self._service is None:
            while True:
                await self._ask_who_keeps()
                await asyncio.sleep(self._takeover_s / _LOOKS)
        own = self._members.own or 0
        await asyncio.sleep(own * self._takeover_s / _STAGGER)  # Begun together, the first named comes first.
        while True:
            if self._service.is_free_for(self._endpoint.peer_id):
                taken = await self._stand(self._service)
                if taken is not None:
                    return taken
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._takeover_s / _LOOKS)

    async def close(self) -> None:
        """See `JournalSite`."""
        if self._service is not None:
            await self._service.close()

    async def _ask_who_keeps(self) -> None:
        for name in self._members.names:
            peer = self._members.peer(name)
            if peer is None:
                continue
            with suppress(RpcError):
                timeout_s = min(_CALL_S, self._takeover_s)
                answer = await self._endpoint.call(peer, KEEPER, KeeperAsk(), KeeperAnswer, timeout_s=timeout_s)
                if answer.body.keeper is not None:
                    self._told = answer.body.keeper
                    return

    async def _stand(self, service: ReplicaService) -> TakenJournal | None:
        """Tries to become the keeper; None: too few members follow."""
        own = await service.run(Replica.state)
        polled = await self._ask_all(PromiseAsk(ballot=0, is_poll=True))
        if not self._suffice(own, polled):
            return None
        began_s = boottime_s()
        ballot = self._members.ballot_above(max(own.promised, *(each.promised for each in polled.values()), 0))
        if not await service.run(lambda copy: service.promise(copy, ballot, self._endpoint.peer_id)):
            return None
        promised = await self._ask_all(PromiseAsk(ballot=ballot))
        if not self._suffice(own, promised):
            return None
        crash_point("journal-promised")
        is_first = len(promised) == len(self._members.names) - 1
        num_voters = own.is_voter + sum(each.is_voter for each in promised.values())
        if 0 < num_voters < self._members.majority:
            logger.warning(
                "only %d of %d members still have their copies; the account goes on with what these have",
                *(num_voters, len(self._members.names)),
            )
        best = max(promised, key=lambda name: promised[name].rank, default="")
        lines, state = await service.run(Replica.lines)
        if best and promised[best].rank > own.rank:
            fetched = await self._fetched(best, promised[best], ballot)
            if fetched is None:
                return None
            lines, state = fetched, promised[best]
        if not await service.run(lambda copy: copy.install(ballot, state.index, lines, as_voter=is_first)):
            return None
        crash_point("journal-installed")
        return await self._confirmed(service, ballot, promised, lines, began_s, is_first=is_first)

    async def _confirmed(
        self,
        service: ReplicaService,
        ballot: int,
        promised: dict[str, ReplicaState],
        lines: bytes,
        began_s: float,
        *,
        is_first: bool,
    ) -> TakenJournal | None:
        """Has most members write all lines under the new ballot; None: they did not in time."""
        own = await service.run(Replica.state)
        target = ReplicatedTarget(
            self._endpoint, service, self._members, ballot, own, promised, self._takeover_s, is_first=is_first
        )
        target.start()
        try:
            async with asyncio.timeout(self._takeover_s):
                await target.confirm()
            records, digest, size_bytes = await in_daemon_thread(
                lambda: decode_lines(lines, "the replicated journal"), "ledger-replay"
            )
        except (TimeoutError, JournalLostError) as error:
            target.abandon()
            logger.info("this driver does not keep the account: %s", error or "too few members answered in time")
            return None
        except BaseException:
            target.abandon()
            raise
        logger.info("most members follow under ballot %d: %d records, %d bytes", ballot, len(records), size_bytes)
        return TakenJournal(target, tuple(records), digest, size_bytes, ballot, began_s)

    def _suffice(self, own: ReplicaState, others: dict[str, ReplicaState]) -> bool:
        """Whether these members may decide: most of all, by those with a vote, or all."""
        voters = own.is_voter + sum(each.is_voter for each in others.values())
        if voters >= self._members.majority or len(others) == len(self._members.names) - 1:
            return True
        if self._log_limit.take("members"):
            missing = ", ".join(name for name in self._members.others if name not in others)
            logger.warning(
                "nobody keeps the account: of %d members, %d with a vote would follow a new keeper; not reached: %s",
                *(len(self._members.names), voters, missing),
            )
        return False

    async def _ask_all(self, ask: PromiseAsk) -> dict[str, ReplicaState]:
        """Asks all other members at once; returns the states of those that agree."""

        async def ask_one(name: str) -> ReplicaState | None:
            peer = self._members.peer(name)
            if peer is None:
                return None
            try:
                timeout_s = min(_CALL_S, self._takeover_s / 2)
                answer = await self._endpoint.call(peer, PROMISE, ask, PromiseAnswer, timeout_s=timeout_s)
            except RpcError as error:
                logger.debug("member %s: %s", name, error)
                return None
            return answer.body.state if answer.body.granted else None

        names = self._members.others
        states = await asyncio.gather(*map(ask_one, names))
        return {name: state for name, state in zip(names, states, strict=True) if state is not None}

    async def _fetched(self, name: str, state: ReplicaState, ballot: int) -> bytes | None:
        """Reads another member's lines; None: it does not answer any more."""
        peer, lines = self._members.peer(name), bytearray()
        try:
            while peer is not None:
                ask = ReadAsk(ballot=ballot, offset=len(lines))
                answer = await self._endpoint.call(peer, READ, ask, ReadAnswer, timeout_s=_CALL_S)
                lines += answer.payload
                if answer.body.digest != state.digest:
                    return None
                if len(lines) >= answer.body.size_bytes or not answer.payload:
                    return bytes(lines)
        except RpcError as error:
            logger.info("the journal of member %s cannot be read: %s", name, error)
        return None
