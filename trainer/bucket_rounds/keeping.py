"""What a node does for a bucket besides rounds: says what it holds, stores states for newcomers, removes what is old.

All of it runs behind the round, in a thread of its own, and costs the run nothing if it fails: whoever closes the next
round looks again. Contributions are kept from the newest whole snapshot on, so that whoever takes that up can follow;
of snapshots the newest two. Agreements stay, some KB a round: they are what keeps a round from being made twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from genesis.errors import GenesisError
from genesis.populate.crashpoint import crash_point
from trainer.bucket_rounds.documents import MAX_RECORD_BYTES, Agreement, StateRecord, Wish, credential_field
from trainer.bucket_rounds.history import History, kept_evidence
from trainer.bucket_rounds.object_names import contribution_key, departure_key, snapshot_prefix, state_key, wish_key
from trainer.bucket_rounds.rules import place_in_order
from trainer.bucket_rounds.settings import BucketSettings, StoreClock
from trainer.bucket_rounds.snapshots import put_snapshot
from trainer.errors import MalformedAnswerError
from trainer.network.transfer.descriptor import Descriptor, Meta
from trainer.network.transfer.snapshot import describe_chunks

logger = logging.getLogger(__name__)

_KEPT_SNAPSHOTS: Final = 2
_WISH_LIFE_S: Final = 3600.0
_MOST_WISHES: Final = 16
_SNAPSHOT_INTERVALS: Final = 16
"""Times `snapshot_rounds`, in which the newest snapshot is looked for: one is due in each of them."""

Packed = tuple[Meta, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Keeping:
    """One node's part in keeping a bucket in order; its methods block, and raise what the store does."""

    settings: BucketSettings
    clock: StoreClock
    history: History = field(init=False)
    _vouched: dict[int, StateRecord] = field(default_factory=dict, init=False)
    _without: set[int] = field(default_factory=set, init=False)  # Rounds whose agreement asks for no snapshot.
    _cleaned: set[int] = field(default_factory=set, init=False)  # Rounds of which only evidence is left.

    def __post_init__(self) -> None:
        settings = self.settings
        object.__setattr__(self, "history", History(settings.place, settings.rules, settings.refusal))

    def is_snapshot_due(self, round_index: int) -> bool:
        """Returns whether the state after a round is to be stored; False if that cannot be found out."""
        place, config = self.settings.place, self.settings.config
        try:
            newest = max(self.snapshots(round_index), default=-1)
            if round_index - newest >= config.snapshot_rounds:
                return True
            return newest < round_index - 1 and any(map(self._is_wished, place.wishes(_MOST_WISHES)))
        except GenesisError as error:
            logger.info("whether newcomers wait is not known: %s", error)
            return False

    def record(self, agreement: Agreement, state_digest: str, pack: Callable[[], Packed | None]) -> None:
        """Says what this node holds after a round; where a snapshot is asked for and it is its turn, stores that."""
        settings = self.settings
        packed = pack() if agreement.has_snapshot else None
        described = None if packed is None else describe_chunks(*packed)
        record = StateRecord(
            run_id=settings.run_id,
            member=settings.own_id,
            round_index=agreement.round_index,
            agreement=agreement.digest,
            state_digest=state_digest,
            snapshot="" if described is None else described[0].digest,
            credential=credential_field(settings.credential()),
        ).signed(settings.identity)
        self._say(record)
        crash_point("bucket-state-put")
        order = place_in_order(settings.rules, agreement.round_index, agreement.keys, ())
        if packed is not None and described is not None and order[0] == settings.own_id:
            self._store(agreement.round_index, *described, packed[1])

    def _say(self, record: StateRecord) -> None:
        """Puts a record unless an earlier life of this node has; what others have put under its name is replaced."""
        place, key = self.settings.place, state_key(record.round_index, record.member)
        if place.put_once(key, record.wire()):
            return
        try:
            there = StateRecord.parse(place.get_bounded(key, MAX_RECORD_BYTES) or b"", self.settings.run_id)
            is_own = (there.member, there.round_index) == (record.member, record.round_index)
        except MalformedAnswerError:
            is_own = False
        if not is_own:
            logger.warning("%s/%s is replaced: it is no record of this node's", place.url, key)
            place.replace(key, record.wire())

    def _store(self, round_index: int, descriptor: Descriptor, pages: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Stores a snapshot whole, or nothing of it: a bucket that is full is not filled up with parts of each."""
        place = self.settings.place
        try:
            put_snapshot(place, round_index, descriptor, pages, tensors)
        except GenesisError as error:
            logger.warning("the state after round %d is not stored for newcomers: %s", round_index, error)
            keys = place.snapshots().get((round_index, descriptor.digest), [])
            if not any(key.endswith("/descriptor") for key in keys):
                for key in keys:
                    place.delete(key)
            return
        logger.info("stored the state after round %d for newcomers", round_index)

    def remove_old(self, agreement: Agreement) -> None:
        """Removes what nobody needs, if this node has closed the round."""
        if agreement.member == self.settings.own_id and self.settings.removes:
            self.clean(agreement.round_index)

    def clean(self, newest_round: int) -> None:
        """Removes what nobody needs, the newest agreed round being that one."""
        place, config = self.settings.place, self.settings.config
        whole = self.snapshots(newest_round, most=_KEPT_SNAPSHOTS)
        if not whole:
            return
        newest = max(whole)
        for (round_index, digest), keys in place.snapshots().items():
            if whole.get(round_index) != digest and round_index < newest:
                for key in sorted(keys, key=lambda it: not it.endswith("/descriptor")):  # Without it, it is not whole.
                    place.delete(key)
        oldest, rounds = min(newest, newest_round + 1 - config.keep_rounds), place.rounds()
        new = {number for number in rounds if number < oldest} - self._cleaned
        kept = kept_evidence(self.history, rounds, new)
        for number in sorted(new):
            contributions, states = rounds[number].contributions, rounds[number].states
            for member in rounds[number].departures:  # The agreement has those that counted.
                place.delete(departure_key(number, member))
            if (number, "contribution") not in kept:
                for each in contributions:
                    place.delete(contribution_key(number, each.member, each.payload_sha256))
            if (number, "state") not in kept:
                for member in states:
                    place.delete(state_key(number, member))
        if config.num_slices:
            for key in place.slices_before(oldest):
                place.delete(key)
        self._cleaned.update(new)

    def snapshots(self, newest_round: int, most: int = 1) -> dict[int, str]:
        """Returns the digests of the newest whole snapshots that most members vouch for, by round; at most so many.

        Looked for round by round, by what agreements ask for and members vouch for: others that somebody has put under
        such names are not even seen. Of later rounds than ``newest_round`` there are none.
        """
        found, config = dict[int, str](), self.settings.config
        oldest = max(0, newest_round - _SNAPSHOT_INTERVALS * config.snapshot_rounds)
        for round_index in range(newest_round, oldest - 1, -1):
            if round_index in self._without:
                continue
            if round_index not in self._vouched:
                agreement = self.history.accepted(round_index)
                if agreement is None:
                    continue
                if not agreement.has_snapshot:
                    self._without.add(round_index)
                    continue
                record = self.history.vouched_state(agreement)
                if record is None or not record.snapshot:
                    continue
                self._vouched[round_index] = record
            digest = self._vouched[round_index].snapshot
            if self.settings.place.size_bytes(f"{snapshot_prefix(round_index, digest)}descriptor") is not None:
                found[round_index] = digest
            if len(found) >= most:
                break
        return found

    def vouched(self, round_index: int) -> StateRecord:
        """Returns what most members said of a round whose snapshot `snapshots` has returned."""
        return self._vouched[round_index]

    def wish(self) -> None:
        """Asks for a snapshot."""
        settings = self.settings
        wish = Wish(
            run_id=settings.run_id, member=settings.own_id, credential=credential_field(settings.credential())
        ).signed(settings.identity)
        settings.place.replace(wish_key(settings.own_id), wish.wire())

    def withdraw_wish(self) -> None:
        """Takes that back."""
        self.settings.place.delete(wish_key(self.settings.own_id))

    def _is_wished(self, listed: tuple[str, float]) -> bool:
        member, put_at = listed
        settings = self.settings
        if put_at < self.clock.now - _WISH_LIFE_S or (
            settings.config.members and member not in settings.config.members
        ):
            return False
        body = settings.place.get_bounded(wish_key(member), MAX_RECORD_BYTES)
        try:
            return body is not None and Wish.parse(body, settings.run_id).member == member
        except MalformedAnswerError as error:
            logger.info("the wish of %s is passed over: %s", member[:12], error)
            return False
