"""What members of a round say to each other; tensors travel beside these, as raw bytes.

A round, in the order of its messages:

    join         member → coordinator   "I have this state and so many batches"     → Agreement
    acknowledge  member → coordinator   "I read the agreement with this digest"     → begun, or another Agreement
    exchange     member ↔ reducer       contribution parts one way, result parts the other
    moments      reducer → coordinator  sums over its slice (rules that need them)   → all reducers' sums
    vote         member → coordinator   "these are the digests of what I hold"       → CommitDecision
    invite, status                      "come with what you have"; "are you there, do you know the outcome?"
    attend                              "the round closes by its quorum: come without work, for the result"

Everything is bounded: a list has a few times `MAX_ROUND_MEMBERS` entries, a string its own limit.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, MaxLen
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from manifests import canonical_json, sha256_hex
from trainer.collective.config import MAX_GROUPED_MEMBERS, MAX_ROUND_MEMBERS
from trainer.errors import RefusedError, TrainerUsageError
from trainer.network.rpc import Peer
from trainer.network.rpc.config import split_address

INIT_DIGEST = "model.init_digest"
"""Of the weights that a run began with, among its settings; runs that began with weights by their seed have none."""
RUN_DIGEST = "run"
"""Of the signed file of the run, among its settings; runs without one have none."""
MAX_ROSTER_BYTES = 1100 * MAX_GROUPED_MEMBERS  # Of its agreement: an entry has 1,050 bytes at most, most have 850.

PeerIdField = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Ge(0), Le(1 << 48)]
Share = Annotated[float, Ge(0), Le(1)]
MOST_LAG = 1 << 20
Lag = Annotated[int, Ge(0), Le(MOST_LAG)]
ShortText = Annotated[str, Field(pattern=r"^[ -~]{0,120}$")]
"""A reason, for people: ASCII, so that its length is its size (`short`)."""
Certificate = Annotated[str, MaxLen(800)]  # PEM; those made here have some 570 characters.


def _reachable(address: str) -> str:
    try:
        split_address(address)
    except TrainerUsageError as error:
        raise ValueError(str(error)) from error
    return address


Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:\[\]-]{3,128}$"), AfterValidator(_reachable)]
"""``host:port``; checked before any node connects there."""
TaskKey = Annotated[str, Field(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))


class _Extended(_Message):
    """A message with fields that earlier releases do not know, which are left out where they say nothing."""

    NEWER_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_silent_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        return {name: value for name, value in fields.items() if value or name not in self.NEWER_FIELDS}


class _OfChangingRun(_Extended):
    """A message that names the run's newest change in force."""

    NEWER_FIELDS = frozenset({"change", "change_digest"})

    change: Count = 0
    """Number of the newest change of the run that is in force in this round; members of others do not reduce."""
    change_digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Its digest, which names all changes before it: an owner may have signed two of one number."""


def short(text: str) -> str:
    """Returns a reason as it may travel: ASCII, 120 characters at most."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:120])


class Terms(BaseModel):
    """What nodes must have in common to train one model together; a node that differs takes part in no round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: dict[str, JsonValue]  # Shape of the model, without the rows of its vocabulary, which grow.
    tokenizer_lineage: str
    """Digest of what never changes in the vocabulary (pattern, special ids and the first merges)."""
    synchronisation: dict[str, JsonValue]
    """Inner steps, outer optimizer, fragments, rule, compression: everything that changes the result of a round."""

    def digest(self) -> str:
        """Returns the SHA-256 of the canonical JSON."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    def check(self, other: Terms, who: str) -> None:
        """Refuses a peer that trains something else.

        Raises:
            RefusedError: with ``architecture``, ``vocabulary`` or ``settings`` as its reason.
        """
        _check_fields("architecture", self.architecture, other.architecture, who)
        if self.tokenizer_lineage != other.tokenizer_lineage:
            raise RefusedError(
                "vocabulary",
                f"{who}: expected the vocabulary {self.tokenizer_lineage[:12]}, found {other.tokenizer_lineage[:12]}; "
                "train from the same store, or in a run of its own (--run-id)",
            )
        began, theirs = (str(terms.synchronisation.get(INIT_DIGEST, ""))[:12] for terms in (self, other))
        if began != theirs:
            raise RefusedError(
                "settings",
                f"{who}: this run began with the weights {began or 'of its seed'}, the node with "
                f"{theirs or 'those of its seed'}; give it the same --init-from, or a run of its own (--run-id)",
            )
        _check_fields("settings", self.synchronisation, other.synchronisation, who)


