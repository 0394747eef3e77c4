"""Where in a bucket a run's rounds are, what is called how, and what reading and writing there has cost.

    run.json                                              what all nodes of the run have in common, put by the first
    rounds/ROUND/agreement-ATTEMPT                        kept for good: some KB a round
    rounds/ROUND/contribution-MEMBER-SHA256               removed some rounds later
    rounds/ROUND/state-MEMBER                             removed with them
    slices/ROUND/slice-MEMBER-NUMBER-SHA256               of contributions, where slices have reducers
    slices/ROUND/result-NUMBER-SHA256                     what a slice comes to
    reduced/ROUND/NUMBER-MEMBER                           who says so
    snapshots/ROUND-DIGEST/descriptor, pages, data-PART   the state after a round, for newcomers
    wishes/MEMBER                                         a newcomer waits for a snapshot

ROUND has ten digits, ATTEMPT three, PART six; MEMBER is a key, SHA256 that of the encoded vector. Whatever is called
otherwise is passed over, one warning each time, and listings are cut at `MAX_LISTED` names: whoever can write to the
bucket can fill it, which a bucket's own policy has to prevent, but cannot make a node read without bounds.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from genesis.errors import GenesisError, ObjectNotFoundError, PreconditionFailedError
from genesis.store.base import CachePolicy, ObjectInfo, Store
from trainer.bucket_rounds.config import PRICES, PriceList
from trainer.errors import TrainerUsageError
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 20_000
"""Names of one listing that are looked at."""
PAGE_NAMES: Final = 1000
"""Names that S3 lists at a time, each page a request."""
RUN_KEY: Final = "run.json"
ROUNDS: Final = "rounds/"
SLICES: Final = "slices/"
REDUCED: Final = "reduced/"
SNAPSHOTS: Final = "snapshots/"
WISHES: Final = "wishes/"
_LOG_EVERY_S: Final = 60.0

_AGREEMENT = re.compile(r"rounds/(\d{10})/agreement-(\d{3})")
_CONTRIBUTION = re.compile(r"rounds/(\d{10})/contribution-([0-9a-f]{64})-([0-9a-f]{64})")
_STATE = re.compile(r"rounds/(\d{10})/state-([0-9a-f]{64})")
_SLICE = re.compile(r"slices/(\d{10})/(?:slice-[0-9a-f]{64}|result)-\d{3}-[0-9a-f]{64}")
_REDUCED = re.compile(r"reduced/(\d{10})/(\d{3})-([0-9a-f]{64})")
_SNAPSHOT = re.compile(r"snapshots/(\d{10})-([0-9a-f]{64})/(descriptor|pages|data-\d{6})")
_WISH = re.compile(r"wishes/([0-9a-f]{64})")


@dataclass(slots=True)
class Cost:
    """Requests and bytes."""

    num_writes: int = 0  # PUT and LIST.
    num_reads: int = 0  # GET and HEAD.
    sent_bytes: int = 0
    received_bytes: int = 0

    def since(self, before: Cost) -> Cost:
        """Returns what has come on top of ``before``."""
        return Cost(
            self.num_writes - before.num_writes,
            self.num_reads - before.num_reads,
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
        )

    def dollars(self, prices: PriceList) -> float:
        """Returns the price by a list of prices, in US dollars."""
        each = PRICES[prices]
        return self.num_writes * each.write + self.num_reads * each.read + self.received_bytes / 1e9 * each.sent_gb

    def text(self, prices: PriceList) -> str:
        """For people."""
        said = (
            f"{self.num_writes + self.num_reads} requests, {self.sent_bytes / 1e6:.1f} MB sent, "
            f"{self.received_bytes / 1e6:.1f} MB received"
        )
        return said if prices == "none" else f"{said}, ${self.dollars(prices):.6f} at {prices} list prices"


@dataclass(frozen=True, slots=True)
class ListedContribution:
    """A contribution as a listing shows it; nothing of it is verified."""

    member: str
    payload_sha256: str
    size_bytes: int
    put_at: float  # Unix time by the store's clock.


@dataclass(frozen=True, slots=True)
class ListedAgreement:
    """An agreement as a listing shows it; nothing of it is verified."""

    size_bytes: int
    put_at: float  # As of a contribution.


@dataclass(frozen=True, slots=True)
class RoundListing:
    """What there is of a round."""

    agreements: dict[int, ListedAgreement] = field(default_factory=dict)  # By attempt.
    contributions: tuple[ListedContribution, ...] = ()
    states: tuple[str, ...] = ()  # Members that say what they hold after it.
    newest_at: float = 0.0  # Of all objects; 0: there are none.


def _unix(info: ObjectInfo) -> float:
    return 0.0 if info.modified_at is None else info.modified_at.timestamp()


def agreement_key(round_index: int, attempt: int) -> str:
    """Name of an agreement."""
    return f"{round_prefix(round_index)}agreement-{attempt:03d}"


def round_prefix(round_index: int) -> str:
    """What the names of a round's objects begin with."""
    return f"{ROUNDS}{round_index:010d}/"


