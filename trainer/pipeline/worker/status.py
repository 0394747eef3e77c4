"""A worker's answer about its own state (`stage/status`), and its counts of refusals."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Annotated

from pydantic import Field

from trainer.errors import RefusedError
from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message
from trainer.network.rpc.token_buckets import TokenBuckets

__all__ = ["STATUS", "Refusals", "StatusAnswer", "StatusAsk"]

logger = logging.getLogger(__name__)

STATUS = "stage/status"

_LOG_INTERVAL_S = 60.0
_MAX_REASONS = 64


class StatusAsk(Message):
    """Asks for a worker's state."""


class StatusAnswer(Message):
    """A worker's state."""

    stage: StageName
    status: str
    incarnation: Incarnation
    version: Counted
    num_tokens: Counted
    """Accumulated towards the next step."""
    applied: Counted
    """Micro-batches counted in this incarnation."""
    outliers: Counted = 0
    """Micro-batches whose gradient was scaled down to the usual norm."""
    shared_through: Counted
    queued: Counted
    queued_bytes: Counted
    computed: Counted
    """Requests computed since the start."""
    batch_rows: Annotated[float, Field(ge=0)]
    compute_s: Annotated[float, Field(ge=0)]
    rows_per_s: Annotated[float, Field(ge=0)]
    busy: Annotated[float, Field(ge=0, le=1)]
    cached_bytes: Counted
    """Of forward passes whose backward pass is to come."""
    reply_bytes: Counted
    """Of answers kept."""
    refused: dict[str, Counted]
    """Requests refused, by reason."""


class Refusals:
    """Counts refusals by reason, and logs one of each reason a minute."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._log_limit = TokenBuckets(1.0, 1.0 / _LOG_INTERVAL_S)

    @property
    def counts(self) -> dict[str, int]:
        """By reason."""
        return dict(self._counts)

    def count(self, sender: str, what: str, error: RefusedError) -> None:
        """Counts a refusal."""
        reason = error.reason if error.reason in self._counts or len(self._counts) < _MAX_REASONS else "other"
        self._counts[reason] += 1
        if self._log_limit.take(reason):
            logger.warning(
                "refused %s of %s (%s, %d so far): %s", what, sender[:12], reason, self._counts[reason], error
            )
