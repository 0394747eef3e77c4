"""`AuditRates`: how often each worker is audited, and how often it was found to be wrong.

Whoever is new is audited with each of its first micro-batches, then half, a quarter and so on as it does well, down to
one in `every`; whoever was found to be wrong, with each until it has done well `FORGIVEN_AFTER` times. A new worker so
has some fifteen audits within its first 150 micro-batches, whatever `every` is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["FORGIVEN_AFTER", "STRIKES", "AuditRates"]

STRIKES = 2
"""Times to be found wrong, after which a worker is banned."""
FORGIVEN_AFTER = 8
_PASSED_PER_HALVING = 2
_MAX_WORKERS = 4096


@dataclass(slots=True)
class _Record:
    passed: int = 0
    passed_in_a_row: int = 0
    strikes: float = 0.0


class AuditRates:
    """Of all workers of a run, by key.

    Args:
        every: one micro-batch in so many of a worker that has proven itself; 0: none of anybody's.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def rate(self, key: str) -> float:
        """The share of a worker's micro-batches that is audited, 0 to 1."""
        if not self._every:
            return 0.0
        record = self._records.get(key, _Record())
        if record.strikes:
            return 1.0
        return max(1.0 / self._every, 2.0 ** -min(record.passed // _PASSED_PER_HALVING, 64))

    def passed(self, key: str) -> None:
        """It was compared and found to be right."""
        record = self._record(key)
        record.passed += 1
        record.passed_in_a_row += 1
        if record.passed_in_a_row >= FORGIVEN_AFTER:
            record.strikes = 0.0

    def struck(self, key: str, weight: float = 1.0) -> bool:
        """It was found to be wrong; returns whether that was once too often, and begins anew then.

        Args:
            key: whose.
            weight: less than 1 where it is less certain.
        """
        record = self._record(key)
        record.passed_in_a_row = 0
        record.strikes += weight
        if record.strikes < STRIKES:
            return False
        self._records[key] = _Record()
        return True

    def _record(self, key: str) -> _Record:
        record = self._records.setdefault(key, _Record())
        self._records.move_to_end(key)
        while len(self._records) > _MAX_WORKERS:
            self._records.popitem(last=False)
        return record
