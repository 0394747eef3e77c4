"""A driver's pages about its pipeline: the account of the data, and who holds which stage.

The driver's process provides a `PipelineView`. The fields are those of docs/swarm.md and stable within a format; an
unknown figure is null.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol

from fastapi import FastAPI, HTTPException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

__all__ = [
    "ACCOUNT_PATH",
    "STAGES_PATH",
    "LostShare",
    "PerishedShare",
    "PipelineView",
    "StageStatus",
    "SwarmAccount",
    "SwarmStages",
    "TallyStatus",
    "WorkerStatus",
    "add_pipeline_pages",
]

ACCOUNT_PATH = "/api/swarm/account"
STAGES_PATH = "/api/swarm/stages"


def _finite_or_none(value: float | None) -> float | None:
    """Returns None for NaN and infinity, which JSON has not."""
    return value if value is not None and math.isfinite(value) else None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TallyStatus(_Part):
    """Micro-batches, or tokens: leased = done + lost + open, always."""

    leased: int = Field(description="Given to a driver at least once; each counts once.")
    done: int = Field(description="Counted once in every stage.")
    lost: int = Field(description="Not known to be counted in every stage, and never sent again.")
    open: int = Field(description="The rest: held by drivers, or waiting to be given again.")

    @property
    def adds_up(self) -> bool:
        """Whether all of it is accounted for."""
        return self.leased == self.done + self.lost + self.open


class LostShare(_Part):
    """Micro-batches lost in one way."""

    stage: str = Field(description="The first that did not, or may not, have counted them.")
    reason: str
    micro_batches: int


class PerishedShare(_Part):
    """Micro-batches whose gradient died with a worker that had acknowledged them but not yet shared them."""

    stage: str
    micro_batches: int


class SwarmAccount(_Part):
    """What has become of the data so far, by the driver that keeps the account."""

    node_id: str = Field(description="Who answers.")
    keeper: str = Field(description="Who keeps the account.")
    age_s: float = Field(description="How long ago the keeper said so; 0 at the keeper itself.")
    micro_batches: TallyStatus
    tokens: TallyStatus
    trained_tokens: int = Field(description="Of the tokens done, the labels that counted.")
    waiting: int = Field(description="Open micro-batches that no driver holds.")
    reissued: int = Field(description="Times a micro-batch was given once more.")
    leases: int = Field(description="Live ones.")
    lost: tuple[LostShare, ...] = ()
    perished: tuple[PerishedShare, ...] = ()
    lanes: tuple[dict[str, JsonValue], ...] = Field((), description="How far each source of data is.")


class WorkerStatus(_Part):
    """A worker as it announces itself and as this driver knows it."""

    uid: str = Field(description="Such as head.0.42.")
    node_id: str
    peer_id: str
    status: str = Field(description="joining, serving or leaving.")
    version: int = Field(description="Optimizer steps behind its weights.")
    num_tokens: int = Field(description="Accumulated towards the next step.")
    queued: int = Field(description="Requests waiting.")
    rows_per_s: float = Field(description="What it gets done while it has work; 0: not known yet.")
    busy: float = Field(description="Share of the last while in which it computed, 0 to 1.")
    in_flight: int = Field(0, description="Requests of this driver under way at it.")
    banned_for_s: float = Field(0.0, description="How long this driver will not ask it yet; 0: it does.")
    differs_from: tuple[str, ...] = Field(
        (), description="Workers of the stage that compute something else; nothing shows which of them is wrong."
    )
    age_s: float = Field(0.0, description="How long ago it last said how it stands: how old its own figures are.")
    silent_s: float = Field(
        0.0, description="How long it has answered nothing while micro-batches of this driver wait for it; 0: it does."
    )
    unsaved_s: float = Field(0.0, description="Age of its newest checkpoint, or since it began; 0: it makes none.")
    unsaved_because: str = Field("", description="Why the checkpoint that was due last is not there; empty: it is.")


class StageStatus(_Part):
    """A stage and who holds it."""

    stage: str = Field(description="head, body-1, …, tail.")
    num_layers: int
    num_serving: int = Field(description="Workers that take micro-batches, answer and are not banned here.")
    version: int | None = Field(description="The newest of its workers; null: there are none.")
    rows_per_s: float = Field(description="Summed over its workers that answer.")
    empty_for_s: float = Field(description="How long there has been nobody to send to; 0: there is somebody.")
    workers: tuple[WorkerStatus, ...]


class SwarmStages(_Part):
    """The pipeline as this driver sees it."""

    node_id: str
    time: str = Field(description="When this was so, UTC.")
    step: int = Field(description="Steps of the run so far: trained tokens over those of a step.")
    loss: Annotated[float | None, AfterValidator(_finite_or_none)] = Field(
        description="Of the latest step's micro-batches, nats a token; null: none yet, or not finite."
    )
    tokens_per_s: float = Field(description="What this driver got done in the last while.")
    in_flight: int = Field(description="Micro-batches of this driver under way.")
    keeper: str = Field("", description="Who keeps the account of the data: a key, or a name.")
    keeper_away_s: float = Field(0.0, description="How long the keeper has not answered this driver; 0: it does.")
    held: int = Field(0, description="Micro-batches leased to this driver that it has not begun.")
    stages: tuple[StageStatus, ...]


class PipelineView(Protocol):
    """What a driver's process shows of its pipeline; called in the API's thread, so it must not wait."""

    def account(self) -> SwarmAccount | None:
        """Returns the account as last heard from its keeper; None before the first time."""

    def stages(self) -> SwarmStages:
        """Returns the stages and their workers."""


def add_pipeline_pages(app: FastAPI, view: PipelineView) -> None:
    """Adds the two pages to a node's interface."""

    @app.get(
        ACCOUNT_PATH,
        summary="What has become of the data: leased = done + lost + open.",
        responses={503: {"description": "The keeper of the account has not been heard from yet."}},
    )
    async def account() -> SwarmAccount:
        found = view.account()
        if found is None:
            raise HTTPException(503, "the keeper of the account has not been heard from yet; ask again")
        return found

    @app.get(STAGES_PATH, summary="The stages, who holds them, and how they stand.")
    async def stages() -> SwarmStages:
        return view.stages()
