"""What the page shows, as one typed model: the JSON at ``/api/page``.

Null: not known here, and not shown. Times are UTC, or seconds; rates are a second; losses are nats a token. Strings
that came from others are cut (`trainer.monitor.pages.texts`); the page writes them as text.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.monitor.losses import LossTrend
from trainer.monitor.run_view import AlarmStatus, Budget, DhtSummary, RunKind
from trainer.monitor.status import HashAgreement, SpeedStatus, SwarmAccount, SyncSuccess, WorkerStatus

PAGE_FORMAT: Final = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class PageRound(_Part):
    """A round: by its members' reports, or as this node was in it."""

    stage: str = Field(description="Whose round it was; empty: of whole models.")
    round_index: int
    ended_at: str
    seconds: float
    agree_s: float = Field(description="Until all members had agreed on who takes part.")
    reduce_s: float = Field(description="While tensors moved.")
    vote_s: float
    num_members: int
    completeness: float = Field(description="Share of the contributions agreed upon that are in the result.")
    num_reports: int | None = Field(
        default=None, description="Members that reported it; null: told by this node alone."
    )
    num_failed: int = Field(default=0, description="Of them, those for which it failed.")
    sent_bytes: int = 0
    received_bytes: int | None = None
    rule: str = ""
    members: tuple[str, ...] = Field(default=(), description="Names, where they are known.")
    left_out: tuple[tuple[str, str], ...] = Field(
        default=(), description="Who was left out, and why, where that is known."
    )
    error: str = Field(default="", description="Why it has no result; empty: it has one.")


class PageNode(_Part):
    """A node; what it says of itself unless the description tells otherwise."""

    node_id: str
    peer_id: str
    is_self: bool = False
    role: str = ""
    stage: str = ""
    status: str = ""
    health: str | None = Field(
        default=None, description="As a monitor judges: ok, quiet, unreachable, failing, doubtful, gone."
    )
    step: int | None = Field(
        default=None, description="Outer steps in its state; of a worker, on a run's page, its version."
    )
    behind: int | None = Field(default=None, description="How far that is behind the newest of its kind.")
    last_round: int | None = Field(default=None, description="Through a bucket: the newest agreed round it was in.")
    weight: float | None = Field(default=None, description="Its weight in that round.")
    inner_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    tokens: int | None = None
    pflops: float | None = Field(
        default=None, description="Claimed, in 10^15 operations, over all its lives that were seen."
    )
    confirmed_pflops: float | None = Field(default=None, description="Of these, what the account confirms.")
    hours: float | None = None
    rounds_shared: int | None = None
    rounds_failed: int | None = None
    withdrawals: int | None = None
    clock_offset_s: float | None = Field(default=None, description="Ahead of the monitor's, measured.")
    memory_bytes: int | None = None
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    checkpoint_age_s: float | None = None
    num_shards: int | None = None
    software: str | None = None
    state_digest: str | None = None
    doubts: tuple[str, ...] = ()


class PageStage(_Part):
    """A stage of the pipeline and its workers."""

    stage: str
    num_layers: int | None = None
    num_serving: int
    num_joining: int | None = None
    version: int | None
    rows_per_s: float
    busy: float | None = None
    empty_for_s: float | None = None
    workers: tuple[WorkerStatus, ...] = ()


class SwarmFlow(_Part):
    """How micro-batches flow, as the driver that answers knows it."""

    in_flight: int
    held: int = Field(description="Leased to it and not begun.")
    keeper: str
    keeper_away_s: float


class OwnStatus(_Part):
    """What a node knows of its own training."""

    loss: float | None
    num_steps: int
    steps_skipped: int
    inner_step: int
    inner_steps: int = Field(description="From one outer step to the next; 0: there are none.")
    outer_step: int
    stages: dict[str, int] = Field(default={}, description="Outer steps by stage, where each has rounds of its own.")
    outer_syncs: int
    rounds_alone: int
    rounds_failed: int
    hash_agreement_rate: float | None
    hash_agreement: HashAgreement
    sync_success_rate: float | None
    sync_success: SyncSuccess
    speed: SpeedStatus | None
    uptime_s: float
    last_step_age_s: float | None


class Gauge(_Part):
    """A further figure of a worker or driver, as its metrics have it."""

    name: str
    help: str
    value: float


class DataStatus(_Part):
    """Which data is being trained on."""

    num_shards: int | None = Field(default=None, description="Different shards in use.")
    own_shards: tuple[int, ...] | None = Field(default=None, description="This node's, at most 64 of them.")
    num_own_shards: int | None = None
    rotations: int | None = Field(
        default=None, description="How often this node's shards have changed since its start."
    )


class CheckpointStatus(_Part):
    """The newest checkpoint of a stage, of this node, or of any node with a whole model."""

    subject: str
    age_s: float | None = Field(description="Null: none was made yet.")
    step: int | None = None
    problem: str = ""


class Incident(_Part):
    """Something that happened at a moment: a failed round, a withdrawal, a checkpoint, a change of the run."""

    time: str
    kind: str
    text: str
    is_bad: bool = False


class LogLine(_Part):
    """A line of the log of the process that answers."""

    time: str
    level: str
    text: str


class PageView(_Part):
    """All of it, at a moment."""

    format: int = PAGE_FORMAT
    scope: Literal["run", "node"] = Field(description="run: seen by a monitor; node: by one node.")
    run_id: str
    node_id: str = Field(default="", description="Who answers, where a node does.")
    role: str = Field(default="", description="Its: node, worker or driver.")
    time: str
    kind: RunKind
    verdict: Literal["verified", "not-verified", "unknown"] = Field(description="Whether training works.")
    reasons: tuple[str, ...] = Field(default=(), description="What speaks against it, or what is missing to tell.")
    loss: float | None
    loss_of: str = Field(default="", description="What the loss is a mean of.")
    loss_trend: LossTrend
    step: int | None
    step_name: str = Field(description="What `step` counts, and whose.")
    tokens: int | None
    tokens_per_s: float | None
    num_nodes: int | None
    num_reached: int | None = None
    total_steps: int | None = Field(default=None, description="Inner steps, summed over nodes with whole models.")
    data_shards: int | None = Field(default=None, description="Different shards that those train on.")
    convergence: float | None = Field(
        default=None, description="Percent of those that hold the state most of them hold."
    )
    last_round: PageRound | None = None
    budget: Budget | None = None
    own: OwnStatus | None = None
    gauges: tuple[Gauge, ...] = ()
    stages: tuple[PageStage, ...] = ()
    flow: SwarmFlow | None = None
    account: SwarmAccount | None = None
    nodes: tuple[PageNode, ...] = ()
    rounds: tuple[PageRound, ...] = Field(default=(), description="The latest, the newest first.")
    data: DataStatus | None = None
    checkpoints: tuple[CheckpointStatus, ...] = ()
    alarms: tuple[AlarmStatus, ...] | None = Field(default=None, description="Null: nobody here watches for any.")
    incidents: tuple[Incident, ...] = Field(default=(), description="The latest, the newest first.")
    log: tuple[LogLine, ...] = Field(default=(), description="The latest lines, the newest first.")
    dht: DhtSummary | None = None
    unverified: tuple[str, ...] = ()
