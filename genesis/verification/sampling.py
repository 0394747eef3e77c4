"""Which shards a verification reads: all, or a seeded sample that anyone can repeat."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from genesis.errors import UsageError

__all__ = ["EVERY_SHARD", "Sample"]

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Sample:
    """A share of the shards (0 to 1) or a number of them; every shard if both are None."""

    share: float | None = None
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> Sample:
        """``1%``, ``0.5 %`` or a number of shards such as ``100``.

        Raises:
            UsageError: it is neither.
        """
        percent = _PERCENT.fullmatch(text.strip())
        if percent and 0 < float(percent[1]) <= 100:
            return cls(share=float(percent[1]) / 100)
        if _NUMBER.fullmatch(text.strip()) and int(text) > 0:
            return cls(number=int(text))
        raise UsageError(f"--sample: expected a share such as 1% or a number of shards, found {text!r}")

    def choose(self, total_shards: int, seed: int) -> frozenset[int] | None:
        """The shards to read, at least one; None for all."""
        if self.share is not None:
            wanted = max(1, round(total_shards * self.share))
        elif self.number is not None:
            wanted = self.number
        else:
            return None
        if wanted >= total_shards:
            return None
        return frozenset(random.Random(seed).sample(range(total_shards), wanted))


EVERY_SHARD = Sample()
