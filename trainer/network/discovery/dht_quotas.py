"""Quotas of a DHT node's memory, by run and by the hosts that store records.

Identities cost nothing. While there is room all records are stored. Where a key (which holds no more than one reply to
a look-up can carry) or the node is full, a new record replaces another: of the key with the most, there of the host
with the most, first of those that were never renewed, oldest first. So made-up nodes evict each other, and a node that
keeps announcing itself keeps its place. A record is kept for `max_lifetime_s` at most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

Place = tuple[bytes, str]

_RENEWAL_S = 1.0
_OVERHEAD_BYTES = 128  # Of a record in a reply, besides its value.


@dataclass(slots=True)
class _Record:
    host: str
    size_bytes: int
    stored_s: float
    renewals: int = 0


@dataclass(slots=True, eq=False)
class RecordQuotas:
    """Decides which records a node stores; the clock gives seconds."""

    _: KW_ONLY
    max_records: int = 16_384
    max_bytes_per_key: int = 3 << 20
    """hivemind's messages hold 4 MiB, which include keys, subkeys and times besides the values."""
    max_lifetime_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    _keys: dict[bytes, dict[str, _Record]] = field(default_factory=dict, init=False)
    _num_bytes: Counter[bytes] = field(default_factory=Counter, init=False)
    _num_records: int = field(default=0, init=False)

    def __len__(self) -> int:
        return self._num_records

    def admit(self, key: bytes, subkey: str, size_bytes: int, host: str) -> list[Place] | None:
        """Returns the records to drop for a value that ``host`` (`address_group`) stores; None: it is not stored."""
        now_s, size_bytes = self.clock(), size_bytes + _OVERHEAD_BYTES
        if size_bytes > self.max_bytes_per_key:
            return None
        new = _Record(host, size_bytes, now_s)
        before = self._keys.get(key, {}).get(subkey)
        if before is not None:
            new.host = before.host
            new.renewals = before.renewals + (now_s - before.stored_s >= _RENEWAL_S)
            self._remove((key, subkey))
        evicted: list[tuple[Place, _Record]] = []
        while (full := self._full_key(key, new)) is not None:
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
        """Returns the records whose time is over, and counts them no more."""
        limit_s = self.clock() - self.max_lifetime_s
        places = [
            (key, subkey)
            for key, records in self._keys.items()
            for subkey, it in records.items()
            if it.stored_s <= limit_s
        ]
        for place in places:
            self._remove(place)
        return places

    def _full_key(self, key: bytes, new: _Record) -> bytes | None:
        """Returns the key that must lose a record for this one; None: there is room."""
        if self._num_bytes[key] + new.size_bytes > self.max_bytes_per_key:
            return key
        if self._num_records < self.max_records:
            return None
        return max(self._keys, key=lambda it: (len(self._keys[it]) + (it == key), it == key))

    def _victim(self, where: bytes, key: bytes, new: _Record) -> Place | None:
        """Returns the record of ``where`` to replace; None: each has a better claim than the new one."""
        records = self._keys.get(where, {})
        size = Counter(record.host for record in records.values())
        eligible = list(records)  # Of another key, which holds more: any.
        if where == key:
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
            eligible, key=lambda it: (records[it].renewals > 0, -size[records[it].host], records[it].stored_s)
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
