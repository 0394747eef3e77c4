"""What members of a round say to each other; tensors travel beside these, as raw bytes.

A round, in the order of its messages:

    join         member → coordinator   "I have this state and so many batches"     → Agreement
    acknowledge  member → coordinator   "I read the agreement with this digest"     → Begin, or another Agreement
    exchange     member ↔ reducer       contribution parts one way, result parts the other
    moments      reducer → coordinator  sums over its slice (rules that need them)   → everybody's
    vote         member → coordinator   "these are the digests of what I hold"       → Decision
    invite, status                      "come with what you have"; "are you there, do you know the outcome?"

Everything is bounded: a list has at most `MAX_MEMBERS` entries of each, a string its own limit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from manifests import canonical_json, sha256_hex
from trainer.collective.terms import Terms
from trainer.errors import TrainerUsageError
from trainer.network.rpc.config import split_address

__all__ = [
    "MAX_MEMBERS",
    "Acknowledge",
    "AcknowledgeReply",
    "Agreement",
    "Commit",
    "Decision",
    "Digest",
    "ExchangeOpen",
    "Invite",
    "InviteReply",
    "JoinRequest",
    "Member",
    "MomentsOpen",
    "MomentsReply",
    "Nothing",
    "PeerIdField",
    "Plan",
    "StatusReply",
    "StatusRequest",
    "Task",
    "TaskDigest",
    "Vote",
    "Why",
    "short",
]

MAX_MEMBERS = 48
"""With certificates an agreement of so many is just within what a message takes."""

PeerIdField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Ge(0), Le(1 << 48)]
Share = Annotated[float, Ge(0), Le(1)]
ShortText = Annotated[str, Field(pattern=r"^[ -~]{0,120}$")]
"""A reason, for people: ASCII, so that its length is its size (`short`)."""
Certificate = Annotated[str, MaxLen(800)]
"""PEM; this project's have some 570 characters."""


def _reachable(address: str) -> str:
    try:
        split_address(address)
    except TrainerUsageError as error:
        raise ValueError(str(error)) from error
    return address


Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:\[\]-]{3,128}$"), AfterValidator(_reachable)]
"""``host:port``; checked before anybody is asked to connect there."""
TaskKey = Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


def short(text: str) -> str:
    """A reason as it may travel."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:120])


class Nothing(_Message):
    """An answer that says no more than that there is one."""


class JoinRequest(_Message):
    """A node is at the border of an outer step."""

    round_index: Count
    terms: Terms
    state_digest: Digest
    num_values: Count
    num_batches: Count
    age_s: Annotated[float, Ge(0)]
    progress: Share = 1.0
    """Of the work that the round was meant to have."""
    vocabulary_rows: Count
    address: Address
    certificate: Certificate | None
    tried: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_MEMBERS)]
    """Coordinators that come before the one asked, and could not be reached."""


class Member(_Message):
    """One who takes part, and for how much it counts."""

    peer_id: PeerIdField
    address: Address
    certificate: Certificate | None
    weight: Annotated[float, Ge(0)]
    progress: Share = 1.0
    """As it claims in its `JoinRequest`."""


class Agreement(_Message):
    """Who takes part in a round, and how; nothing moves before every member has acknowledged its digest."""

    round_index: Count
    attempt: Count
    coordinator: PeerIdField
    state_digest: Digest
    num_values: Count
    part_values: Annotated[int, Ge(1)]
    vocabulary_rows: Count
    """Rows of the embedding after this round: the most that every member can have."""
    members: Annotated[tuple[Member, ...], MaxLen(MAX_MEMBERS)]
    """Sorted by peer id."""

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """The members, sorted."""
        return tuple(member.peer_id for member in self.members)

    @property
    def num_parts(self) -> int:
        """Pieces the vector is cut into."""
        return -(-self.num_values // self.part_values)

    def part_bounds(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends in the vector."""
        start = part * self.part_values
        return start, min(start + self.part_values, self.num_values)


class Acknowledge(_Message):
    """A member has read an agreement and found itself in it."""

    round_index: Count
    agreement: Digest