def _check_fields(kind: str, ours: dict[str, JsonValue], theirs: dict[str, JsonValue], who: str) -> None:
    for name in sorted(ours.keys() | theirs.keys()):
        expected, found = ours.get(name), theirs.get(name)
        if expected != found:
            raise RefusedError(
                kind,
                f"{who}: this run has {name} {expected}, the node {str(found)[:80]}; give it the same {kind}, or a run "
                "of its own (--run-id)",
            )


class ClaimedWork(_Message):
    """What the work that a member comes with took, and what it missed."""

    num_steps: Count
    lag: Lag
    """Rounds over the same parameters that went by without it."""


class JoinRequest(_OfChangingRun):
    """A node is ready for an outer step."""

    NEWER_FIELDS = _OfChangingRun.NEWER_FIELDS | {"work"}

    round_index: Count
    terms: Terms
    state_digest: Digest
    num_values: Count
    num_batches: Count
    age_s: Annotated[float, Ge(0)]
    progress: Share = 1.0  # Share of the round's planned work that is done.
    work: ClaimedWork | None = None  # Beside the batches, where a round has a quorum.
    vocabulary_rows: Count
    address: Address
    certificate: Certificate | None
    tried: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_ROUND_MEMBERS)]
    """Coordinators that precede the one asked, and could not be reached."""

    @property
    def num_steps(self) -> int:
        """Inner steps that its batches took; 0: not told."""
        return 0 if self.work is None else self.work.num_steps

    @property
    def lag(self) -> int:
        """Rounds that its work missed, by its own word."""
        return 0 if self.work is None else self.work.lag


class Member(_Extended):
    """One who takes part, and its weight."""

    NEWER_FIELDS = frozenset({"lag"})

    peer_id: PeerIdField
    address: Address
    certificate: Certificate | None
    weight: Annotated[float, Ge(0)]
    progress: Share = 1.0
    lag: Lag = 0  # Rounds that its work missed, for which it weighs less; only where rounds have a quorum.

    @property
    def peer(self) -> Peer:
        """How to reach it."""
        return Peer(self.peer_id, self.address, self.certificate.encode() if self.certificate else None)


class RosterNotice(_Message):
    """Where a member fetches the agreement of a round in groups, which no message holds: a node sends O(groups) copies.

    Its digest is all that has to be believed; whoever serves another is found out.
    """

    digest: Digest
    size_bytes: Annotated[int, Ge(2), Le(MAX_ROSTER_BYTES)]
    sources: Annotated[tuple[Member, ...], MaxLen(3)]
    """The first members of its own group, which fetch it from the coordinator; empty: from the coordinator."""


class Agreement(_OfChangingRun):
    """Who takes part in a round, and how; every member acknowledges its digest before a tensor moves."""

    NEWER_FIELDS = _OfChangingRun.NEWER_FIELDS | {"roster"}

    round_index: Count
    attempt: Count
    coordinator: PeerIdField
    state_digest: Digest
    num_values: Count
    part_values: Annotated[int, Ge(1)]
    vocabulary_rows: Count  # Rows of the embedding after this round: the most that every member can have.
    members: Annotated[tuple[Member, ...], MaxLen(MAX_ROUND_MEMBERS)]  # Sorted by peer id.
    roster: RosterNotice | None = None
    """In place of ``members``, where they are more than a message holds."""

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """Ids of the members, sorted."""
        return tuple(member.peer_id for member in self.members)

    @property
    def taking_part(self) -> tuple[str, ...]:
        """Ids of the members that this phase of the round begins with, sorted: all, unless it follows another."""
        return self.peer_ids

    @property
    def reducers(self) -> tuple[str, ...]:
        """Ids of those who reduce a slice each in the first pass, in the order of the slices."""
        return self.taking_part

    @property
    def weights(self) -> list[float]:
        """Weights of the members, in their order."""
        return [member.weight for member in self.members]

    @property
    def num_parts(self) -> int:
        """Number of parts the vector is cut into."""
        return -(-self.num_values // self.part_values)

    def part_bounds(self, part: int) -> tuple[int, int]:
        """Returns where a part begins and ends in the vector."""
        start = part * self.part_values
        return start, min(start + self.part_values, self.num_values)

    def succession(self) -> tuple[Member, ...]:
        """Returns the members in the order in which they decide the round: the coordinator, then those after it."""
        first = self.peer_ids.index(self.coordinator) if self.coordinator in self.peer_ids else 0
        taking_part = set(self.taking_part)
        ordered = self.members[first:] + self.members[:first]
        return tuple(member for member in ordered if member.peer_id in taking_part)


class PhaseAgreement(Agreement):
    """What the second phase of a round goes by; each member makes it itself of the agreement and the first's commit.

    It never travels: members whose digests of it differ do not take each other for members. Its majority is one of all
    who agreed on the round, not of those who are left.
    """

    follows: Digest
    """Of the agreement, and of the result that its commit names."""
    remaining: tuple[PeerIdField, ...]  # Sorted.

    @property
    def taking_part(self) -> tuple[str, ...]:
        """Ids of the members that hold the first phase's result."""
        return self.remaining


class Acknowledge(_Message):
    """A member has read an agreement that includes it."""

    round_index: Count
    agreement: Digest


class AcknowledgeReply(_Message):
    """``None``: all have acknowledged; or a new agreement without those who have not."""

    agreement: Agreement | None


class Task(_Message):
    """A range of parts and who reduces it; its key is ``pass.number``."""

    key: TaskKey
    reducer: PeerIdField
    first_part: Count
    last_part: Count  # Exclusive.


class Plan(_Message):
    """Who reduces what in one pass. Tasks of earlier passes stay listed until they are lost."""

    agreement: Digest
    pass_index: Annotated[int, Ge(0), Le(99)]
    members: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_ROUND_MEMBERS)]  # Members still present.
    tasks: Annotated[tuple[Task, ...], MaxLen(4 * MAX_ROUND_MEMBERS)]

    @property
    def fresh(self) -> tuple[Task, ...]:
        """The tasks to be done in this pass."""
        return tuple(task for task in self.tasks if task.key.startswith(f"{self.pass_index}."))


