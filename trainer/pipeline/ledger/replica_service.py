"""The members of a replicated journal, and a member's copy behind its endpoint.

| method           | asks                 | answers               |
|------------------|----------------------|-----------------------|
| `ledger/promise` | :class:`PromiseAsk`  | :class:`PromiseAnswer`|
| `ledger/write`   | :class:`WriteAsk`    | :class:`WriteAnswer`  |
| `ledger/read`    | :class:`ReadAsk`     | :class:`ReadAnswer`   |
| `ledger/keeper`  | :class:`KeeperAsk`   | :class:`KeeperAnswer` |

The first three are for members alone. A member that has heard from a keeper within `takeover_s` promises itself to
nobody else: so a member that is cut off cannot disturb the others, and a keeper knows how long it is alone. All that
touches the copy runs in one thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, TypeVar

from pydantic import Field

from trainer.errors import LedgerError, RefusedError
from trainer.network.discovery.stage_report import Counted
from trainer.network.rpc import Endpoint, Message, Peer, PeerId, Reply, Request
from trainer.pipeline.ledger.replica import MAX_JOURNAL_BYTES, Digest, Replica, ReplicaState
from trainer.pipeline.protocol.work import boottime_s

logger = logging.getLogger(__name__)

PROMISE, WRITE, READ, KEEPER = "ledger/promise", "ledger/write", "ledger/read", "ledger/keeper"
CHUNK_BYTES: Final = 512 << 10
T = TypeVar("T")

JournalBytes = Annotated[int, Field(ge=0, le=MAX_JOURNAL_BYTES)]


class PromiseAsk(Message):
    """Asks a member to follow a ballot."""

    ballot: Counted
    is_poll: bool = False  # Asks only whether it would follow a new one.


class PromiseAnswer(Message):
    """Whether it does, or would."""

    granted: bool
    state: ReplicaState


class WriteAsk(Message):
    """The keeper's lines, in the payload; none of them: a sign that it goes on."""

    ballot: Counted
    index: Counted  # Of the record before the lines; of a whole journal, of its last record.
    digest: Digest  # Of that record; of a whole journal, of its last.
    num_records: Counted = 0
    as_voter: bool = False  # The copy counts from now on.
    is_whole: bool = False  # The payload is a piece of a whole journal.
    offset: JournalBytes = 0
    size_bytes: JournalBytes = 0  # Of the whole journal.
    is_last: bool = False  # The keeper gives the journal back.


class WriteAnswer(Message):
    """Whether the lines are on the member's disk; or, of a whole journal's piece, kept until it is complete."""

    written: bool
    state: ReplicaState


class ReadAsk(Message):
    """Asks for a member's lines, under a ballot that it follows, so that they stay as they are meanwhile."""

    ballot: Counted
    offset: JournalBytes = 0


class ReadAnswer(Message):
    """A piece of them is in the payload."""

    size_bytes: JournalBytes
    digest: Digest


class KeeperAsk(Message):
    """Asks who keeps the account."""


class KeeperAnswer(Message):
    """The key of the keeper that this member follows; None: it has not heard of any lately."""

    ballot: Counted
    keeper: PeerId | None