class AcknowledgeReply(_Message):
    """All have acknowledged (``None``), or some have not and there is a new agreement without them."""

    agreement: Agreement | None


class Task(_Message):
    """A range of parts and who reduces it; its key is ``pass.number``."""

    key: TaskKey
    reducer: PeerIdField
    first_part: Count
    last_part: Count
    """Exclusive."""


class Plan(_Message):
    """Who reduces what in one pass. Tasks of earlier passes stay in the list until they are lost."""

    agreement: Digest
    pass_index: Annotated[int, Ge(0), Le(99)]
    members: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_MEMBERS)]
    """Whoever is still there."""
    tasks: Annotated[tuple[Task, ...], MaxLen(4 * MAX_MEMBERS)]

    @property
    def fresh(self) -> tuple[Task, ...]:
        """The tasks to be done in this pass."""
        return tuple(task for task in self.tasks if task.key.startswith(f"{self.pass_index}."))


class ExchangeOpen(_Message):
    """The first words of a stream between a member and a reducer."""

    plan: Digest
    agreement: Digest
    task: TaskKey


class MomentsOpen(_Message):
    """Sums over one task's slice; the sums themselves are the payload."""

    agreement: Digest
    task: TaskKey


class MomentsReply(_Message):
    """Everybody's sums, one after the other in the payload, in the order of these sizes."""

    sizes_bytes: Annotated[tuple[Count, ...], MaxLen(MAX_MEMBERS)]


class TaskDigest(_Message):
    """What came out of a task, as one member holds it; ``None`` where it does not hold all of it."""

    key: TaskKey
    digest: Digest | None
    num_included: Count | None = None
    """Contributed parts that went into it; only its reducer knows."""


class Why(_Message):
    """A member whose contribution, or some of it, was left out."""

    peer_id: PeerIdField
    reason: ShortText


class Vote(_Message):
    """What a member holds at the end of a pass, and what it saw. Moments for the report are the payload."""

    plan: Plan
    term: Annotated[int, Ge(0), Le(MAX_MEMBERS)]
    digests: Annotated[tuple[TaskDigest, ...], MaxLen(4 * MAX_MEMBERS)]
    failed: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_MEMBERS)]
    """Reducers that did not deliver to this member."""
    dropped: Annotated[tuple[Why, ...], MaxLen(MAX_MEMBERS)]
    """Contributors that this member, as a reducer, had to leave out."""


class Commit(_Message):
    """The end of a round: every member named holds these, and applies them."""

    plan: Plan
    members: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_MEMBERS)]
    digests: Annotated[tuple[TaskDigest, ...], MaxLen(4 * MAX_MEMBERS)]
    dropped: Annotated[tuple[Why, ...], MaxLen(2 * MAX_MEMBERS)]
    completeness: Annotated[float, Ge(0), Le(1)]
    findings: Annotated[tuple[Why, ...], MaxLen(MAX_MEMBERS)]
    """What gradient validation found (spec T-20)."""


class Decision(_Message):
    """What the coordinator makes of the votes."""

    kind: Literal["commit", "again", "abort"]
    plan: Plan | None = None
    commit: Commit | None = None
    reason: ShortText = ""


class Invite(_Message):
    """Others are ready for a round: come with what you have, ``after_s`` from now at the latest."""

    round_index: Count
    after_s: Annotated[float, Ge(0), Le(3600)]


class InviteReply(_Message):
    """Whether this node trains towards that round, and will come to it."""

    coming: bool
    next_round: Annotated[int, Ge(-1), Le(1 << 48)]
    """The round this node trains towards; -1: none."""
    coordinator: PeerIdField | None = None
    """Who coordinates the round already, and comes before whoever asks."""
    catching_up: bool = False
    """It is fetching the state that the others hold, and will come once it has it."""


class StatusRequest(_Message):
    """Are you there, and do you know how this round ended?"""

    agreement: Digest


class StatusReply(_Message):
    """The outcome, where it is known."""

    decision: Decision | None
