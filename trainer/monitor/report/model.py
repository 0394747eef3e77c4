"""A report on a run as typed values: what `run_report` reads out of logs, what ``--json`` prints and the page shows.

Everything is bounded, whatever the logs hold: curves by points, lists by rows, texts by characters;
`RunReport.left_out` says in words what did not fit. Texts of others have control and direction marks shown as signs,
so that they cannot hide or turn what stands beside them. A figure that no log has is null. Times are UTC in ISO 8601,
or seconds.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainer.monitor.pages.course import CourseView

REPORT_FORMAT: Final = 1
IncidentKind = Literal[
    "restart",
    "death",
    "failed",
    "failed-round",
    "left-out",
    "withdrawal",
    "ban",
    "checkpoint",
    "skipped-steps",
    "lost-micro-batches",
    "lost-events",
    "alarm",
    "note",
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Machine(_Part):
    """What a process ran on, as it said at its start."""

    host: str = ""
    system: str = ""
    processor: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    devices: tuple[str, ...] = ()
    peak: str = Field(default="", description="The device's peak, and how it is known.")
    versions: dict[str, str] = Field(default_factory=dict)


class Life(_Part):
    """A process of a node, from its start to its end."""

    began_at: str
    ended_at: str = Field(description="Of its last event, where it did not say that it ended.")
    first_step: int | None
    last_step: int | None
    outcome: Literal["ended", "failed", "killed", "open"] = Field(
        description="killed: another life began without its end; open: the log ends, and it may still have run."
    )
    reason: str = ""


class NodeCheckpoints(_Part):
    """What became of a node's checkpoints."""

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = Field(default=0.0, description="That they cost the training thread.")
    last_at: str | None = None
    last_step: int | None = None
    longest_gap_s: float | None = Field(default=None, description="Between two that were saved.")
    times: tuple[str, ...] = Field(default=(), description="When some were saved, evenly picked.")


class NodeReport(_Part):
    """A node over all its lives that the logs tell of."""

    name: str = Field(description="With the log's folder before it, where two logs have the same node.")
    node_id: str
    role: str = Field(
        default="", description="node, worker or driver; empty: its log is of a release that did not say."
    )
    stage: str = ""
    peer_id: str = ""
    first_at: str
    last_at: str
    lives: tuple[Life, ...]
    num_lives: int
    num_steps: int = Field(description="Different steps; of one that was done twice the last counts.")
    steps_repeated: int = Field(description="Steps done again after a restart from an older checkpoint.")
    steps_skipped: int
    num_tokens: int = Field(description="Of the steps that count, those before the log's first one reckoned alike.")
    active_s: float = Field(description="Summed over steps.")
    loader_wait_s: float
    loss: float | None = Field(description="Mean of the last hundredth of its steps, 10 or more; nats a token.")
    lowest_loss: float | None
    tokens_per_s: float | None = Field(description="Tokens over time from first to last event of each life.")
    mfu: float | None = Field(default=None, description="Of steps' time; null: the log has no peak of the device.")
    rounds_shared: int = 0
    rounds_alone: int = 0
    rounds_failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    withdrawals: int = 0
    num_parameters: int | None = None
    checkpoints: NodeCheckpoints = NodeCheckpoints()
    machine: Machine | None = None


class ReportedRound(_Part):
    """A round, or some in a row where there were too many; times and phases are means over members and rounds."""

    stage: str = Field(description="Whose; empty: of whole models.")
    first_index: int
    last_index: int
    began_at: str
    ended_at: str
    num_rounds: int
    num_reports: int = Field(description="Reports of members that had a result.")
    num_failed: int = Field(description="Reports of members that had none.")
    fewest_members: int
    most_members: int
    members: tuple[str, ...] = Field(
        default=(), description="Of one round: names, where the logs tell them, else keys."
    )
    completeness: float | None
    seconds: float | None
    agree_s: float | None = Field(description="Until all had agreed on who takes part; null: not logged.")
    reduce_s: float | None
    vote_s: float | None
    sent_bytes: int
    received_bytes: int
    rule: str = ""
    left_out: tuple[str, ...] = Field(default=(), description="Who was left out, and why; some of them.")
    errors: tuple[str, ...] = Field(default=(), description="Why it failed where it did; some of the reasons.")


