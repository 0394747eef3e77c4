"""What many members have come to, in few words: the coordinator's side of a round in groups.

For each subject (a group, a slice) its voters say one word each. A word counts once a majority of all voters have said
it (`is_majority`), the dead among them included: so no leader of a group can speak for it, no two words can both count,
and whoever takes the coordinator's place and hears the same members finds the same table. A tally is over when every
subject is decided or cannot be any more; once half of the subjects are, it waits for the others three times as long as
it took until then, and four times the silence after which a peer counts as dead at least.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from trainer.collective.config import Changes, CollectiveConfig
from trainer.collective.levels.messages import BallotReply, Stage, TallyTable
from trainer.collective.planning import is_majority
from trainer.errors import RefusedError

_LOOK_EVERY_S = 0.25
_PROBES_AT_ONCE = 32

Voters = Mapping[int, Sequence[str]]
"""By subject, who has a word in it."""
AskBallot = Callable[[str, int], Awaitable[BallotReply | None]]
"""Asks a member for its word on a subject; None: no answer."""


def agreed_word(words: Mapping[str, str], voters: Collection[str]) -> str | None:
    """Returns the word of a majority of a subject's voters (`is_majority`); None: none yet."""
    order = sorted(voters)
    by_word = _by_word(words, voters)
    return next((word for word, members in by_word.items() if is_majority(members, order)), None)


def is_closed(words: Mapping[str, str], voters: Collection[str], absent: frozenset[str] = frozenset()) -> bool:
    """Returns whether more words cannot change what a subject comes to; ``absent`` voters will not say any."""
    if agreed_word(words, voters) is not None:
        return True
    order, still_open = sorted(voters), set(voters) - words.keys() - absent
    most = [*_by_word(words, voters).values(), set[str]()]
    return not any(is_majority(members | still_open, order) for members in most)


def _by_word(words: Mapping[str, str], voters: Collection[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for peer_id in words.keys() & set(voters):
        found.setdefault(words[peer_id], set()).add(peer_id)
    return found


def table_of(stage: Stage, words: Mapping[int, Mapping[str, str]], voters: Voters) -> TallyTable:
    """Returns what the subjects have come to; of slices and of the end, all must have come to something."""
    found = {subject: agreed_word(words.get(subject, {}), each) for subject, each in sorted(voters.items())}
    rows = tuple((subject, word) for subject, word in found.items() if word)
    lacking = [subject for subject in found if not found[subject]]
    failure = ""
    if stage is Stage.GROUPS and 2 * len(rows) <= len(voters):
        failure = f"only {len(rows)} of {len(voters)} groups have a result: no majority"
    elif stage is Stage.SLICES and lacking:
        failure = f"no majority holds slice {lacking[0]}" + (f" and {len(lacking) - 1} more" if lacking[1:] else "")
    elif stage is Stage.HELD and lacking:
        failure = "no majority of the members holds the whole result"
    return TallyTable(rows=() if failure else rows, failure=failure)


class Tally:
    """One tally on the node that coordinates it, or has taken over; ``ask`` only for the latter (`probe`)."""

    def __init__(self, stage: Stage, voters: Voters, config: CollectiveConfig, ask: AskBallot | None) -> None:
        self.table: TallyTable | None = None
        self._stage = stage
        self._voters = voters
        self._config = config
        self._ask = ask
        self._words: dict[int, dict[str, str]] = {subject: {} for subject in voters}
        self._absent: set[str] = set()
        self._changes = Changes()
        self._running: asyncio.Task[None] | None = None
        self._is_over = False

    async def say(self, peer_id: str, subject: int, word: str) -> TallyTable:
        """Takes a member's word and waits for the table; the first word of a member counts.

        Raises:
            RefusedError: ``unknown``: it has no word in this.
        """
        if subject >= 0:
            if peer_id not in self._voters.get(subject, ()):
                raise RefusedError("unknown", f"subject {subject} is not for {peer_id[:8]} to say")
            self._words[subject].setdefault(peer_id, word)
            self._changes.notify()
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await self._changes.wait_for(lambda: self.table is not None or self._is_over)
        if self.table is None:  # Another takes the coordinator's place.
            raise RefusedError("unknown", "the tally has ended here without a table")
        return self.table

    def close(self) -> None:
        """Ends it."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        probing = asyncio.create_task(self._probe_silent()) if self._ask is not None else None
        try:
            await self._wait()
            self.table = table_of(self._stage, self._words, self._voters)
        finally:
            if probing is not None:
                probing.cancel()
            self._is_over = True
            self._changes.notify()

    async def _wait(self) -> None:
        began_s = time.monotonic()
        half_s: float | None = None
        while num_open := len(self._voters) - self._num_closed():
            waited_s = time.monotonic() - began_s
            if half_s is None and 2 * num_open <= len(self._voters):
                half_s = waited_s
            longest_s = self._config.round_timeout_s / 4
            if half_s is not None:
                longest_s = min(longest_s, half_s + max(4 * self._config.stall_timeout_s, 3 * half_s))
            if waited_s > longest_s:
                return
            await self._changes.wait(_LOOK_EVERY_S)

    def _num_closed(self) -> int:
        absent = frozenset(self._absent)
        return sum(is_closed(self._words[subject], voters, absent) for subject, voters in self._voters.items())

    async def _probe_silent(self) -> None:
        """Asks those who said their word to the coordinator that is gone, and may not come here any more."""
        places = asyncio.Semaphore(_PROBES_AT_ONCE)
        while True:
            await asyncio.sleep(self._config.stall_timeout_s / 4)
            silent = [
                (subject, peer_id)
                for subject, voters in self._voters.items()
                if not is_closed(self._words[subject], voters)
                for peer_id in voters
                if peer_id not in self._words[subject] and peer_id not in self._absent
            ]
            await asyncio.gather(*(self._probe(subject, peer_id, places) for subject, peer_id in silent))

    async def _probe(self, subject: int, peer_id: str, places: asyncio.Semaphore) -> None:
        if self._ask is None:
            return
        async with places:
            ballot = await self._ask(peer_id, subject)
        if ballot is None:
            self._absent.add(peer_id)
        elif ballot.word is not None:
            self._words[subject].setdefault(peer_id, ballot.word)
        self._changes.notify()
