"""What a monitor shows of a run, as typed models: the JSON of ``monitor --json`` and of its HTTP interface.

Each figure is somebody's word. What the monitor itself has seen (who answers, whose clock is off, what the keeper of
the account says) stands beside what nodes say of themselves; `RunView.unverified` tells in words which is which.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.monitor.status import SwarmAccount, WorkerStatus

AlarmKind = Literal[
    "empty-stage",
    "one-replica",
    "no-checkpoint",
    "loss-spike",
    "clock",
    "failing-rounds",
    "unreachable",
    "quiet",
    "account",
    "contribution",
]
Health = Literal["ok", "quiet", "unreachable", "failing", "doubtful", "gone"]
RunKind = Literal["whole-model", "swarm", "unknown"]
VIEW_FORMAT: Final = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Part):
    """What the run file lets a run take, and when that will be used up at the present speed."""

    unit: Literal["steps", "tokens"] = Field(description="Of a swarm the run's steps; else each node's own.")
    limit: int
    done: int
    eta_s: float | None = Field(description="Null: not known yet, or nothing goes on.")


class RunProgress(_Part):
    """How far the run is."""

    kind: RunKind = Field(description="What its nodes hold.")
    step: int | None = Field(description="Of a swarm the version most stages have reached; else outer steps.")
    trained_tokens: int | None = Field(description="Of a swarm by its account; else what the nodes seen here claim.")
    loss: float | None = Field(description="Mean over the nodes of their moving averages, nats a token; bounded.")
    tokens_per_s: float
    num_nodes: int = Field(description="Whose announcements were heard.")
    num_reached: int = Field(description="Of them, those that answered the monitor.")
    num_reporting: int = Field(description="Of them, those with a report that counts.")
    total_steps: int | None = Field(
        default=None, description="Inner steps of nodes with whole models, summed; their word."
    )
    data_shards: int | None = Field(default=None, description="Different shards that nodes with whole models train on.")
    convergence: float | None = Field(
        default=None, description="Percent of the nodes with whole models that announce the state most of them do."
    )
    budget: Budget | None = Field(default=None, description="Null: the run has none, or no run file tells of it.")


class StageSummary(_Part):
    """A stage and its replicas."""

    stage: str
    num_replicas: int = Field(description="Workers that serve and answered the monitor.")
    num_joining: int
    version: int | None
    rows_per_s: float = Field(description="Summed over its workers that serve.")
    busy: float = Field(description="Mean over them of the share of time in which they compute.")
    workers: tuple[WorkerStatus, ...] = Field(default=(), description="As they announce themselves; at most 64.")


class NodeSummary(_Part):
    """A node: what it says, what the account says, and what the monitor saw."""

    node_id: str
    peer_id: str
    role: str = Field(description="node, worker or driver; empty: not known yet.")
    stage: str
    status: str = Field(description="Of a worker joining, serving or leaving; else empty.")
    health: Health
    is_reached: bool = Field(description="Whether it answered the monitor at the address it announces.")
    is_called: bool | None = Field(description="Whether others call it there, by its own word.")
    report_age_s: float | None = Field(description="Null: no report that counts.")
    software: str
    pflops: float = Field(description="Claimed, over all its lives that the monitor has seen, in 10^15 operations.")
    confirmed_pflops: float | None = Field(description="Of these, what the account confirms; null: nothing can.")
    hours: float = Field(description="In which it computed, claimed.")
    tokens: int
    micro_batches: int
    rounds_shared: int
    rounds_alone: int
    rounds_failed: int
    withdrawals: int
    loss: float | None
    tokens_per_s: float
    sent_bytes_per_s: float | None = Field(description="Between its two latest reports; null: there are not two.")
    received_bytes_per_s: float | None
    memory_bytes: int
    step: int | None = Field(
        default=None, description="Outer steps in its state; of a worker the version of its stage."
    )
    inner_steps: int | None = Field(default=None, description="That a node with a whole model says it has trained.")
    num_shards: int | None = Field(default=None, description="It says that it trains on.")
    state_digest: str | None = None
    clock_offset_s: float | None = Field(description="Its clock ahead of the monitor's, measured; null: not measured.")
    checkpoint_age_s: float | None
    doubts: tuple[str, ...] = Field(default=(), description="What does not agree with the account or with its peers.")


class RoundSummary(_Part):
    """A round as its members reported it; times are the median member's."""

    stage: str = Field(description="Whose round it was; empty: of whole models.")
    round_index: int
    ended_at: str
    num_members: int
    num_reports: int = Field(description="Members that reported it here.")
    num_failed: int = Field(description="Of them, those for which it failed.")
    completeness: float
    seconds: float
    agree_s: float = Field(description="Until all members had agreed on who takes part.")
    reduce_s: float = Field(description="While tensors moved.")
    vote_s: float
    sent_bytes: int
    error: str


class DhtSummary(_Part):
    """What the nodes' parts of the DHT were asked, a second, between their two latest reports."""

    num_nodes: int
    stores_per_s: float
    finds_per_s: float
    records: int = Field(description="Kept by all of them together; a record lies at several.")


class AlarmStatus(_Part):
    """Something a person should look at."""

    kind: AlarmKind
    subject: str = Field(description="A stage, a node, or the run.")
    text: str
    since: str = Field(default="", description="UTC.")


class RunView(_Part):
    """A run at a moment."""

    format: int = Field(
        default=VIEW_FORMAT, description="Grows where a field changes its meaning; unknown fields are new."
    )
    run_id: str
    time: str
    progress: RunProgress
    stages: tuple[StageSummary, ...] = ()
    nodes: tuple[NodeSummary, ...] = Field(
        default=(), description="Those that are there, then the greatest of those that left."
    )
    rounds: tuple[RoundSummary, ...] = ()
    account: SwarmAccount | None = Field(default=None, description="As the keeper that answered last told it.")
    dht: DhtSummary | None = Field(default=None, description="Null: no node tells of a DHT.")
    alarms: tuple[AlarmStatus, ...] = ()
    unverified: tuple[str, ...] = Field(default=(), description="What of all this nobody but the node itself says.")
