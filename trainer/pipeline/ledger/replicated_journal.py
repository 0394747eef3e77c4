"""The account's journal on several drivers' disks: a line counts once most of them have it; any of them takes over.

The members are named in the run file (`swarm.ledger.keepers`), three or five, and each has a copy (`replica`). One of
them keeps the account under a ballot, the fencing token:

1. It asks the others to promise to follow a ballot that is higher than theirs. Those that heard from a keeper within
   `takeover_s` refuse. With most members' promises no former keeper gets a line acknowledged by most any more.
2. Of those copies it takes the one with the highest ballot, and of these the longest: whatever most members had
   acknowledged is in it. It puts that on its own disk under its ballot, and on most of the others', before it answers.
3. Then it sends lines to all. A member that lags behind, or has others, is sent what it lacks, or all.

A member that lost its disk has no vote, since it may have forgotten lines and promises. It gets its vote back when it
has been brought up to date and most of the others have confirmed the keeper after that. Only at the very beginning,
when nobody has a vote, all members have to be there. So of three members one may be lost with its disk at any time, and
another as soon as the first has been replaced; with two away at once the account stands still, and is not forked.

`election` has the first two steps, this module the third. The trade-off against Raft: the members are fixed for the
life of the account; a lagging copy is replaced whole rather than searched for its last common line (a few MiB, since
the journal is compacted).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from genesis.populate.crashpoint import crash_point
from trainer.errors import JournalLostError, LedgerError, PeerUnavailableError, RpcError
from trainer.network.rpc import Endpoint, Peer
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.network.rpc.wire import end_task
from trainer.pipeline.ledger.replica import Replica, ReplicaState
from trainer.pipeline.ledger.replica_service import (
    CHUNK_BYTES,
    WRITE,
    Members,
    ReplicaService,
    WriteAnswer,
    WriteAsk,
)
from trainer.pipeline.protocol.work import boottime_s

logger = logging.getLogger(__name__)

REPLICATED_CRASH_POINTS: Final = (
    "journal-promised",
    "journal-installed",
    "journal-copy-written",
    "journal-acknowledged",
    "journal-copy-replaced",
)
"""Where a test can have a keeper killed (`genesis.populate.crashpoint`), in the order of its life."""
_KEPT_BYTES: Final = 4 << 20
"""Of lines in memory, for members that lag behind; one that lags further is sent all."""
_CALL_S: Final = 5.0
_LOOKS: Final = 5  # In `takeover_s`.
_RETRIES: Final = 20  # In `takeover_s`, to reach a member that did not answer once; later fewer.
_LOG_EVERY_S: Final = 60.0
_GIVE_BACK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """Lines that were added together."""

    index_before: int
    digest_before: str
    index: int
    digest: str
    lines: bytes

    @property
    def num_records(self) -> int:
        return self.index - self.index_before


@dataclass(slots=True, eq=False)
class _Follower:
    """What the keeper knows of another member."""

    name: str
    is_voter: bool
    at: int | None  # It has the keeper's lines up to this record; None: it may have others.
    acked: int = -1  # Up to this record it has acknowledged them under the keeper's ballot.
    heard_s: float = -math.inf  # When the last call began that it answered so.
    caught_up_s: float = math.inf  # When it first had all of them, without a vote.
    may_vote: bool = False  # It gets its vote with the first lines.
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicatedTarget:
    """A `JournalTarget`: the copies of the members, under this keeper's ballot.

    Args:
        endpoint: this member's.
        service: its own copy, which has all lines under ``ballot`` already.
        members: of the journal.
        ballot: promised by most of them.
        state: of its own copy.
        found: what other members said of theirs when they promised.
        takeover_s: see `LedgerConfig`.
        is_first: all members have promised: each counts at once.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        service: ReplicaService,
        members: Members,
        ballot: int,
        state: ReplicaState,
        found: dict[str, ReplicaState],
        takeover_s: float,
        *,
        is_first: bool,
    ) -> None:
        self._endpoint = endpoint
        self._service = service
        self._members = members
        self._ballot = ballot
        self._index, self._digest = state.index, state.digest
        self._own_acked = state.index
        self._own_is_voter = state.is_voter
        self._takeover_s = takeover_s
        self._entries: deque[_Entry] = deque()
        self._entries_bytes = 0
        self._lost = ""
        self._news = asyncio.Event()
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_EVERY_S)
        self._followers = [self._follower_of(name, found.get(name), is_first) for name in members.others]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to bring the other members up to date."""
        for follower in self._followers:
            self._tasks.append(asyncio.create_task(self._follow(follower), name=f"ledger-copy-{follower.name[:12]}"))

    async def append(self, lines: bytes, digest: str, num_records: int) -> None:
        """See `JournalTarget`."""
        entry = _Entry(self._index, self._digest, self._index + num_records, digest, lines)
        self._index, self._digest = entry.index, digest
        self._entries.append(entry)
        self._entries_bytes += len(lines)
        while self._entries_bytes > _KEPT_BYTES and len(self._entries) > 1:
            self._entries_bytes -= len(self._entries.popleft().lines)
        self._wake_all()
        await self._written(
            lambda own: own.append(
                self._ballot, entry.index_before, entry.digest_before, lines, num_records, as_voter=False
            )
        )
        crash_point("journal-copy-written")
        await self._acknowledged(entry.index)
        crash_point("journal-acknowledged")

    async def replace(self, lines: bytes, digest: str, num_records: int) -> None:
        """See `JournalTarget`."""
        index = self._index + num_records
        await self._written(lambda own: own.install(self._ballot, index, lines, as_voter=False))
        self._index, self._digest = index, digest
        self._entries.clear()
        self._entries_bytes = 0
        for follower in self._followers:
            follower.at = None
        self._wake_all()
        crash_point("journal-copy-replaced")
        await self._acknowledged(index)

    async def confirm(self) -> None:
        """See `JournalTarget`."""
        began_s = boottime_s()
        self._wake_all()
        await self._written(lambda own: own.append(self._ballot, self._index, self._digest, b"", 0, as_voter=False))
        await self._until(lambda: self._confirmed_s() >= began_s)
        await self._acknowledged(self._index)
        if not self._own_is_voter:
            await self._written(lambda own: own.append(self._ballot, self._index, self._digest, b"", 0, as_voter=True))
            self._own_is_voter = True

    async def close(self) -> None:
        """See `JournalTarget`."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await end_task(task)
        ask = WriteAsk(ballot=self._ballot, index=self._index, digest=self._digest, is_last=True)
        peers = [peer for each in self._followers if (peer := self._members.peer(each.name)) is not None]
        calls = [
            self._endpoint.call(peer, WRITE, ask, WriteAnswer, timeout_s=min(_GIVE_BACK_S, self._takeover_s))
            for peer in peers
        ]
        await asyncio.gather(*calls, return_exceptions=True)
        self._service.note_keeper(None)

    def abandon(self) -> None:
        """See `JournalTarget`."""
        for task in self._tasks:
            task.cancel()

    # -- what most members have ----------------------------------------------------------------------------------------

    async def _written(self, write: Callable[[Replica], bool]) -> None:
        """Writes to this member's own copy."""

        def write_as_keeper(own: Replica) -> tuple[bool, ReplicaState]:
            written = write(own)
            if written:
                self._service.note_keeper(self._endpoint.peer_id)
            return written, own.state()

        try:
            written, state = await self._service.run(write_as_keeper)
        except LedgerError as error:
            raise JournalLostError(f"this driver's own copy is given up: {error}") from error
        if not written:
            raise JournalLostError(f"expected to keep the account under ballot {self._ballot}, found {state.promised}")
        self._own_acked = state.index
        self._news.set()

    async def _acknowledged(self, index: int) -> None:
        """Waits until most members have all lines up to a record."""
        await self._until(lambda: self._most([float(it.acked) for it in self._voters()], self._own_acked) >= index)

    def _confirmed_s(self) -> float:
        """When a call began that most members have answered since, as followers of this keeper."""
        return self._most([it.heard_s for it in self._voters()], boottime_s())

    def _voters(self) -> list[_Follower]:
        return [follower for follower in self._followers if follower.is_voter]

    def _most(self, values: Sequence[float], own: float) -> float:
        """Returns what most members have reached, by those that have a vote."""
        ordered = sorted([*values, own] if self._own_is_voter else values, reverse=True)
        return ordered[self._members.majority - 1] if len(ordered) >= self._members.majority else -math.inf

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if self._lost:
                raise JournalLostError(self._lost)
            self._news.clear()
            await self._news.wait()
        if self._lost:
            raise JournalLostError(self._lost)

    # -- the other members ---------------------------------------------------------------------------------------------

    def _follower_of(self, name: str, state: ReplicaState | None, may_vote: bool) -> _Follower:
        if state is None:
            return _Follower(name, is_voter=False, at=None)
        is_same = (state.index, state.digest) == (self._index, self._digest)
        return _Follower(name, state.is_voter, state.index if is_same else None, may_vote=may_vote)

    def _wake_all(self) -> None:
        for follower in self._followers:
            follower.wake.set()

    async def _follow(self, follower: _Follower) -> None:
        """Sends a member what it lacks, and otherwise a sign whenever one is asked for."""
        first_s = pause_s = self._takeover_s / _RETRIES
        while not self._lost:
            follower.wake.clear()
            try:
                await self._send(follower)
                pause_s = first_s
            except RpcError as error:
                if self._log_limit.take(follower.name):
                    logger.warning("member %s has no copy of the journal's newest lines: %s", follower.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._takeover_s / _LOOKS)
                continue
            except LedgerError as error:
                self._lost = str(error)
                self._news.set()
                return
            if follower.at is None:
                await asyncio.sleep(first_s)
            elif follower.at == self._index:
                await follower.wake.wait()

    async def _send(self, follower: _Follower) -> None:
        peer = self._members.peer(follower.name)
        if peer is None:
            raise PeerUnavailableError(f"expected member {follower.name}, found it not announced")
        began_s = boottime_s()
        send = self._send_all if self._lacks_all(follower) else self._add
        answer, index = await send(follower, peer)
        if answer.state.promised > self._ballot:
            self._lost = (
                f"expected to keep the account under ballot {self._ballot}, found that member {follower.name} follows "
                f"{answer.state.promised}"
            )
        elif answer.written:
            follower.at = follower.acked = index
            follower.heard_s = began_s
            if not answer.state.is_voter:
                follower.caught_up_s = min(follower.caught_up_s, boottime_s())
            else:
                follower.may_vote = False
            follower.is_voter = answer.state.is_voter
        else:
            follower.at = None
            if not answer.state.is_voter:  # It has lost its disk: what it acknowledged before does not count any more.
                follower.is_voter, follower.acked, follower.caught_up_s = False, -1, math.inf
        self._news.set()

    def _lacks_all(self, follower: _Follower) -> bool:
        """Whether it cannot be sent what it lacks alone."""
        if follower.at is None:
            return True
        if follower.at == self._index:
            return False
        first = next((it for it in self._entries if it.index_before == follower.at), None)
        return first is None or len(first.lines) > CHUNK_BYTES

    def _is_admitted(self, follower: _Follower) -> bool:
        """Whether it gets a vote now: others have confirmed this keeper since it was brought up to date."""
        return not follower.is_voter and (follower.may_vote or self._confirmed_s() > follower.caught_up_s)

    async def _add(self, follower: _Follower, peer: Peer) -> tuple[WriteAnswer, int]:
        """Sends some of what it lacks; returns its answer, and the record up to which it then has all."""
        lacking = [entry for entry in self._entries if entry.index_before >= (follower.at or 0)]
        lines, num_records, index, digest = b"", 0, self._index, self._digest
        if follower.at != self._index:
            index, digest = lacking[0].index_before, lacking[0].digest_before
            for entry in lacking:
                if num_records and len(lines) + len(entry.lines) > CHUNK_BYTES:
                    break
                lines, num_records = lines + entry.lines, num_records + entry.num_records
        ask = WriteAsk(
            ballot=self._ballot,
            index=index,
            digest=digest,
            num_records=num_records,
            as_voter=self._is_admitted(follower),
        )
        return await self._call(peer, ask, lines), index + num_records

    async def _send_all(self, follower: _Follower, peer: Peer) -> tuple[WriteAnswer, int]:
        """Sends the whole journal, piece by piece; otherwise as `_add`."""
        lines, state = await self._service.run(Replica.lines)
        for offset in range(0, max(1, len(lines)), CHUNK_BYTES):
            ask = WriteAsk(
                ballot=self._ballot,
                index=state.index,
                digest=state.digest,
                as_voter=follower.may_vote,
                is_whole=True,
                offset=offset,
                size_bytes=len(lines),
            )
            answer = await self._call(peer, ask, lines[offset : offset + CHUNK_BYTES])
            if not answer.written:
                break
        return answer, state.index

    async def _call(self, peer: Peer, ask: WriteAsk, payload: bytes) -> WriteAnswer:
        timeout_s = min(_CALL_S, self._takeover_s)
        return (await self._endpoint.call(peer, WRITE, ask, WriteAnswer, payload=payload, timeout_s=timeout_s)).body