def contribution_key(round_index: int, member: str, payload_sha256: str) -> str:
    """Name of a contribution."""
    return f"{round_prefix(round_index)}contribution-{member}-{payload_sha256}"


def state_key(round_index: int, member: str) -> str:
    """Name of a state record."""
    return f"{round_prefix(round_index)}state-{member}"


def slice_key(round_index: int, member: str, number: int, sha256: str) -> str:
    """Name of a slice of a contribution."""
    return f"{SLICES}{round_index:010d}/slice-{member}-{number:03d}-{sha256}"


def result_key(round_index: int, number: int, sha256: str) -> str:
    """Name of the encoded result of a slice."""
    return f"{SLICES}{round_index:010d}/result-{number:03d}-{sha256}"


def reduced_key(round_index: int, number: int, member: str) -> str:
    """Name of a member's word on a slice."""
    return f"{REDUCED}{round_index:010d}/{number:03d}-{member}"


def snapshot_prefix(round_index: int, digest: str) -> str:
    """What the names of a snapshot's objects begin with."""
    return f"{SNAPSHOTS}{round_index:010d}-{digest}/"


def wish_key(member: str) -> str:
    """Name of a newcomer's wish."""
    return f"{WISHES}{member}"


class Place:
    """A run's part of a store: bounded calls, counted. Safe from many threads; calls raise what the store does."""

    def __init__(self, store: Store, prices: PriceList = "s3") -> None:
        self._store = store
        self.prices: PriceList = prices
        self._cost = Cost()
        self._guard = threading.Lock()
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_EVERY_S)

    @property
    def url(self) -> str:
        """The bucket's address."""
        return self._store.url

    @property
    def cost(self) -> Cost:
        """What all calls so far have cost."""
        with self._guard:
            return Cost(**{name: getattr(self._cost, name) for name in Cost.__slots__})

    def check(self) -> None:
        """Raises TrainerUsageError if the store does not honour conditional writes, or cannot be written."""
        try:
            honours = self._store.conditional_writes
        except GenesisError as error:
            raise TrainerUsageError(f"--rounds: expected a bucket that can be written, found: {error}") from error
        if not honours:
            raise TrainerUsageError(
                f"--rounds: expected a store that honours If-None-Match, found that {self.url} ignores it, so one "
                "round could have two agreements; take another store (Amazon S3, Cloudflare R2, MinIO) or a folder "
                "that all nodes share"
            )

    def get(self, key: str, max_bytes: int) -> bytes | None:
        """Returns an object; None: there is none."""
        self._count(num_reads=1)
        try:
            body = self._store.get(key, max_bytes=max_bytes).body
        except ObjectNotFoundError:
            return None
        self._count(received_bytes=len(body))
        return body

    def get_bounded(self, key: str, max_bytes: int) -> bytes | None:
        """Returns an object; None: there is none, or a larger one. For objects that no listing has shown."""
        found = self.get_dated(key, max_bytes)
        return None if found is None else found[0]

    def get_dated(self, key: str, max_bytes: int) -> tuple[bytes, float] | None:
        """As `get_bounded`, with the time at which it was put, Unix time by the store's clock."""
        self._count(num_reads=1)
        info = self._store.head(key)
        if info is None or info.size_bytes > max_bytes:
            return None
        body = self.get(key, max_bytes)
        return None if body is None else (body, _unix(info))

    def put_once(self, key: str, body: bytes | bytearray | memoryview) -> bool:
        """Puts an object unless there is one of that name; returns whether this one is there now."""
        self._count(num_writes=1, sent_bytes=len(body))
        try:
            self._store.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            return False
        return True

    def replace(self, key: str, body: bytes) -> None:
        """Puts an object in the place of any other."""
        self._count(num_writes=1, sent_bytes=len(body))
        self._store.put(key, body, cache=CachePolicy.NONE)

    def delete(self, key: str) -> None:
        """Removes an object; stores ask nothing for that."""
        self._store.delete(key)

    def close(self) -> None:
        """Gives back connections."""
        self._store.close()

    def round(self, round_index: int) -> RoundListing:
        """Lists what there is of a round."""
        agreements: dict[int, ListedAgreement] = {}
        contributions: list[ListedContribution] = []
        states: list[str] = []
        newest_at = 0.0
        for info in self._listed(round_prefix(round_index)):
            put_at = _unix(info)
            newest_at = max(newest_at, put_at)
            if found := _AGREEMENT.fullmatch(info.key):
                agreements[int(found[2])] = ListedAgreement(info.size_bytes, put_at)
            elif found := _CONTRIBUTION.fullmatch(info.key):
                contributions.append(ListedContribution(found[2], found[3], info.size_bytes, put_at))
            elif found := _STATE.fullmatch(info.key):
                states.append(found[2])
            else:
                self._warn(info.key)
        return RoundListing(agreements, tuple(contributions), tuple(states), newest_at)

    def agreed_rounds(self) -> list[int]:
        """Returns the rounds of which there are agreements, in order."""
        return sorted({int(found[1]) for info in self._rounds() if (found := _AGREEMENT.fullmatch(info.key))})

    def reduced(self, round_index: int) -> list[tuple[int, str]]:
        """Returns (slice, member) of the words on a round's slices; nothing of them is verified."""
        listed = self._listed(f"{REDUCED}{round_index:010d}/")
        found = (_REDUCED.fullmatch(info.key) for info in listed)
        return [(int(match[2]), match[3]) for match in found if match is not None]

    def removable(self, before_round: int, *, has_slices: bool = False) -> list[str]:
        """Returns the names of contributions, state records, slices and words on them of rounds before that one."""
        listed = [info.key for info in self._rounds()]
        if has_slices:
            listed += [info.key for prefix in (SLICES, REDUCED) for info in self._listed(prefix, MAX_LISTED * 100)]
        patterns = (_CONTRIBUTION, _STATE, _SLICE, _REDUCED)
        found = ((key, next(filter(None, (pattern.fullmatch(key) for pattern in patterns)), None)) for key in listed)
        return [key for key, match in found if match is not None and int(match[1]) < before_round]

    def snapshots(self) -> dict[tuple[int, str], list[str]]:
        """Returns the names of the objects of each snapshot, by round and digest."""
        found: dict[tuple[int, str], list[str]] = {}
        for info in self._listed(SNAPSHOTS):
            if match := _SNAPSHOT.fullmatch(info.key):
                found.setdefault((int(match[1]), match[2]), []).append(info.key)
        return found

    def wishes(self, limit: int) -> list[tuple[str, float]]:
        """Returns who waits for a snapshot, and since when by the store's clock."""
        listed = ((_WISH.fullmatch(info.key), _unix(info)) for info in self._listed(WISHES))
        return [(match[1], put_at) for match, put_at in islice(listed, limit) if match is not None]

    def _rounds(self) -> Iterator[ObjectInfo]:
        return self._listed(ROUNDS, MAX_LISTED * 100)

    def _listed(self, prefix: str, limit: int = MAX_LISTED) -> Iterator[ObjectInfo]:
        number = 0
        self._count(num_writes=1)
        for number, info in enumerate(self._store.list(prefix), 1):
            if number > limit:
                if self._log_limit.take("listing"):
                    logger.warning("%s/%s: more than %d objects; the rest is passed over", self.url, prefix, limit)
                break
            if number % PAGE_NAMES == 0:
                self._count(num_writes=1)
            yield info

    def _warn(self, key: str) -> None:
        if self._log_limit.take("name"):
            logger.warning("%s: an object that belongs to no round is passed over: %s", self.url, key[:160])

    def _count(self, *, num_writes: int = 0, num_reads: int = 0, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        with self._guard:
            self._cost.num_writes += num_writes
            self._cost.num_reads += num_reads
            self._cost.sent_bytes += sent_bytes
            self._cost.received_bytes += received_bytes
