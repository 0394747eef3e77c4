"""Who leaves a run in good order, so that nobody waits for it: a signed word in the bucket, for the round it misses.

    a node that stops ─▶ rounds/ROUND/departure-MEMBER ─▶ read while that round waits for the member
                                                       ─▶ in the agreement, which then may close the round without it

Guarantees: nobody is taken for gone but by its own signature, for one round. A node that says so and comes all the same
is in the round like any other. An agreement holds the departures that it goes by, so it is judged later from its own
bytes, whatever has become of the objects.

The trade-off: the word is for one round, so a node that is back for the next one is waited for as ever, and after a
break of the whole run nobody goes by what others had said before it: a node's first round waits for all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from genesis.errors import GenesisError
from trainer.bucket_rounds.documents import MAX_RECORD_BYTES, Departure
from trainer.bucket_rounds.object_names import departure_key
from trainer.bucket_rounds.place import RoundListing
from trainer.bucket_rounds.settings import BucketSettings
from trainer.errors import MalformedAnswerError

logger = logging.getLogger(__name__)

_NUM_ROUNDS: Final = 2  # For which a node may have left: one to which it had put nothing, and the next.


class Departures:
    """What members of one round have said of not coming; for one thread.

    Where it ``ignores_all``, nobody counts as gone.
    """

    def __init__(self, settings: BucketSettings, round_index: int, *, ignores_all: bool = False) -> None:
        self._settings = settings
        self._round_index = round_index
        self._ignores_all = ignores_all
        self._listed: frozenset[str] = frozenset()
        self._read: dict[str, Departure | None] = {}  # None: what lies there is none.

    def note(self, listing: RoundListing) -> None:
        """Learns which there are, by a listing of the round."""
        if not self._ignores_all:
            self._listed = frozenset(listing.departures)

    def among(self, members: Collection[str]) -> list[Departure]:
        """Returns the departures of those of these members who have left, sorted; raises what the store does."""
        found = (self._departure(member) for member in sorted(self._listed.intersection(members)))
        return [each for each in found if each is not None]

    def _departure(self, member: str) -> Departure | None:
        if member in self._read:
            return self._read[member]
        # None: taken back since the listing, or too large.
        body = self._settings.place.get_bounded(departure_key(self._round_index, member), MAX_RECORD_BYTES)
        self._read[member] = self._parsed(member, body or b"")
        return self._read[member]

    def _parsed(self, member: str, body: bytes) -> Departure | None:
        try:
            found = Departure.parse(body, self._settings.run_id)
            if (found.member, found.round_index) != (member, self._round_index):
                raise MalformedAnswerError("it is signed for another name than it has")
        except MalformedAnswerError as error:
            logger.warning("round %d: the departure of %s is ignored: %s", self._round_index, member[:12], error)
            return None
        logger.info("%s has left before round %d", member[:12], self._round_index)
        return found


def put_departure(settings: BucketSettings, round_index: int) -> None:
    """Says that this node does not come to a round; raises what the store does."""
    departure = Departure(run_id=settings.run_id, member=settings.own_id, round_index=round_index)
    settings.place.put_once(departure_key(round_index, settings.own_id), departure.signed(settings.identity).wire())


def take_back_departures(settings: BucketSettings, round_index: int) -> None:
    """Removes what an earlier life of this node has said of this round and the next; where it may not, that stays."""
    for number in range(round_index, round_index + _NUM_ROUNDS):
        with suppress(GenesisError):
            settings.place.delete(departure_key(number, settings.own_id))
