"""What the HTTP interface answers: the fields of docs/observing.md, which are stable within a format.

An unknown figure is null, with a line that says why; it is never 100 % of nothing.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from trainer.monitor.losses import LossTrend

__all__ = [
    "DiLoCoStatus",
    "HashAgreement",
    "Health",
    "LastRound",
    "NodeStatus",
    "SyncSuccess",
    "TrainingStatus",
    "VerifyStatus",
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class HashAgreement(_Part):
    """Nodes whose state was compared, all after the same outer step."""

    outer_step: int | None = Field(description="The newest outer step that more than half of the nodes have reached.")
    num_compared: int = Field(description="Nodes whose state after that step is known.")
    num_agreeing: int = Field(description="Those of them with the state that most hold.")
    num_behind: int = Field(description="Nodes that have not reached that step; they are not compared.")
    reason: str | None = Field(description="Why there is no rate.")


class SyncSuccess(_Part):
    """The latest rounds, up to 100."""

    num_attempted: int = Field(description="Rounds with another node known to be there.")
    num_succeeded: int = Field(description="Those of them that ended with another node's contribution in the result.")
    reason: str | None = Field(description="Why there is no rate.")


class LastRound(_Part):
    """The latest round that ended with a result."""

    round_index: int
    num_members: int = Field(description="Nodes whose contributions are in, this one included.")
    num_dropped: int = Field(description="Nodes that were to be members and are not.")
    completeness: float = Field(description="Share of the contributions agreed upon that are in, 0 to 1.")
    sent_bytes: int
    received_bytes: int
    seconds: float
    rule: str = Field(description="Aggregation rule.")


class DiLoCoStatus(_Part):
    """How far this node is between two rounds, and how many it has had since it was started."""

    inner_step: int = Field(description="Inner steps since the last outer step.")
    inner_steps: int = Field(description="Inner steps from one outer step to the next; 0: no outer steps at all.")
    outer_step: int = Field(description="Outer steps in this node's state.")
    outer_syncs: int = Field(description="Rounds that ended with an outer step, those without peers included.")
    rounds_alone: int = Field(description="Those of them that applied this node's own pseudo-gradient only.")
    rounds_failed: int = Field(description="Rounds without a result; their work went on to the next.")
    last_round: LastRound | None


class NodeStatus(_Part):
    """A node that trains, as it announces itself."""

    node_id: str
    peer_id: str
    is_self: bool
    outer_step: int
    inner_steps_trained: int
    loss: float | None = Field(description="Nats a token, averaged over its latest steps; null: none, or no such loss.")
    tokens_per_s: float
    state_digest: str
    num_shards: int


class VerifyStatus(_Part):
    """Is training working?"""

    training_verified: bool = Field(
        description="The latest losses are finite and below the first ones by more than their noise, and where there "
        "are others most rounds were made with them."
    )
    reasons: tuple[str, ...] = Field(description="What speaks against it; empty if verified.")
    hash_agreement_rate: float | None = Field(
        description="Percent of the compared nodes that hold the state most of them hold; healthy: 100."
    )
    hash_agreement: HashAgreement
    loss_trend: LossTrend = Field(description="Direction of this node's loss; unknown below 80 steps.")
    sync_success_rate: float | None = Field(description="Percent of the rounds attempted; healthy: above 50.")
    sync_success: SyncSuccess
    training_nodes: int = Field(description="Nodes known to train, this one included.")


class TrainingStatus(VerifyStatus):
    """The run as a whole, as far as this node can see it."""

    node_id: str
    time: str = Field(description="When this was so, UTC.")
    global_loss: float | None = Field(
        description="Mean over the nodes of their moving averages, in nats a token; outliers are bounded."
    )
    losses_left_out: int = Field(description="Nodes that announced a loss no model can have.")
    loss: float | None = Field(description="This node's latest loss.")
    total_steps: int = Field(description="Inner steps, summed over the nodes.")
    steps_skipped: int = Field(description="Steps of this node that applied nothing: loss or gradient not finite.")
    data_shards: int = Field(description="Different shards that the nodes train on.")
    model_convergence: float | None = Field(
        description="Percent of all nodes, those behind included, that hold the state most hold."
    )
    tokens_per_s: float = Field(description="Tokens a second, summed over the nodes.")
    diloco: DiLoCoStatus
    nodes: tuple[NodeStatus, ...] = Field(description="This node, then others by name; at most 256.")


class Health(_Part):
    """The process answers; `last_step_age_s` tells whether it trains."""

    status: str = Field(description="ok")
    node_id: str
    uptime_s: float
    last_step_age_s: float | None = Field(description="Seconds since the last inner step; null before the first.")
