"""`BucketCollective`: rounds through an object store, as the training thread sees them.

A round runs in the thread that calls `reduce`: training's own, or with overlap the round's beside it. While the node
trains, a thread of its own looks at the bucket every few seconds, for others that wait for this node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from genesis.errors import GenesisError
from trainer.bucket_rounds.departures import put_departure, take_back_departures
from trainer.bucket_rounds.documents import Agreement
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.round import BucketRound
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.errors import RoundFailedError, StateBehindError, TrainerError
from trainer.outer.engine.collective import Contribution, RoundResult

logger = logging.getLogger(__name__)

_MISSES: Final = 3
"""Rounds in which a node was waited for in vain, after which it is not waited for until it has come."""
_MOST_WITHOUT_NEW: Final = 64
"""Rounds in a row that wait for nobody new, after newcomers were waited for in vain again and again."""


class BucketCollective:
    """Rounds with whoever else trains over the same bucket.

    ``is_snapshot_due`` is asked before this node closes a round, for its number: whether newcomers need the state after
    it. ``committed`` is called, in the round's thread, with the agreement of each round that has a result.
    """

    def __init__(
        self,
        settings: BucketSettings,
        is_snapshot_due: Callable[[int], bool] = lambda _round_index: False,
        committed: Callable[[Agreement], object] = lambda _agreement: None,
    ) -> None:
        self._settings = settings
        self._is_snapshot_due = is_snapshot_due
        self._committed = committed
        self._clock = StoreClock()
        self._last: Agreement | None = None
        self._last_put_at = 0.0  # By the store's clock.
        self._next_round = -1  # Towards which this node trains; -1: none.
        self._tried_round = -1  # The last one that this process took part in.
        self._current: BucketRound | None = None  # Of that number.
        self._is_requested = False
        self._watcher: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._awaited: set[str] = set()
        self._num_missed: Counter[str] = Counter()
        self._new_awaited: set[str] = set()  # Of those, who was not in the round before.
        self._num_missed_new = 0  # Rounds that waited for newcomers of whom none came.
        self._waits_for_new_from = 0  # In no round before that one.
        self.agreed_vocabulary_rows = 0
        """Rows of vocabulary that the members of the last round all can have; 0 before the first."""
        self.behind = False  # Whether the last round failed because the others hold another state.
        self.keeps_work = False  # A node makes up for rounds one by one, and keeps its work by itself.

    @property
    def clock(self) -> StoreClock:
        """What time it is by the store."""
        return self._clock

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Takes part in one round; see `trainer.outer.engine.collective.Collective`."""
        round_index = contribution.round_index
        self._next_round, self._is_requested, self.behind = -1, False, False
        is_first = self._tried_round < 0
        self._tried_round, self._current = round_index, None
        try:
            before, before_put_at = self._agreement_before(round_index)
            current = self._current = BucketRound(
                self._settings,
                contribution,
                before,
                self._clock,
                lambda: self._is_snapshot_due(round_index),
                lambda: self._present(before),
                before_put_at=before_put_at,
                ignores_departures=is_first,
            )
            result = current.run()
        except StateBehindError:
            self.behind = True
            raise
        except TrainerError:
            raise
        except Exception as error:
            # Nothing that lies in a bucket may end this node: an unforeseen error costs a round.
            logger.exception("round %d", round_index)
            raise RoundFailedError(f"round {round_index}: {type(error).__name__}: {error}") from error
        self._last, self._last_put_at = current.agreement, current.agreed_at
        if current.agreement is not None:
            self._note_absent(current.agreement)
            self.agreed_vocabulary_rows = current.agreement.vocabulary_rows
            self._committed(current.agreement)
        self.move_to(round_index + 1)
        return result

    def requested(self) -> bool:
        """Returns whether others wait for this node, or have gone on without it."""
        return self._is_requested

    def move_to(self, next_round: int) -> None:
        """Notes that the node trains towards this round."""
        self._next_round, self._is_requested = next_round, False
        if self._watcher is None and not self._is_closed:
            self._watcher = threading.Thread(target=self._watch, args=(next_round,), name="bucket-watch", daemon=True)
            self._watcher.start()

    def catch_up(self) -> None:
        """Notes that the node is fetching the others' state, until `move_to`."""
        self._next_round, self._is_requested = -1, False

    def leave(self) -> None:
        """Says in the bucket that this node does not come to its next round, so that nobody waits for it there."""
        round_index = self._next_round
        if round_index < 0:  # In a round, or fetching a state.
            has_contributed = self._current is not None and self._current.has_contributed
            round_index = self._tried_round + int(has_contributed)
        if round_index < 0:
            return
        try:
            put_departure(self._settings, round_index)
        except GenesisError as error:
            logger.info("the others wait for this node in round %d, since they cannot be told: %s", round_index, error)

    def close(self) -> None:
        """Ends the looking; a second call does nothing."""
        self._is_closed = True
        self._wake.set()

    def _agreement_before(self, round_index: int) -> tuple[Agreement | None, float]:
        """Returns the agreement of the round before, if there is one, and when it was put.

        Raises RoundFailedError while the bucket cannot be read.
        """
        if not round_index:
            return None, 0.0
        if self._last is not None and self._last.round_index == round_index - 1:
            return self._last, self._last_put_at
        settings = self._settings
        deadline_s = time.monotonic() + settings.round_timeout_s
        while not settings.stopping():
            try:
                history = History(settings.place, settings.rules, settings.refusal)
                found = history.accepted(round_index - 1)
                return found, 0.0 if found is None else history.put_at(found)
            except GenesisError as error:
                if time.monotonic() > deadline_s:
                    raise RoundFailedError(f"round {round_index}: {error}") from error
                logger.warning("round %d: %s; trying again", round_index, error)
            time.sleep(settings.config.poll_interval_s)
        raise RoundFailedError(f"round {round_index}: left before it began, since this node is to stop")

    def _present(self, before: Agreement | None) -> set[str]:
        """Returns who holds the state that the last round led to, and so trains towards this one."""
        if before is None:
            return set()
        settings = self._settings
        listed, allowed = settings.place.round(before.round_index).states, set(settings.config.members)
        coming = [member for member in listed if not allowed or member in allowed]
        known = [member for member in coming if member in before.keys]
        new = [member for member in coming if member not in before.keys][: settings.config.max_members]
        if before.round_index + 1 < self._waits_for_new_from:
            new = []
        self._awaited = {
            member
            for member in (*known, *new)
            if self._num_missed[member] < _MISSES and not settings.is_unwelcome(member)
        }
        self._new_awaited = self._awaited & set(new)
        return self._awaited

    def _note_absent(self, agreement: Agreement) -> None:
        """Counts who was waited for in vain: whoever says again and again that it comes is not believed for ever.

        Keys cost nothing, so those that are new share a pause: of 1, 2, 4, … rounds, until one of them has come.
        """
        for member in agreement.keys:
            self._num_missed.pop(member, None)
        for member in self._awaited - self._new_awaited - set(agreement.keys):
            self._num_missed[member] += 1
        if self._new_awaited & set(agreement.keys):
            self._num_missed_new = 0
        elif self._new_awaited:
            pause = min(1 << self._num_missed_new, _MOST_WITHOUT_NEW)
            self._waits_for_new_from = agreement.round_index + 1 + pause
            self._num_missed_new = min(self._num_missed_new + 1, _MOST_WITHOUT_NEW.bit_length())
        self._awaited, self._new_awaited = set(), set()

    def _watch(self, first_round: int) -> None:
        """Looks for others that wait; whatever goes wrong is left to the round."""
        take_back_departures(self._settings, first_round)
        while not self._wake.wait(self._settings.config.watch_interval_s):
            round_index = self._next_round
            if round_index < 0 or self._is_requested:
                continue
            try:
                found = self._is_awaited(round_index)
            except GenesisError as error:
                logger.debug("looking for others: %s", error)
                continue
            if found and self._next_round == round_index:
                self._is_requested = True

    def _is_awaited(self, round_index: int) -> bool:
        settings = self._settings
        listing = settings.place.round(round_index)
        self._clock.observe(listing.newest_at)
        has_contributed = any(each.member == settings.own_id for each in listing.contributions)
        if has_contributed and self._tried_round != round_index:
            # By an earlier life of this node, which then had all of the round's steps: it makes them again, and goes on
            # bit for bit as if it had not been killed.
            return False
        if listing.agreements:
            return True
        others = [each.put_at for each in listing.contributions if each.member != settings.own_id]
        return bool(others) and self._clock.now >= min(others) + settings.invite_after_s