class ReportedIncident(_Part):
    """Something that went wrong, or that a person should know; alike ones close to each other are one."""

    kind: IncidentKind
    node: str = Field(description="Whose log has it; of an alarm its subject.")
    began_at: str
    ended_at: str
    count: int
    text: str
    is_bad: bool


class HeldOutPoint(_Part):
    """The loss on text that is not trained on, at a step of a node."""

    node: str
    at: str
    step: int
    loss: float
    bits_per_byte: float | None
    by_source: dict[str, float] = Field(default_factory=dict, description="Nats a token of each source.")


class SampledText(_Part):
    """What the model wrote behind a prompt."""

    node: str
    at: str
    step: int
    prompt: str
    text: str


class DataFacts(_Part):
    """What was read."""

    store: str = ""
    sources: tuple[str, ...] = ()
    num_shards: int | None = Field(default=None, description="Different shards that the logs name.")
    num_rotations: int = Field(default=0, description="Times a node's set of shards changed.")
    store_shards: int | None = Field(default=None, description="In the store, as last seen.")
    vocabulary_rows: int | None = None
    changes: tuple[str, ...] = Field(default=(), description="Shards, store and vocabulary over time; the latest.")


class OptionValue(_Part):
    """An option of the run, as nodes had it at their last start."""

    name: str
    value: str
    is_changed: bool = Field(description="Whether it was other than that release's default.")
    differs: str = Field(default="", description="Other values, and whose; empty: all nodes had the same.")


class Settings(_Part):
    """What was run."""

    run_id: str = ""
    run_digest: str = ""
    model: dict[str, str] = Field(default_factory=dict)
    num_parameters: int | None = Field(default=None, description="Of the whole model.")
    options: tuple[OptionValue, ...] = ()
    changes: tuple[str, ...] = Field(default=(), description="Changes of a signed run that came into force.")


class WatchedPoint(_Part):
    """The run as a monitor saw it."""

    at: str
    step: int | None
    tokens: int | None
    loss: float | None
    tokens_per_s: float
    nodes: int
    alarms: int


class Contribution(_Part):
    """What a node claimed to a monitor over all its lives."""

    node_id: str
    peer_id: str
    role: str
    stage: str
    pflops: float = Field(description="Claimed, in 10^15 operations.")
    confirmed_pflops: float | None = Field(description="Of these, what the account confirms; null: nothing can.")
    hours: float
    tokens: int
    last_at: str


class Watched(_Part):
    """A monitor's history of the run."""

    points: tuple[WatchedPoint, ...] = ()
    contributions: tuple[Contribution, ...] = ()
    num_contributions: int = 0


class LogText(_Part):
    """A line that a process printed: a warning or an error."""

    node: str
    at: str = Field(description="As printed, in the time of the machine that printed it.")
    level: str
    text: str


class Figure(_Part):
    """A figure of the whole run and how it was come by."""

    name: str
    value: float | None
    unit: str
    how: str


class ReadLog(_Part):
    """A log that was read."""

    path: str
    kind: Literal["events", "process", "history"]
    num_events: int
    first_at: str | None
    last_at: str | None


class RunReport(_Part):
    """A run, as its logs tell it."""

    format: int = Field(
        default=REPORT_FORMAT, description="Grows where a field changes its meaning; unknown fields are new."
    )
    title: str
    made_at: str
    software: str
    first_at: str | None
    last_at: str | None
    settings: Settings
    figures: tuple[Figure, ...]
    nodes: tuple[NodeReport, ...]
    loss_by_step: CourseView
    loss_by_tokens: CourseView
    course_by_time: CourseView = Field(description="Loss and speed; x in seconds since 1970.")
    gradient_norm: CourseView
    held_out_by_step: CourseView
    watched_by_time: CourseView = Field(description="Loss, speed and nodes, as a monitor saw them.")
    round_seconds: CourseView = Field(description="What rounds took, by phase; x in seconds since 1970.")
    rounds: tuple[ReportedRound, ...] = ()
    incidents: tuple[ReportedIncident, ...] = ()
    held_out: tuple[HeldOutPoint, ...] = ()
    samples: tuple[SampledText, ...] = ()
    data: DataFacts = DataFacts()
    watched: Watched | None = None
    log: tuple[LogText, ...] = ()
    read: tuple[ReadLog, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = Field(description="How what is shown was measured, and what nobody has verified.")