@dataclass(frozen=True, slots=True)
class Members:
    """The drivers that have the copies.

    Args:
        names: of all, as in the run file: the same order everywhere.
        own: this driver's place among them; None: it is none of them.
        peer: where a member is now; None: that is not known.
        name_of: the name of the member with a key; None: it is none.
    """

    names: Sequence[str]
    own: int | None
    peer: Callable[[str], Peer | None]
    name_of: Callable[[PeerId], str | None]

    @property
    def majority(self) -> int:
        """So many of the members, and any other so many, have one in common."""
        return len(self.names) // 2 + 1

    @property
    def others(self) -> list[str]:
        """All but this driver."""
        return [name for place, name in enumerate(self.names) if place != self.own]

    def ballot_above(self, ballot: int) -> int:
        """Returns the least higher ballot that is this member's alone."""
        if self.own is None:
            raise LedgerError("expected a member of the replicated journal, found another driver")
        return (ballot // len(self.names) + 1) * len(self.names) + self.own


class ReplicaService:
    """Answers the other members, at an endpoint that is not started yet."""

    def __init__(self, endpoint: Endpoint, replica: Replica, members: Members, takeover_s: float) -> None:
        self._endpoint = endpoint
        self._replica = replica
        self._members = members
        self._takeover_s = takeover_s
        self._thread = ThreadPoolExecutor(1, "genesis-replica")
        self._incoming = bytearray()  # Pieces of a whole journal, under this ballot.
        self._incoming_ballot = 0
        self._keeper: PeerId | None = None
        self._is_closed = False
        self._candidate: PeerId | None = None  # Whom this member has promised to follow last, and when.
        self._promised_s = -math.inf
        # A member that begins again may have heard of a keeper a moment ago; one without a vote has promised nothing.
        self._heard_s = boottime_s() if replica.state().is_voter else -math.inf

    @property
    def quiet_s(self) -> float:
        """Seconds since this member heard from a keeper."""
        return boottime_s() - self._heard_s

    @property
    def keeper(self) -> PeerId | None:
        """The key of the keeper, if it was heard of lately."""
        return self._keeper if self.quiet_s < self._takeover_s else None

    def register(self) -> None:
        """Registers its methods at the endpoint."""
        self._endpoint.register(PROMISE, PromiseAsk, self._promise)
        self._endpoint.register(WRITE, WriteAsk, self._write)
        self._endpoint.register(READ, ReadAsk, self._read)
        self._endpoint.register(KEEPER, KeeperAsk, self._answer_keeper)

    async def run(self, work: Callable[[Replica], T]) -> T:
        """Does something with the copy, in its thread; raises LedgerError if the disk fails, or this was closed."""
        if self._is_closed:
            raise LedgerError("expected a member that keeps a copy of the journal, found that it stops")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, self._replica))
        except OSError as error:
            raise LedgerError(f"expected a copy of the journal that can be written, found {error}") from error

    def is_free_for(self, candidate: PeerId) -> bool:
        """Whether this member would follow a candidate: no keeper was heard of, and no other candidate lately."""
        is_other = candidate != self._candidate and boottime_s() < self._promised_s + self._takeover_s / 2
        return self.quiet_s >= self._takeover_s and not is_other

    def promise(self, replica: Replica, ballot: int, candidate: PeerId) -> bool:
        """Promises to follow a candidate, if this member is free.

        To be called by `run`: in the thread that takes the keeper's lines, none comes between the look and the promise.
        """
        if not (self.is_free_for(candidate) and replica.promise(ballot)):
            return False
        self._candidate, self._promised_s = candidate, boottime_s()
        return True

    def note_keeper(self, keeper: PeerId | None) -> None:
        """Notes a sign of the keeper; None: it has given the journal back."""
        self._keeper = keeper
        self._heard_s = -math.inf if keeper is None else boottime_s()

    async def close(self) -> None:
        """Lets go of the copy; the other members are refused from then on."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self._replica.close()

    async def _promise(self, request: Request[PromiseAsk]) -> Reply[PromiseAnswer]:
        self._check_member(request.sender)
        ask = request.body

        def promise(replica: Replica) -> PromiseAnswer:
            if ask.is_poll:
                granted = self.is_free_for(request.sender)
            else:
                granted = self.promise(replica, ask.ballot, request.sender)
            return PromiseAnswer(granted=granted, state=replica.state())

        return Reply(await self._answered(promise))

    async def _write(self, request: Request[WriteAsk]) -> Reply[WriteAnswer]:
        self._check_member(request.sender)
        ask, payload = request.body, request.payload
        if ask.is_whole and not self._take_piece(ask, bytes(payload)):
            return Reply(WriteAnswer(written=False, state=await self._answered(Replica.state)))
        if ask.is_whole and len(self._incoming) < ask.size_bytes:
            return Reply(WriteAnswer(written=True, state=await self._answered(Replica.state)))
        lines = bytes(self._incoming if ask.is_whole else payload)
        self._incoming = bytearray()

        def write(replica: Replica) -> WriteAnswer:
            if ask.is_whole:
                written = replica.install(ask.ballot, ask.index, lines, as_voter=ask.as_voter)
            else:
                num_records, as_voter = ask.num_records, ask.as_voter
                written = replica.append(ask.ballot, ask.index, ask.digest, lines, num_records, as_voter=as_voter)
            state = replica.state()
            if ask.ballot == state.promised:  # It may end elsewhere: its keeper is heard of all the same.
                self.note_keeper(None if ask.is_last else request.sender)
            return WriteAnswer(written=written, state=state)

        return Reply(await self._answered(write))

    async def _read(self, request: Request[ReadAsk]) -> Reply[ReadAnswer]:
        self._check_member(request.sender)
        lines, state = await self._answered(Replica.lines)
        if request.body.ballot != state.promised:
            raise RefusedError("ballot", f"expected ballot {state.promised}, found {request.body.ballot}")
        piece = lines[request.body.offset : request.body.offset + CHUNK_BYTES]
        return Reply(ReadAnswer(size_bytes=len(lines), digest=state.digest), piece)

    async def _answer_keeper(self, _request: Request[KeeperAsk]) -> Reply[KeeperAnswer]:
        state = await self._answered(Replica.state)
        return Reply(KeeperAnswer(ballot=state.promised, keeper=self.keeper))

    def _take_piece(self, ask: WriteAsk, piece: bytes) -> bool:
        """Keeps a piece of a whole journal; returns False if it does not follow those before it."""
        if not ask.offset:
            self._incoming, self._incoming_ballot = bytearray(), ask.ballot
        fits = (ask.ballot, ask.offset) == (self._incoming_ballot, len(self._incoming))
        if not fits or ask.offset + len(piece) > ask.size_bytes:
            return False
        self._incoming += piece
        return True

    def _check_member(self, sender: PeerId) -> None:
        if self._members.name_of(sender) is None:
            raise RefusedError("not-a-member", f"expected a driver of swarm.ledger.keepers, found {sender[:12]}")

    async def _answered(self, work: Callable[[Replica], T]) -> T:
        try:
            return await self.run(work)
        except LedgerError as error:
            if not self._is_closed:
                logger.error("%s", error)
            raise RefusedError("journal", str(error)) from error
