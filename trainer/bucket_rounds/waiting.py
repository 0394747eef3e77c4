"""How long one node stays in a round, for whom it waits there, and what it says of that meanwhile.

    round_timeout_s              the round has failed; sooner for a node without work, which nobody waits for
    asked to stop                a moment later it leaves the round, and its work is kept as after any failed one
    gather_timeout_s or longer   whoever was in the round before, or trains towards this one, may still come, if it has
                                 not said that it leaves

`rules` says from when on a round *may* close, by the store's times, for all members alike. This says what an honest
node does beyond that, by its own clock: it decides nothing that others judge.

Guarantees: no round outlasts its deadline; a node that is to stop is out of it after `_LEAVE_AFTER_S`, if the store
answers; whoever waits for others reads in the log for whom, at first after 5 s and then once a minute.

The trade-off: patience counts from when this node came, not from the first contribution. So after a break of the whole
run each waits anew for the others (``gather_timeout_s``, 60 s by default), and no old object has a round closed without
them. A node that comes back when the others are gone pays for that once, up to ``few_members_after_s`` (600 s).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from trainer.bucket_rounds.departures import Departures
from trainer.bucket_rounds.rules import RoundFacts, closing_after_s
from trainer.bucket_rounds.settings import BucketSettings
from trainer.errors import RoundFailedError, RoundLeftError

logger = logging.getLogger(__name__)

_LEAVE_AFTER_S: Final = 10.0
_TELL_AFTER_S: Final = 5.0  # For whom a round waits, in the log, and then again each minute.
_TELL_EVERY_S: Final = 60.0
_NOBODY_AFTER: Final = 4  # Times `gather_timeout_s`, for a node that has nothing to contribute.


class RoundWait:
    """One node's patience in one round, from when it is made; for one thread.

    ``awaited`` says who is waited for besides those of the round before; it may ask the store, and is asked only where
    that makes a difference. Whoever is among the ``departures`` is not waited for. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        settings: BucketSettings,
        facts: RoundFacts,
        awaited: Callable[[], Collection[str]] = tuple,
        departures: Departures | None = None,
        *,
        has_work: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._awaited = awaited
        self._departures = departures
        self._has_work = has_work
        self._clock = clock
        self._began_s = clock()
        self._tells_after_s = _TELL_AFTER_S
        self._asked_to_stop_s: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds in the round so far."""
        return self._clock() - self._began_s

    def check_time(self) -> None:
        """Raises RoundFailedError past the round's deadline, and RoundLeftError where this node is to stop."""
        settings, waited_s = self._settings, self.waited_s
        timeout_s = settings.round_timeout_s
        if not self._has_work:
            timeout_s = min(timeout_s, _NOBODY_AFTER * settings.rules.gather_timeout_s)
        if waited_s > timeout_s:
            raise RoundFailedError(f"round {self._facts.round_index}: no agreement within {timeout_s:.0f} s")
        if self._asked_to_stop_s is None and settings.stopping():
            self._asked_to_stop_s = waited_s
        if self._asked_to_stop_s is not None and waited_s > self._asked_to_stop_s + _LEAVE_AFTER_S:
            raise RoundLeftError("left the round, since this node is to stop")

    def pause(self, seconds: float) -> None:
        """Waits before the next look; where this node is to stop, for one ``poll_interval_s`` at most."""
        ends_s = self._clock() + seconds
        while (left_s := ends_s - self._clock()) > 0:
            time.sleep(min(left_s, self._settings.config.poll_interval_s))
            if self._settings.stopping():
                return

    def waits_for_others(self, members: Collection[str]) -> bool:
        """Returns whether somebody else than these is still to come, and this node has not waited long enough for that.

        Counted from when this node began to wait, whatever lies in the bucket from before a break of the whole run.
        """
        rules, before = self._settings.rules, self._facts.members_before
        if rules.quorum and len(members) >= rules.quorum:
            return False
        expected = set(members) | self._still_in_run(set(before) - set(members))
        patience_s = max(rules.gather_timeout_s, closing_after_s(members, expected & set(before), rules))
        if self.waited_s >= patience_s:
            return False
        if not before or expected > set(members):
            return True
        return bool(self._still_in_run(set(self._awaited()) - set(members)))

    def tell(self, there: Collection[str]) -> None:
        """Says now and then for whom the round waits besides these members, since training stands still meanwhile."""
        waited_s = self.waited_s
        if waited_s < self._tells_after_s:
            return
        self._tells_after_s = waited_s + _TELL_EVERY_S
        missing = {*self._facts.members_before, *self._awaited()} - set(there)
        names = sorted(member[:8] for member in self._still_in_run(missing))
        logger.info(
            "round %d waits for others since %.0f s: the work of %d is there, %s",
            *(self._facts.round_index, waited_s, len(there)),
            f"that of {', '.join(names[:8])} is not" if names else "nobody else is known to come",
        )

    def _still_in_run(self, members: Collection[str]) -> set[str]:
        """Returns those of these members that have not said to leave."""
        gone = () if self._departures is None else self._departures.among(members)
        return set(members) - {each.member for each in gone}
