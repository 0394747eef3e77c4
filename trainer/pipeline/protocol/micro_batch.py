"""The name of a micro-batch: the same for ever, whoever sends it and however often.

``e2.s17.r4096``: epoch 2, shard 17, rows from 4096 on of that shard's order in that epoch. Whether a worker has counted
a micro-batch is asked by this name, so nothing that changes from one attempt to the next may be in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from trainer.errors import TrainerUsageError

__all__ = ["MicroBatchId", "MicroBatchKey"]

_PATTERN = r"e(0|[1-9][0-9]{0,8})\.s(0|[1-9][0-9]{0,9})\.r(0|[1-9][0-9]{0,9})"

MicroBatchKey: TypeAlias = Annotated[str, Field(pattern=f"^{_PATTERN}$")]
"""Spelt form of a :class:`MicroBatchId`, as messages carry it."""


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchId:
    """Which rows of the data a micro-batch is."""

    epoch: int
    """Passes over the whole store before it."""
    shard: int
    """The shard's id."""
    row: int
    """Its first row's place in the order in which the shard is read in that epoch."""

    def __str__(self) -> str:
        return f"e{self.epoch}.s{self.shard}.r{self.row}"

    @classmethod
    def parse(cls, key: str) -> MicroBatchId:
        """The inverse of ``str``.

        Raises:
            TrainerUsageError: it is not the spelling of one.
        """
        found = re.fullmatch(_PATTERN, key)
        if found is None:
            raise TrainerUsageError(f"expected a micro-batch such as e0.s17.r4096, found {key[:80]!r}")
        return cls(*map(int, found.groups()))
