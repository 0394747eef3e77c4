"""Others' contributions to a round: which of those listed are read, and what is found in them.

    listed ─▶ wanted (bounded a key, and over all new keys) ─▶ fetched ─▶ verified ─▶ of this round, or rejected

`wanted` is a pure function of a listing and of what was read before. `FetchedContributions` reads on four threads, and
remembers for the length of one round what it has found: each object is read once, and judged once.

Guarantees: what is `read` is signed by the key in its name, has the payload of the digest in its name, and comes from
somebody who may take part. Nothing is read before its size is known to be possible. An object that is wrong is rejected
alone; what the store raises goes to the caller, and what was not read then is read at the next look.

The trade-off: payloads stay in memory until the round ends, ``max_members`` vectors as encoded (of 48 members of 125M
parameters in int8 6 GB, in the sparse form 0.13 GB), so that no byte is paid for twice, and an agreement on what is
already there is followed at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from trainer.bucket_rounds.documents import MAX_HEADER_BYTES, ContributionHeader, split_contribution
from trainer.bucket_rounds.forms import Payload
from trainer.bucket_rounds.object_names import contribution_key
from trainer.bucket_rounds.place import ListedContribution, RoundListing
from trainer.bucket_rounds.rules import PutContribution, RoundFacts
from trainer.bucket_rounds.settings import BucketSettings
from trainer.collective.planning import coordinator_order
from trainer.errors import MalformedAnswerError, RefusedError

logger = logging.getLogger(__name__)

ContributionId: TypeAlias = tuple[str, str]
"""Of a contribution to one round: its member, and the SHA-256 of its payload, as its name says them."""
OwnCopy: TypeAlias = Callable[[ContributionId], tuple[ContributionHeader, Payload] | None]
"""What this node has itself put under a name, which it need not read again; None: it has not."""

_FETCHING_THREADS: Final = 4
_MOST_EACH: Final = 4  # Contributions of one member to one round that are looked at, and other objects of its name.
_MOST_OF_NEW: Final = 2  # Of a member that was not in the round before.


@dataclass(frozen=True, slots=True)
class FetchedContribution:
    """A contribution that was read and verified."""

    put: PutContribution
    payload: Payload | None  # None: of another state, so it is in no round of this node's.


def wanted(
    listing: RoundListing,
    seen: Collection[ContributionId],
    facts: RoundFacts,
    *,
    run_id: str,
    known: Collection[str],
    max_members: int,
    is_likely: Callable[[ListedContribution], bool] = lambda _listed: True,
) -> list[ListedContribution]:
    """Returns the contributions that are new and may be read, those of ``known`` members first.

    Of keys that are not known, which cost whoever makes them nothing, as many payloads are read in all as a round may
    have members, at most two of one key; of more, in the round's own order. What is not likely to be a contribution to
    this round is counted by itself: whoever puts small objects under a member's name keeps nobody from its work.

    Args:
        listing: What there is of the round.
        seen: Contributions that were read before, or rejected.
        facts: The round.
        run_id: The run's name, which the order of the round goes by.
        known: Members of the round before, and those that the run names.
        max_members: Members that a round may have.
        is_likely: Whether it has the size that a contribution to this round has.
    """
    unlikely = {id_of(each) for each in listing.contributions if not is_likely(each)}
    numbers = Counter((key[0], key in unlikely and key[0] in known) for key in seen)
    num_new = sum(number for (member, _), number in numbers.items() if member not in known)
    order = coordinator_order(run_id, facts.round_index, {each.member for each in listing.contributions})
    rank = {member: place for place, member in enumerate(order)}
    found = []
    for each in sorted(listing.contributions, key=lambda it: it.put_at):
        if id_of(each) in seen:
            continue
        counted = (each.member, id_of(each) in unlikely and each.member in known)
        if numbers[counted] < (_MOST_EACH if each.member in known else _MOST_OF_NEW):
            found.append((each.member not in known, numbers[counted], rank[each.member], each))
            numbers[counted] += 1
    found.sort(key=lambda it: it[:3])
    room = max(0, max_members - num_new)
    old = [each for is_new, _, _, each in found if not is_new]
    return old + [each for is_new, _, _, each in found if is_new][:room]


def id_of(listed: ListedContribution) -> ContributionId:
    """Returns what a contribution is called in its round."""
    return listed.member, listed.payload_sha256


class FetchedContributions:
    """What one node has read of the contributions to one round; for one thread.

    ``own_copy`` says what this node has put itself, so that it need not be read.
    """

    def __init__(
        self, settings: BucketSettings, facts: RoundFacts, max_payload_bytes: int, own_copy: OwnCopy = lambda _id: None
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._max_payload_bytes = max_payload_bytes
        self._max_bytes = max_payload_bytes + MAX_HEADER_BYTES + 1
        self._own_copy = own_copy
        self._read: dict[ContributionId, FetchedContribution] = {}
        self._rejected: set[ContributionId] = set()

    @property
    def read(self) -> Mapping[ContributionId, FetchedContribution]:
        """All that were verified, also those that began with another state."""
        return MappingProxyType(self._read)

    @property
    def rejected(self) -> Set[ContributionId]:
        """Those that are none, or whose members may not take part."""
        return self._rejected

    @property
    def num_judged(self) -> int:
        """How many were read or rejected so far."""
        return len(self._read) + len(self._rejected)

    @property
    def fitting(self) -> dict[ContributionId, FetchedContribution]:
        """Those that can be in a round with this node, sorted."""
        return {key: each for key, each in sorted(self._read.items()) if each.payload is not None}

    def wanted(self, listing: RoundListing) -> list[ListedContribution]:
        """Returns what is to be read of a listing, see `wanted`."""
        config, facts = self._settings.config, self._facts
        before = () if facts.before is None else facts.before.keys
        return wanted(
            listing,
            self._read.keys() | self._rejected,
            facts,
            run_id=self._settings.run_id,
            known={*before, *config.members, self._settings.own_id},
            max_members=config.max_members,
            is_likely=lambda each: self._max_payload_bytes < each.size_bytes <= self._max_bytes,
        )

    def fetch(self, listed: Sequence[ListedContribution]) -> None:
        """Reads and verifies contributions, each once; raises what the store does, and keeps what came all the same."""
        new = [each for each in listed if id_of(each) not in self._read and id_of(each) not in self._rejected]
        if not new:
            return
        with ThreadPoolExecutor(min(_FETCHING_THREADS, len(new)), thread_name_prefix="bucket-fetch") as pool:
            futures = [pool.submit(self._fetched, each) for each in new]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for each, future in zip(new, futures, strict=True):
            if future.exception() is None:
                self._judge(each, future.result())
        if errors:
            raise errors[0]

    def _judge(self, listed: ListedContribution, found: FetchedContribution | Exception | None) -> None:
        if isinstance(found, FetchedContribution):
            self._read[id_of(listed)] = found
        elif found is not None:
            self._rejected.add(id_of(listed))
            logger.warning("round %d: what %s put is ignored: %s", self._facts.round_index, listed.member[:12], found)

    def _fetched(self, listed: ListedContribution) -> FetchedContribution | Exception | None:
        """Returns a contribution, why it is none, or None where it is not there any more."""
        own = self._own_copy(id_of(listed))
        if own is None and listed.size_bytes > self._max_bytes:
            return MalformedAnswerError(f"expected at most {self._max_bytes} bytes, found {listed.size_bytes}")
        try:
            found = own or self._verified(listed)
        except MalformedAnswerError as error:
            return error
        if found is None:
            return None
        header, payload = found
        why = self._settings.refusal(header, listed.put_at)
        if why:
            return RefusedError("member", why)
        return FetchedContribution(
            PutContribution(header, listed.put_at), payload if self._facts.fits(header) else None
        )

    def _verified(self, listed: ListedContribution) -> tuple[ContributionHeader, Payload] | None:
        """Reads a contribution; None: it is not there. Raises MalformedAnswerError for what is not as named."""

        def verified(body: bytes) -> tuple[ContributionHeader, Payload]:
            header, payload = split_contribution(body, self._settings.run_id)
            name = (header.round_index, header.member, header.payload_sha256)
            if name != (self._facts.round_index, *id_of(listed)):
                raise MalformedAnswerError("it is signed for another name than it has")
            return header, payload

        key = contribution_key(self._facts.round_index, *id_of(listed))
        return self._settings.place.get_verified(key, self._max_bytes, verified)
