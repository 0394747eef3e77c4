"""What members of a round in groups say to each other, beside what members of any round do.

    roster       member → leader, leader → coordinator   "the agreement with this digest"      → a page of it
    tally        member → coordinator   "my group / my column / I have come to this"  → what all have come to
    ballot       coordinator's successor or a witness → member   "what did you say there?"
    part_digests column → a group's members   "what does your group hold for this slice?"  → digests of its parts
    parts        stream: encoded parts of a group's slice, or of the result

A round has three tallies (`Stage`). Everything is bounded: a table has at most `MAX_ROUND_MEMBERS` rows, so that what
the coordinator sends grows with √n for each of n members; the agreement itself comes through the leaders of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen
from pydantic import Field, PrivateAttr

from manifests import canonical_json, sha256_hex
from trainer.collective.config import MAX_GROUPED_MEMBERS, MAX_ROUND_MEMBERS
from trainer.collective.messages import (
    MAX_ROSTER_BYTES,
    Agreement,
    Count,
    Digest,
    Member,
    PeerIdField,
    ShortText,
    _Message,
)

ROSTER_METHOD = "round/roster"
TALLY_METHOD = "round/tally"
BALLOT_METHOD = "round/ballot"
DIGESTS_METHOD = "round/part_digests"
PARTS_METHOD = "round/parts"

ROSTER_PAGE_BYTES = 1 << 20
GROUPED_PART_VALUES = 1 << 18
"""Most values of a part: between groups they travel as fp32, and a frame holds 1 MiB."""

Subject = Annotated[int, Ge(-1), Le(MAX_ROUND_MEMBERS)]
Word = Annotated[str, Field(pattern=r"^[0-9a-f.]{0,96}$")]
"""What a member says of a subject: as text, so that equal words are equal bytes; empty: it has come to nothing."""


PartsKind = Literal["group", "result"]


class Stage(IntEnum):
    """What a tally is about: one subject each group, each slice, or one alone."""

    GROUPS = 0  # Who is left of a group, and the digest of what it holds.
    SLICES = 1  # The digest of a slice of the result.
    HELD = 2  # The digest of the table of slices, by those who hold all of them.


class GroupedAgreement(Agreement):
    """The agreement of a round in groups; travels in pages (`RosterRequest`), with a `RosterNotice` before it."""

    members: Annotated[tuple[Member, ...], MaxLen(MAX_GROUPED_MEMBERS)]
    roster: None = None
    follows: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of a second phase, which never travels: the digest of the first agreement and its result."""
    _fingerprint: str = PrivateAttr(default="")

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON; of some hundred kilobytes, so it is computed once."""
        if not self._fingerprint:
            self._fingerprint = sha256_hex(self.to_bytes())
        return self._fingerprint

    def to_bytes(self) -> bytes:
        """Returns the canonical JSON, as it travels in pages."""
        return canonical_json(self.model_dump(mode="json"))

    def second(self, num_values: int, state_digest: str, part_values: int) -> GroupedAgreement:
        """Returns what a second phase goes by: the same members, in groups by another seed (``state_digest``)."""
        facts = {"num_values": num_values, "state_digest": state_digest, "part_values": part_values}
        return GroupedAgreement(
            **{name: getattr(self, name) for name in Agreement.model_fields} | facts, follows=self.fingerprint()
        )

    def level(
        self, *, follows: str, members: Sequence[Member], reducers: Sequence[str], num_values: int, state_digest: str
    ) -> LevelAgreement:
        """Returns what a group or a column of this round goes by.

        Args:
            follows: What led to it, in words; its digest is part of the agreement.
            members: Those of the group or column, with their weights in it.
            reducers: Those who reduce in the first pass, in the order of the slices; the first one coordinates.
            num_values: Length of its vector.
            state_digest: Of the state before the round.
        """
        names = ("round_index", "attempt", "part_values", "vocabulary_rows", "change", "change_digest")
        return LevelAgreement(
            **{name: getattr(self, name) for name in names},
            coordinator=reducers[0],
            state_digest=state_digest,
            num_values=num_values,
            members=tuple(sorted(members, key=lambda member: member.peer_id)),
            follows=sha256_hex(follows.encode()),
            slice_reducers=tuple(reducers),
        )


class LevelAgreement(Agreement):
    """What a group or a column goes by; each member makes it itself of the agreement and the tallies, it never travels.

    Members that were told different tallies are in different columns, with nobody: a coordinator that tells two stories
    stops the round, and does not split it.
    """

    follows: Digest
    slice_reducers: Annotated[tuple[PeerIdField, ...], MaxLen(MAX_ROUND_MEMBERS)]

    @property
    def reducers(self) -> tuple[str, ...]:
        """Ids of those who reduce in the first pass, in the order of the slices."""
        return self.slice_reducers


def agreement_class(num_members: int, max_group_members: int) -> type[Agreement]:
    """Returns the agreement that a round of so many members goes by."""
    return GroupedAgreement if num_members > max_group_members else Agreement


class RosterRequest(_Message):
    """Asks for a page of an agreement."""

    agreement: Digest
    offset: Annotated[int, Ge(0), Le(MAX_ROSTER_BYTES)]


class RosterPage(_Message):
    """The page is the payload."""

    size_bytes: Annotated[int, Ge(0), Le(MAX_ROSTER_BYTES)]  # Of the whole.


class TallyRequest(_Message):
    """A member's word in a tally; ``subject`` -1: it has none, and wants to know the outcome."""

    agreement: Digest
    stage: Stage
    subject: Subject
    word: Word


class TallyTable(_Message):
    """What members came to: (subject, word), by subject; some come to nothing. Or why the round failed."""

    rows: Annotated[tuple[tuple[Subject, Word], ...], MaxLen(MAX_ROUND_MEMBERS)]
    failure: ShortText = ""

    def words(self) -> dict[int, str]:
        """Returns the words by subject."""
        return dict(self.rows)


class BallotRequest(_Message):
    """Asks a member for the word that it has given in a tally."""

    agreement: Digest
    stage: Stage
    subject: Subject


class BallotReply(_Message):
    """Its word; None: it has given none yet."""

    word: Word | None


class DigestsRequest(_Message):
    """Asks for the digests of parts as the member's group holds them; 32 bytes each in the payload."""

    agreement: Digest
    first_part: Count
    last_part: Count  # Exclusive.


class DigestsReply(_Message):
    """The digests are the payload."""


class PartsOpen(_Message):
    """Opens a stream of encoded parts: of a group's result, in fp32, or of the round's, as the codec has them."""

    agreement: Digest
    kind: PartsKind
    first_part: Count
    last_part: Count  # Exclusive.