class ReductionOpen(_Message):
    """Opens a stream between a member and a reducer."""

    plan: Digest
    agreement: Digest
    task: TaskKey


class MomentsOpen(_Message):
    """Sums over one task's slice; the sums themselves are the payload."""

    agreement: Digest
    task: TaskKey


class MomentsReply(_Message):
    """All reducers' sums, one after the other in the payload, in the order of these sizes."""

    sizes_bytes: Annotated[tuple[Count, ...], MaxLen(MAX_ROUND_MEMBERS)]


class TaskDigest(_Message):
    """The result of a task as one member holds it; ``None``: it does not hold all of it."""

    key: TaskKey
    digest: Digest | None
    num_included: Count | None = None  # Contributed parts in it; only its reducer knows.


class MemberReason(_Message):
    """A member whose contribution was left out, wholly or in part, or looks odd; and why."""

    peer_id: PeerIdField
    reason: ShortText


class Vote(_Message):
    """What a member holds and saw at the end of a pass. Moments for the report are the payload."""

    plan: Plan
    term: Annotated[int, Ge(0), Le(MAX_ROUND_MEMBERS)]
    digests: Annotated[tuple[TaskDigest, ...], MaxLen(4 * MAX_ROUND_MEMBERS)]
    failed: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_ROUND_MEMBERS)]
    """Reducers that did not deliver to this member."""
    dropped: Annotated[tuple[MemberReason, ...], MaxLen(MAX_ROUND_MEMBERS)]
    """Contributors that this member left out as a reducer."""


class Commit(_Message):
    """The end of a round: every member named holds these results, and applies them."""

    plan: Plan
    members: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_ROUND_MEMBERS)]
    digests: Annotated[tuple[TaskDigest, ...], MaxLen(4 * MAX_ROUND_MEMBERS)]
    dropped: Annotated[tuple[MemberReason, ...], MaxLen(2 * MAX_ROUND_MEMBERS)]
    completeness: Annotated[float, Ge(0), Le(1)]
    findings: Annotated[tuple[MemberReason, ...], MaxLen(MAX_ROUND_MEMBERS)]  # Of gradient validation (spec T-20).


class CommitDecision(_Message):
    """The coordinator's decision on the votes."""

    kind: Literal["commit", "again", "abort"]
    plan: Plan | None = None
    commit: Commit | None = None
    reason: ShortText = ""


class Invite(_OfChangingRun):
    """Others are ready for a round: come with what you have, within ``after_s``."""

    round_index: Count
    after_s: Annotated[float, Ge(0), Le(3600)]


class InviteReply(_OfChangingRun):
    """Whether the node trains towards that round, and will join it."""

    coming: bool
    next_round: Annotated[int, Ge(-1), Le(1 << 48)]  # The round it trains towards; -1: none.
    coordinator: PeerIdField | None = None
    """The node that coordinates the round already, and precedes the one that asks."""
    catching_up: bool = False  # It is fetching the state that the others hold, and will join once it has it.


class StatusRequest(_Message):
    """Asks whether a member is there, and whether it knows how this round ended."""

    agreement: Digest


class StatusReply(_Message):
    """The outcome, where it is known."""

    decision: CommitDecision | None
