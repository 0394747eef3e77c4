"""A worker's answer about its own state (`stage/status`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.network.discovery.stage_report import Counted, Incarnation, StageName
from trainer.network.rpc.messages import Message

STATUS = "stage/status"


class StatusAsk(Message):
    """Asks for a worker's state."""


class StatusAnswer(Message):
    """A worker's state; see `RuntimeFigures` for its load."""

    stage: StageName
    status: str
    incarnation: Incarnation
    version: Counted
    num_tokens: Counted
    applied: Counted  # Micro-batches counted in this incarnation.
    outliers: Counted = 0  # Micro-batches whose gradient was scaled down to the usual norm.
    shared_through: Counted
    queued: Counted
    queued_bytes: Counted
    computed: Counted
    batch_rows: Annotated[float, Field(ge=0)]
    compute_s: Annotated[float, Field(ge=0)]
    rows_per_s: Annotated[float, Field(ge=0)]
    busy: Annotated[float, Field(ge=0, le=1)]
    cached_bytes: Counted  # Of forward passes whose backward pass is to come.
    reply_bytes: Counted
    refused: dict[str, Counted]
