"""Several addresses of one store, asked for an object in turn until one gives bytes that hold.

The mirror that last gave a good answer is asked first. One whose bytes do not hold is asked once more. Rounds go on
until the deadline, or until three times every mirror was reached and none had the object as it should be (a CDN may
remember for a moment that there was none). A mirror that sends Retry-After is left alone until then. Each of several
mirrors has 20 s a turn beyond the time its bytes take, so a dead one costs a shard 20 s once and nothing afterwards; a
single mirror has 60.
"""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from genesis.errors import GenesisError, StoreError, StoreUnavailableError
from genesis.store import ReadableStore, RetryPolicy, open_readable
from genesis.store.limits import Throttle
from loader.errors import CorruptObjectError, DataUnavailableError, LoaderUsageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TURN_S: Final = 20.0
_LONE_TURN_S: Final = 60.0
_HOPELESS_ROUNDS: Final = 3
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_SLOWEST_BYTES_PER_S: Final = 16_000.0
"""128 kbit/s: a turn does not end while bytes come at that rate, or they would be lost."""
_JITTER: Final = random.Random()  # Not the training's seeded one: retries must not change batches.


class ObjectAbsentError(DataUnavailableError):
    """Every mirror was reached, and none has the object."""


class Mirrors:
    """The stores of one address list.

    Args:
        addresses: of the same store, in the order of preference.
        timeout_s: how long an object is tried for.
        max_bytes_per_s: cap on all downloads together.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float, max_bytes_per_s: float | None = None) -> None:
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._max_bytes_per_s = max_bytes_per_s
        self._opened: list[ReadableStore] = []
        self._preferred = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses without credentials."""
        return tuple(store.url for store in self._stores())

    @property
    def received_bytes(self) -> int:
        """Bytes that came over a network, wrong ones and retries included; a folder sends none."""
        return sum(store.received_bytes for store in self._opened)

    def fetch(self, key: str, max_bytes: int, accept: Callable[[bytes], T]) -> T:
        """Fetches an object.

        Args:
            key: its name.
            max_bytes: larger answers are refused unread.
            accept: checks and converts the bytes, or raises `CorruptObjectError`.

        Raises:
            ObjectAbsentError: no mirror has it.
            DataUnavailableError: no mirror gave it within the deadline.
            CorruptObjectError: every mirror that has it gives wrong bytes.
        """
        deadline = time.monotonic() + self._timeout_s
        failures: dict[int, Exception] = {}
        resting_until: dict[int, float] = {}
        rounds = hopeless_rounds = 0
        while True:
            for position in self._order():
                if time.monotonic() < resting_until.get(position, 0.0):
                    continue
                try:
                    return self._accepted(position, key, max_bytes, accept)
                except (StoreError, CorruptObjectError) as error:
                    failures[position] = error
                    resting_until[position] = time.monotonic() + _asked_to_wait_s(error)
                    logger.debug("%s", error)
                if time.monotonic() >= deadline:
                    raise self._unavailable(key, failures)
            rounds += 1
            may_pass = any(isinstance(error, StoreUnavailableError) for error in failures.values())
            hopeless_rounds = 0 if may_pass else hopeless_rounds + 1
            if hopeless_rounds == _HOPELESS_ROUNDS:
                raise self._final(key, failures)
            pause_s = max(_backoff_s(rounds), min(resting_until.values()) - time.monotonic())
            if time.monotonic() + pause_s >= deadline:
                raise self._unavailable(key, failures)
            if rounds == 1:
                told = "; ".join(str(error) for error in failures.values())
                logger.warning("%s: trying for %.0f s more: %s", key, deadline - time.monotonic(), told)
            time.sleep(pause_s)

    def each(self) -> list[ReadableStore]:
        """The stores, the preferred one first."""
        return [self._stores()[position] for position in self._order()]

    def close(self) -> None:
        """Closes connections."""
        _close(self._opened)

    def _accepted(self, position: int, key: str, max_bytes: int, accept: Callable[[bytes], T]) -> T:
        store = self._stores()[position]
        try:
            result = accept(store.get(key, max_bytes=max_bytes).body)
        except CorruptObjectError as error:
            # Bytes damaged in transit are right the second time.
            logger.warning("%s: %s; fetching it again", store.url, error)
            result = accept(store.get(key, max_bytes=max_bytes).body)
        self._preferred = position
        return result

    def _order(self) -> list[int]:
        others = [position for position in range(len(self._addresses)) if position != self._preferred]
        return [self._preferred, *others]

    def _stores(self) -> list[ReadableStore]:
        if not self._opened:
            throttle = Throttle(self._max_bytes_per_s) if self._max_bytes_per_s else None
            turn_s = _LONE_TURN_S if len(self._addresses) == 1 else _TURN_S
            policy = RetryPolicy(slowest_bytes_per_s=_SLOWEST_BYTES_PER_S).lasting(
                max(1.0, min(turn_s, self._timeout_s))
            )
            try:
                self._opened = [open_readable(url, policy=policy, throttle=throttle) for url in self._addresses]
                weakref.finalize(self, _close, self._opened)
            except GenesisError as error:
                raise LoaderUsageError(str(error)) from None
        return self._opened

    def _unavailable(self, key: str, failures: dict[int, Exception]) -> DataUnavailableError:
        told = "; ".join(str(error) for error in failures.values())
        return DataUnavailableError(f"{key}: no mirror gave it within {self._timeout_s:.0f} s: {told}")

    def _final(self, key: str, failures: dict[int, Exception]) -> DataUnavailableError | CorruptObjectError:
        told = "; ".join(f"{self._stores()[position].url}: {error}" for position, error in failures.items())
        if any(isinstance(error, CorruptObjectError) for error in failures.values()):
            return CorruptObjectError(f"{told}; have the store mended ('genesis verify' finds what is wrong)")
        return ObjectAbsentError(f"{key}: {told}")


def _close(stores: Sequence[ReadableStore]) -> None:
    for store in stores:
        store.close()


def _asked_to_wait_s(error: Exception) -> float:
    return (error.retry_after_s or 0.0) if isinstance(error, StoreUnavailableError) else 0.0


def _backoff_s(rounds: int) -> float:
    """Half is jitter, so that nodes that lost a server together do not return together."""
    longest_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** (rounds - 1))
    return longest_s * _JITTER.uniform(0.5, 1.0)
