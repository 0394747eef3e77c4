"""How much of a DHT node's memory the announcements of each run may take, and each host that files them.

A node stores records of any run for whoever asks, and identities cost nothing. While there is room all are stored. A
key (a run, or a partition of one) holds no more bytes than one answer to a look-up can carry, since more of them would
make the key unreadable. Where a key or the node is full, a new record takes the place of another: of the key with the
most records, there of the host that has filed the most, first of those that their nodes have never renewed, oldest
first. So made-up nodes push out each other, and a node that goes on announcing itself keeps its place.

A record is kept for at most `max_lifetime_s` after it was filed, whatever it says itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Place", "RecordQuotas"]

Place = tuple[bytes, str]
"""A key and a subkey."""

_MAX_RECORDS = 16_384
_MAX_BYTES_PER_KEY = 3 << 20
"""hivemind's messages hold 4 MiB; keys, subkeys and times come on top of the values."""
_MAX_LIFETIME_S = 600.0
_RENEWAL_S = 1.0
_OVERHEAD_BYTES = 128
"""Of a record in an answer, besides its value."""


@dataclass(slots=True)
class _Record:
    host: str
    size_bytes: int
    filed_s: float
    renewals: int = 0


class RecordQuotas:
    """Decides which records a node stores.

    Args:
        max_records: of all keys together.
        max_bytes_per_key: of a key's values.
        max_lifetime_s: until a record that is not renewed is dropped, in seconds.
        clock: seconds of any clock.
    """

    def __init__(
        self,
        *,
        max_records: int = _MAX_RECORDS,
        max_bytes_per_key: int = _MAX_BYTES_PER_KEY,
        max_lifetime_s: float = _MAX_LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_records = max_records
        self._max_bytes_per_key = max_bytes_per_key
        self._max_lifetime_s = max_lifetime_s
        self._clock = clock
        self._keys: dict[bytes, dict[str, _Record]] = {}
        self._num_bytes: Counter[bytes] = Counter()
        self._num_records = 0

    def __len__(self) -> int:
        return self._num_records

    def admit(self, key: bytes, subkey: str, size_bytes: int, host: str) -> list[Place] | None:
        """Makes room for a record that is new, or newer than the one in its place.

        Args:
            key: of the DHT.
            subkey: under it; there is one record for each.
            size_bytes: of its value.
            host: who files it, as `address_group` names it.

        Returns:
            Whose records are to be dropped for it; None: it is not to be stored.
        """
        now_s, size_bytes = self._clock(), size_bytes + _OVERHEAD_BYTES
        if size_bytes > self._max_bytes_per_key:
            return None
        new = _Record(host, size_bytes, now_s)
        before = self._keys.get(key, {}).get(subkey)
        if before is not None:
            new.host = before.host
            new.renewals = before.renewals + (now_s - before.filed_s >= _RENEWAL_S)
            self._remove((key, subkey))
        evicted: list[tuple[Place, _Record]] = []
        while (full := self._too_much(key, new)) is not None:
            victim = self._victim(full, key, new)
            if victim is None:
                for lost, record in evicted:
                    self._add(lost, record)
                if before is not None:
                    self._add((key, subkey), before)
                return None
            evicted.append((victim, self._keys[victim[0]][victim[1]]))
            self._remove(victim)
        self._add((key, subkey), new)
        return [place for place, _ in evicted]

    def overdue(self) -> list[Place]:
        """Records whose time is over; they are not counted any more."""
        limit_s = self._clock() - self._max_lifetime_s
        places = [
            (key, subkey)
            for key, records in self._keys.items()
            for subkey, it in records.items()
            if it.filed_s <= limit_s
        ]
        for place in places:
            self._remove(place)
        return places

    def _too_much(self, key: bytes, new: _Record) -> bytes | None:
        """The key in which something has to go for this record; None: there is room."""
        if self._num_bytes[key] + new.size_bytes > self._max_bytes_per_key:
            return key
        if self._num_records < self._max_records:
            return None
        return max(self._keys, key=lambda it: (len(self._keys[it]) + (it == key), it == key))

    def _victim(self, where: bytes, key: bytes, new: _Record) -> Place | None:
        records = self._keys.get(where, {})
        size = Counter(record.host for record in records.values())
        if where != key:
            # Another key, which holds more: whoever has the most there.
            subkey = min(
                records, key=lambda it: (records[it].renewals > 0, -size[records[it].host], records[it].filed_s)
            )
            return where, subkey
        size[new.host] += 1
        eligible = [
            subkey
            for subkey, it in records.items()
            if size[it.host] > size[new.host]
            or (it.host == new.host and (not it.renewals or it.renewals < new.renewals))
            or (size[it.host] == size[new.host] and not it.renewals)
        ]
        if not eligible:
            return None
        return where, min(
            eligible, key=lambda it: (records[it].renewals > 0, -size[records[it].host], records[it].filed_s)
        )

    def _add(self, place: Place, record: _Record) -> None:
        self._keys.setdefault(place[0], {})[place[1]] = record
        self._num_bytes[place[0]] += record.size_bytes
        self._num_records += 1

    def _remove(self, place: Place) -> None:
        records = self._keys[place[0]]
        self._num_bytes[place[0]] -= records.pop(place[1]).size_bytes
        self._num_records -= 1
        if not records:
            del self._keys[place[0]], self._num_bytes[place[0]]
