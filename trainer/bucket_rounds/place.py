"""A run's part of a bucket: bounded reads and writes, listings, and what all of that has cost.

What is called how stands in `object_names`. Whatever is called otherwise is passed over, one warning each time, and
listings are cut at `MAX_LISTED` names: whoever can write to the bucket can fill it, which a bucket's own policy has to
prevent, but cannot make a node read without bounds.

The trade-off: a listing shows what lies there, not what it is worth. Nothing in it is verified, so that a look costs
one request a thousand names, and whoever reads an object verifies it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from genesis.errors import GenesisError, ObjectNotFoundError, PreconditionFailedError
from genesis.store.base import CachePolicy, ObjectInfo, ReadableStore, Store
from manifests.serialisation import sha256_hex
from trainer.bucket_rounds.config import PRICES, PriceList
from trainer.bucket_rounds.object_names import (
    AGREEMENT_NAME,
    NAMES_OF_SLICES,
    REDUCED,
    REDUCED_NAME,
    ROUNDS,
    SLICES,
    SNAPSHOT_NAME,
    SNAPSHOTS,
    WISH_NAME,
    WISHES,
    parse_name,
    round_prefix,
)
from trainer.errors import MalformedAnswerError, TrainerError, TrainerUsageError
from trainer.network.rpc.token_buckets import TokenBuckets

logger = logging.getLogger(__name__)

MAX_LISTED: Final = 20_000
"""Names of one listing that are looked at."""
PAGE_NAMES: Final = 1000
"""Names that S3 lists at a time, each page a request."""
_LOG_EVERY_S: Final = 60.0
_CDN_REST_S: Final = 60.0

T = TypeVar("T")


@dataclass(slots=True)
class Cost:
    """Requests and bytes."""

    num_writes: int = 0  # PUT and LIST.
    num_reads: int = 0  # GET and HEAD.
    sent_bytes: int = 0
    received_bytes: int = 0
    num_cdn_reads: int = 0
    cdn_bytes: int = 0  # Received from a CDN, whose prices are its own.

    def since(self, before: Cost) -> Cost:
        """Returns what has come on top of ``before``."""
        return Cost(**{name: getattr(self, name) - getattr(before, name) for name in Cost.__slots__})

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
        if self.num_cdn_reads:
            said += f", {self.cdn_bytes / 1e6:.1f} MB from the CDN"
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
    departures: tuple[str, ...] = ()  # Members that say that they do not come to it.
    newest_at: float = 0.0  # Of all objects; 0: there are none.


@dataclass(slots=True)
class _Gathered:
    """A `RoundListing` in the making."""

    agreements: dict[int, ListedAgreement] = field(default_factory=dict)
    contributions: list[ListedContribution] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    departures: list[str] = field(default_factory=list)
    newest_at: float = 0.0

    def listing(self) -> RoundListing:
        """Returns what was gathered."""
        return RoundListing(
            self.agreements, tuple(self.contributions), tuple(self.states), tuple(self.departures), self.newest_at
        )


def _unix(info: ObjectInfo) -> float:
    return 0.0 if info.modified_at is None else info.modified_at.timestamp()


class Place:
    """A run's part of a store: bounded calls, counted. Safe from many threads; calls raise what the store does."""

    def __init__(self, store: Store, prices: PriceList = "s3", cdn: ReadableStore | None = None) -> None:
        self._store = store
        self._cdn = cdn
        self._cdn_rest_until_s = 0.0  # Until when a CDN that has failed is not asked.
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

    def get_verified(self, key: str, max_bytes: int, read: Callable[[bytes], T]) -> T | None:
        """Returns what ``read`` makes of an object; None: there is none.

        Where there is a CDN, its copy is read first. One that is missing there, too old, or not what ``read`` takes
        (it raises TrainerError) costs a read of the bucket, whose copy counts; a CDN that fails rests for a minute.
        """
        found = self._from_cdn(key, max_bytes, read)
        if found is not None:
            return found
        body = self.get(key, max_bytes)
        return None if body is None else read(body)

    def _from_cdn(self, key: str, max_bytes: int, read: Callable[[bytes], T]) -> T | None:
        if self._cdn is None or time.monotonic() < self._cdn_rest_until_s:
            return None
        try:
            body = self._cdn.get(key, max_bytes=max_bytes).body
            self._count(cdn_bytes=len(body), num_cdn_reads=1)
            return read(body)
        except ObjectNotFoundError:
            return None  # It may have looked before the object was there.
        except TrainerError as error:
            why: Exception = error
        except GenesisError as error:
            why = error
            self._cdn_rest_until_s = time.monotonic() + _CDN_REST_S
        if self._log_limit.take("cdn"):
            logger.warning("%s: read from the bucket instead of the CDN: %s", key[:160], why)
        return None

    def get_bounded(self, key: str, max_bytes: int) -> bytes | None:
        """Returns an object; None: there is none, or a larger one. For objects that no listing has shown."""
        found = self.get_dated(key, max_bytes)
        return None if found is None else found[0]

    def get_dated(self, key: str, max_bytes: int) -> tuple[bytes, float] | None:
        """As `get_bounded`, with the time at which it was put, Unix time by the store's clock."""
        info = self._bounded(key, max_bytes)
        body = None if info is None else self.get(key, max_bytes)
        return None if info is None or body is None else (body, _unix(info))

    def get_digested(self, key: str, max_bytes: int, sha256: str) -> tuple[bytes, float] | None:
        """As `get_dated`, of an object whose SHA-256 is known: a CDN's copy will do, and other bytes are none."""

        def checked(body: bytes) -> bytes:
            if sha256_hex(body) != sha256:
                raise MalformedAnswerError(f"expected bytes of SHA-256 {sha256[:12]}, found others")
            return body

        info = self._bounded(key, max_bytes)
        try:
            body = None if info is None else self.get_verified(key, max_bytes, checked)
        except MalformedAnswerError as error:
            logger.info("%s: %s", key[:160], error)
            return None
        return None if info is None or body is None else (body, _unix(info))

    def _bounded(self, key: str, max_bytes: int) -> ObjectInfo | None:
        self._count(num_reads=1)
        info = self._store.head(key)
        return None if info is None or info.size_bytes > max_bytes else info

    def size_bytes(self, key: str) -> int | None:
        """Returns the size of an object; None: there is none."""
        self._count(num_reads=1)
        info = self._store.head(key)
        return None if info is None else info.size_bytes

    def put_once(self, key: str, body: bytes | bytearray | memoryview) -> bool:
        """Puts an object unless there is one of that name; returns whether this one is there now."""
        self._count(num_writes=1)
        try:
            self._store.put(key, body, cache=CachePolicy.IMMUTABLE, if_absent=True)
        except PreconditionFailedError:
            is_put = False
        else:
            is_put = True
        self._count(sent_bytes=len(body))  # What fails in another way may have sent nothing.
        return is_put

    def replace(self, key: str, body: bytes) -> None:
        """Puts an object in the place of any other."""
        self._count(num_writes=1)
        self._store.put(key, body, cache=CachePolicy.NONE)
        self._count(sent_bytes=len(body))

    def delete(self, key: str) -> None:
        """Removes an object; stores ask nothing for that."""
        self._store.delete(key)

    def close(self) -> None:
        """Gives back connections."""
        self._store.close()
        if self._cdn is not None:
            self._cdn.close()

    def round(self, round_index: int) -> RoundListing:
        """Lists what there is of a round."""
        return self._gathered(self._listed(round_prefix(round_index))).get(round_index, RoundListing())

    def rounds(self) -> dict[int, RoundListing]:
        """Lists what there is of all rounds, by round; a request for each thousand names."""
        return self._gathered(self._rounds())

    def agreed_rounds(self) -> list[int]:
        """Returns the rounds of which there are agreements, in order."""
        return sorted({int(found[1]) for info in self._rounds() if (found := AGREEMENT_NAME.fullmatch(info.key))})

    def reduced(self, round_index: int) -> list[tuple[int, str]]:
        """Returns (slice, member) of the words on a round's slices; nothing of them is verified."""
        listed = self._listed(f"{REDUCED}{round_index:010d}/")
        found = (REDUCED_NAME.fullmatch(info.key) for info in listed)
        return [(int(match[2]), match[3]) for match in found if match is not None]

    def slices_before(self, before_round: int) -> list[str]:
        """Returns the names of slices, of what they come to, and of words on them, of rounds before that one."""
        listed = [info.key for prefix in (SLICES, REDUCED) for info in self._listed(prefix, MAX_LISTED * 100)]
        found = ((key, parse_name(key)) for key in listed)
        return [
            key
            for key, name in found
            if name is not None and name.kind in NAMES_OF_SLICES and name.round_index < before_round
        ]

    def _gathered(self, listed: Iterator[ObjectInfo]) -> dict[int, RoundListing]:
        """Sorts names of rounds by what they are of; others are passed over."""
        found: dict[int, _Gathered] = {}
        for info in listed:
            put_at, name = _unix(info), parse_name(info.key)
            if name is None or name.round_index < 0:
                self._warn(info.key)
                continue
            gathered = found.setdefault(name.round_index, _Gathered())
            gathered.newest_at = max(gathered.newest_at, put_at)
            last = info.key.rpartition("-")[2]
            if name.kind == "agreement":
                gathered.agreements[int(last)] = ListedAgreement(info.size_bytes, put_at)
            elif name.kind == "contribution":
                gathered.contributions.append(ListedContribution(name.member, last, info.size_bytes, put_at))
            elif name.kind == "state":
                gathered.states.append(name.member)
            elif name.kind == "departure":
                gathered.departures.append(name.member)
        return {number: each.listing() for number, each in found.items()}

    def snapshots(self) -> dict[tuple[int, str], list[str]]:
        """Returns the names of the objects of each snapshot, by round and digest."""
        found: dict[tuple[int, str], list[str]] = {}
        for info in self._listed(SNAPSHOTS):
            if match := SNAPSHOT_NAME.fullmatch(info.key):
                found.setdefault((int(match[1]), match[2]), []).append(info.key)
        return found

    def wishes(self, limit: int) -> list[tuple[str, float]]:
        """Returns who waits for a snapshot, and since when by the store's clock."""
        listed = ((WISH_NAME.fullmatch(info.key), _unix(info)) for info in self._listed(WISHES))
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

    def _count(self, **amounts: int) -> None:
        with self._guard:
            for name, amount in amounts.items():
                setattr(self._cost, name, getattr(self._cost, name) + amount)
