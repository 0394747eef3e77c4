"""What the HTTP interface answers: the fields of docs/observing.md and docs/swarm.md, stable within a format.

An unknown figure is null, in a node's answers with a line that says why; it is never 100 % of nothing. A driver's
process provides a `PipelineView` for the two pages about its pipeline.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from trainer.monitor.losses import LossTrend

ACCOUNT_PATH = "/api/swarm/account"
STAGES_PATH = "/api/swarm/stages"


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
    stage: str = Field("", description="Whose round it was, at a node that has several; empty: of whole models.")
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
    outer_step: int = Field(description="Outer steps in this node's state; where stages have their own, in each.")
    stages: dict[str, int] = Field(
        {}, description="Outer steps by stage, at a node that holds all stages of a model that others have in stages."
    )
    outer_syncs: int = Field(description="Rounds that ended with an outer step, those without peers included.")
    rounds_alone: int = Field(description="Those of them that applied this node's own pseudo-gradient only.")
    rounds_failed: int = Field(description="Rounds without a result; their work went on to the next.")
    last_round: LastRound | None


class NodeStatus(_Part):
    """A node that trains, as it announces itself."""

    node_id: str
    peer_id: str
    is_self: bool
    role: str = Field("node", description="node: it holds a whole model, worker: a stage, driver: nothing.")
    stage: str = Field("", description="Of a worker.")
    last_round: int | None = Field(None, description="Of rounds through a bucket, the newest agreed one it was in.")
    weight: float | None = Field(None, description="Its weight in that round.")
    outer_step: int
    inner_steps_trained: int
    loss: float | None = Field(description="Nats a token, averaged over its latest steps; null: none, or no such loss.")
    tokens_per_s: float
    state_digest: str
    num_shards: int


class SpeedStatus(_Part):
    """How fast this node trains and what its time went to, over its latest 50 steps."""

    tokens_per_s: float = Field(description="Of this node, all its GPUs together.")
    tokens_per_s_per_device: float = Field(description="Of one GPU, on average; the same where there is one.")
    num_devices: int = Field(description="GPUs, or processes on a CPU, that train this node's model together.")
    mfu: float = Field(description="Model FLOPs utilisation: FLOPs the model needs over the devices' peak, 0 to 1.")
    flops_per_token: int = Field(description="Forward and backward pass, attention included, nothing counted twice.")
    peak_flops_per_s: float = Field(description="Of one device.")
    peak_kind: str = Field(description="stated: by the device's maker; measured: the best of some matrix products.")
    peak_device: str = Field(description="The device's name, and the type of the products.")
    time_shares: dict[str, float] = Field(
        description="Of wall time: data, compute, optimizer, outer_step, checkpoint, other."
    )


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
    total_steps: int = Field(
        description="Inner steps, summed over the nodes; of workers of stages only this node's own."
    )
    steps_skipped: int = Field(description="Steps of this node that applied nothing: loss or gradient not finite.")
    data_shards: int = Field(description="Different shards that the nodes train on.")
    model_convergence: float | None = Field(
        description="Percent of all nodes, those behind included, that hold the state most hold."
    )
    tokens_per_s: float = Field(
        description="Tokens a second, summed over the nodes; of a pipeline those of its drivers, and this node's own."
    )
    speed: SpeedStatus | None = Field(None, description="Of this process; null before its first step.")
    diloco: DiLoCoStatus
    nodes: tuple[NodeStatus, ...] = Field(description="This node, then others by name; at most 256.")


class Health(_Part):
    """The process answers; `last_step_age_s` tells whether it trains."""

    status: str = Field(description="ok")
    node_id: str
    uptime_s: float
    last_step_age_s: float | None = Field(description="Seconds since the last inner step; null before the first.")


def _finite_or_none(value: float | None) -> float | None:
    """Returns None for NaN and infinity, which JSON has not."""
    return value if value is not None and math.isfinite(value) else None


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
