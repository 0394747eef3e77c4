"""A round in groups as one node goes through it: its group, the column of its slice, the other slices, the end.

    group    contributions ↔ reducers of the group     the group's slices, fp32, stay with their reducers
    column   slice s of every group ↔ each other        slice s of the result, with one digest
    fetch    the other slices from their holders        checked by the digests that all columns have told
    held     "I hold all of it"                          committed once a majority of all members does

Group and column are rounds like any other (agreement, passes, vote), so what dies in them is made up for there. Members
are weighed as agreed; a group weighs what those weigh that are left of it. No step believes a single node: a group's
outcome counts when most of the group tell it, a slice's when most of its column do, and the table of all of them is
compared with some members of other groups before anything is applied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from manifests import sha256_hex
from trainer.aggregation import RuleConfig, finite_rows
from trainer.collective.arithmetic import Arithmetic, Payload
from trainer.collective.config import RoundSettings
from trainer.collective.levels.group_plan import column_rule, survivors_mask
from trainer.collective.levels.level_arithmetic import (
    ColumnArithmetic,
    GroupArithmetic,
    part_digest,
    slice_digest,
)
from trainer.collective.levels.level_calls import LevelCalls
from trainer.collective.levels.level_service import LevelService
from trainer.collective.levels.messages import GroupedAgreement, LevelAgreement, Stage, TallyTable
from trainer.collective.levels.tally import agreed_word
from trainer.collective.messages import Agreement, Commit, Member
from trainer.compression.sparse import SparseCodec
from trainer.compression.vectors import Codec, codec_named
from trainer.errors import (
    CodecError,
    RoundFailedError,
    RpcError,
    StateBehindError,
)
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

logger = logging.getLogger(__name__)

MakeArithmetic: TypeAlias = Callable[[Agreement, torch.Tensor, torch.Tensor | None], Arithmetic]
"""Of an agreement, this node's vector and its residual."""
GoThroughLevel: TypeAlias = Callable[
    [LevelAgreement, Contribution, MakeArithmetic | None, RuleConfig], Awaitable[tuple[RoundResult, Commit]]
]
"""Goes through the round of a group or column; RoundFailedError if it has no result."""

_WITNESSES = 3  # Of a group that are asked what it holds: two that agree are believed.
_COMPARED = 5  # Members of other groups with whom the table of the result is compared at once.
_COMPARISONS = 4  # Until one of them holds it too.
_FETCHES_AT_ONCE = 8
_FETCH_ROUNDS = 2
_DENSE_RESULT_CODEC = "int8"  # Of sparse contributions: sums over a group are dense.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedOutcome:
    """What a round in groups has come to at this node."""

    values: torch.Tensor  # fp32[num_values]
    report: RoundReport  # Without bytes and seconds.
    residual: torch.Tensor | None


@dataclass(slots=True)
class _Column:
    """One slice that this node reduced among the groups."""

    number: int
    digest: str = ""  # Empty: it came to nothing here.
    reports: list[RoundReport] = field(default_factory=list)


class GroupedRound:
    """One node in one round in groups, from the moment at which all members have acknowledged its agreement.

    ``contribution`` is filled; ``go_through`` takes part in the round of a group or column.
    """

    def __init__(
        self,
        agreement: GroupedAgreement,
        contribution: Contribution,
        settings: RoundSettings,
        levels: LevelService,
        go_through: GoThroughLevel,
    ) -> None:
        self._agreement = agreement
        self._contribution = contribution
        self._settings = settings
        self._own_id = settings.own_id
        self._go_through = go_through
        self._state = levels.begin(agreement)
        self._calls = LevelCalls(settings, levels, self._state)
        self._plan = self._state.plan
        self._group = self._plan.group_of(self._own_id)
        self._is_sparse = isinstance(settings.codec, SparseCodec)
        self._result_codec: Codec = codec_named(_DENSE_RESULT_CODEC) if self._is_sparse else settings.codec
        self._fp32 = codec_named("fp32")
        self._values = torch.zeros(agreement.num_values)
        self._group_commit: Commit | None = None
        self._group_vector: torch.Tensor | None = None  # Of sparse contributions, which all of a group hold.
        self._liars: dict[str, str] = {}

    async def run(self) -> GroupedOutcome:
        """Goes through the round.

        Raises:
            StateBehindError: the others have committed a result that this node does not hold.
            RoundFailedError: there is no result; nothing happened.
        """
        began_s = time.monotonic()
        group_result = await self._reduce_in_group()
        survivors, follows = await self._survivors(group_result)
        columns = await self._reduce_columns(survivors, follows)
        table = await self._slices(columns)
        missing = await self._fetch_missing(table, survivors)
        held_s = time.monotonic()
        await self._commit(table, missing)
        await self._compare(table)
        report = self._report(group_result, columns, survivors, table)
        return GroupedOutcome(
            values=self._values,
            report=replace(report, phases=(0.0, held_s - began_s, time.monotonic() - held_s)),
            residual=self._residual(group_result, survivors),
        )

    # -- in the group --------------------------------------------------------------------------------------------------

    async def _reduce_in_group(self) -> RoundResult | None:
        """Reduces the vector in this node's group; None: the group has no result, and the others go on without it."""
        members = self._plan.groups[self._group]
        agreement = self._level_agreement(
            follows=f"{self._agreement.fingerprint()} group {self._group}",
            members=[self._state.members[peer_id] for peer_id in members],
            reducers=members[: self._plan.num_slices],
            num_values=self._agreement.num_values,
            state_digest=self._contribution.state_digest,
        )
        made: list[GroupArithmetic] = []

        def make(level: Agreement, vector: torch.Tensor, residual: torch.Tensor | None) -> GroupArithmetic:
            reference, rule = self._contribution.reference, self._settings.rule
            made.append(
                GroupArithmetic(level, self._settings.codec, rule, vector, reference, residual, result_codec=self._fp32)
            )
            return made[0]

        try:
            result, self._group_commit = await self._go_through(
                agreement, self._contribution, None if self._is_sparse else make, self._settings.rule
            )
        except (RoundFailedError, RpcError, CodecError) as error:
            logger.warning("round %d: group %d: %s", self._agreement.round_index, self._group, error)
            return None
        if self._is_sparse:
            self._group_vector = result.vector
            self._state.digests |= await asyncio.to_thread(self._digests_of, result.vector)
        else:
            digests = made[0].digests
            self._state.digests |= digests
            # What was lost in a pass, and reduced again by another, is not what the group holds.
            self._state.hold(
                "group", {part: kept for part, kept in made[0].kept.items() if part_digest(kept) == digests.get(part)}
            )
        return result

    def _digests_of(self, vector: torch.Tensor) -> dict[int, bytes]:
        return {number: part_digest(self._encoded(vector, number)) for number in range(self._agreement.num_parts)}

    def _encoded(self, vector: torch.Tensor, number: int) -> Payload:
        return self._fp32.encode(vector[slice(*self._agreement.part_bounds(number))])

    async def _survivors(self, group_result: RoundResult | None) -> tuple[dict[int, tuple[str, ...]], str]:
        """Returns who is left of each group that has a result, and the digest of the table that says so."""
        word = ""
        members = self._plan.groups[self._group]
        if group_result is not None and self._group_commit is not None:
            word = f"{survivors_mask(members, self._group_commit.members)}.{group_result.report.result_digest}"
        table = await self._calls.tally(Stage.GROUPS, self._group, word)
        words = table.words()
        if word and words.get(self._group, word) != word:
            raise self._failed("the coordinator's table says something else of this group than the group")
        try:
            survivors = self._plan.survivors_told(table.rows)
        except ValueError as error:
            raise self._failed(f"the coordinator's table of groups: {error}") from error
        return survivors, table.fingerprint()

    # -- in the columns ------------------------------------------------------------------------------------------------

    async def _reduce_columns(self, survivors: Mapping[int, Collection[str]], follows: str) -> list[_Column]:
        """Reduces the slices that this node speaks for its group in: one; more in place of members that are gone."""
        columns = {number: self._plan.column(number, survivors) for number in self._slice_numbers()}
        self._state.set_voters(Stage.SLICES, {number: sorted(column) for number, column in columns.items()})
        own = [number for number, column in columns.items() if column.get(self._own_id) == self._group]
        return list(
            await asyncio.gather(*(self._reduce_column(number, columns[number], survivors, follows) for number in own))
        )

    def _slice_numbers(self) -> list[int]:
        """Slices with a part in them."""
        return [number for number in range(self._plan.num_slices) if self._parts_of(number)]

    def _parts_of(self, number: int) -> range:
        return self._plan.slice_parts(number, self._agreement.num_parts)

    def _bounds_of(self, number: int) -> slice:
        parts = self._parts_of(number)
        return slice(self._agreement.part_bounds(parts[0])[0], self._agreement.part_bounds(parts[-1])[1])

    async def _reduce_column(
        self, number: int, column: Mapping[str, int], survivors: Mapping[int, Collection[str]], follows: str
    ) -> _Column:
        reduced = _Column(number)
        try:
            place = self._bounds_of(number)
            vector = await self._own_slice(number)
            expected = await self._expected(number, column, survivors)
            weights = {
                group: sum(self._state.members[peer_id].weight for peer_id in left) for group, left in survivors.items()
            }
            agreement = self._level_agreement(
                follows=f"{self._agreement.fingerprint()} {follows} slice {number}",
                members=[
                    self._state.members[peer_id].model_copy(update={"weight": float(weights[group])})
                    for peer_id, group in column.items()
                ],
                reducers=self._plan.seeded_order(f"column {number}", column),
                num_values=vector.numel(),
                state_digest=self._contribution.state_digest,
            )
            made: list[ColumnArithmetic] = []
            reference = self._contribution.reference[place]
            rule = column_rule(self._settings.rule)

            def make(level: Agreement, own: torch.Tensor, _residual: torch.Tensor | None) -> ColumnArithmetic:
                made.append(
                    ColumnArithmetic(
                        level, self._fp32, rule, own, reference, result_codec=self._result_codec, expected=expected
                    )
                )
                return made[0]

            contribution = replace(
                self._contribution, vector=vector, reference=reference, residual=None, basis=None, filled=None
            )
            result, _ = await self._go_through(agreement, contribution, make, rule)
        except (RoundFailedError, RpcError, CodecError) as error:
            logger.warning("round %d: slice %d: %s", self._agreement.round_index, number, error)
            return reduced
        parts = self._parts_of(number)
        self._values[place] = result.vector
        self._state.hold("result", {parts[0] + part: payload for part, payload in made[0].results.items()})
        reduced.digest = slice_digest(self._state.parts["result"], parts)
        reduced.reports.append(result.report)
        return reduced

    async def _own_slice(self, number: int) -> torch.Tensor:
        """Returns this group's slice, fp32; what another member reduced in the end is fetched from it.

        Raises:
            RoundFailedError: parts of it are lost with their reducer.
        """
        parts = self._parts_of(number)
        place = self._bounds_of(number)
        if self._group_vector is not None:
            return self._group_vector[place].clone()
        held = dict(self._state.parts["group"])
        missing = [part for part in parts if part not in held]
        for holder, first, last in self._holders_of(missing):
            if holder == self._own_id:
                continue
            found = await self._calls.parts(holder, "group", range(first, last), self._fp32)
            held |= {part: payload for part, payload in found.items() if self._is_of_group(part, payload)}
        if any(part not in held for part in parts):
            raise self._failed(f"slice {number} of group {self._group} is lost with its reducer")
        out = torch.empty(place.stop - place.start)
        for part in parts:
            start, stop = self._agreement.part_bounds(part)
            self._fp32.decode(held[part], stop - start, out=out[start - place.start : stop - place.start])
        return out

    def _is_of_group(self, part: int, payload: Payload) -> bool:
        return part_digest(payload) == self._state.digests.get(part)

    def _holders_of(self, parts: Sequence[int]) -> list[tuple[str, int, int]]:
        """By whom parts of this group were reduced in the end: (member, first part, last part)."""
        if self._group_commit is None or not parts:
            return []
        found = []
        for task in self._group_commit.plan.tasks:
            first, last = max(task.first_part, parts[0]), min(task.last_part, parts[-1] + 1)
            if first < last:
                found.append((task.reducer, first, last))
        return found

    async def _expected(
        self, number: int, column: Mapping[str, int], survivors: Mapping[int, Collection[str]]
    ) -> dict[tuple[str, int], bytes]:
        """Returns what groups hold of a slice by the word of members that do not speak for them in its column."""
        parts = self._parts_of(number)

        async def of_group(speaker: str, group: int) -> dict[tuple[str, int], bytes]:
            others = [peer_id for peer_id in survivors[group] if peer_id != speaker]
            chosen = self._plan.seeded_order(f"witness {number} {group}", others)[:_WITNESSES]
            told = await asyncio.gather(*(self._calls.digests(peer_id, parts) for peer_id in chosen))
            agreed = _most_told([each for each in told if each is not None])
            return {(speaker, place): digest for place, digest in enumerate(agreed or ())}

        found = await asyncio.gather(
            *(of_group(speaker, group) for speaker, group in column.items() if group != self._group)
        )
        return {key: digest for each in found for key, digest in each.items()}

    # -- the whole -----------------------------------------------------------------------------------------------------

    async def _slices(self, columns: Sequence[_Column]) -> TallyTable:
        """Returns the table of the result's slices, by digest."""
        told = [(column.number, column.digest) for column in columns] or [(-1, "")]
        tables = await asyncio.gather(*(self._calls.tally(Stage.SLICES, number, word) for number, word in told))
        words = tables[0].words()
        if any(table != tables[0] for table in tables) or set(words) != set(self._slice_numbers()):
            raise self._failed("the coordinator's table does not name each slice once")
        for column in columns:
            if column.digest and words[column.number] != column.digest:
                raise self._failed(f"slice {column.number}: the coordinator names another result than its column holds")
        return tables[0]

    async def _fetch_missing(self, table: TallyTable, survivors: Mapping[int, Collection[str]]) -> list[int]:
        """Fetches the slices that this node does not hold; returns those that are nowhere to be had."""
        places = asyncio.Semaphore(_FETCHES_AT_ONCE)
        held = self._state.parts["result"]
        # Each begins with the slice after its own, so that no holder is asked by all at once.
        wanted = [number for number in table.words() if self._parts_of(number)[0] not in held]
        own_number = self._plan.groups[self._group].index(self._own_id)
        wanted.sort(key=lambda number: (number <= own_number, number))

        async def fetch(number: int) -> int | None:
            async with places:
                return None if await self._fetch_slice(number, table.words()[number], survivors) else number

        found = await asyncio.gather(*(fetch(number) for number in wanted))
        return [number for number in found if number is not None]

    async def _fetch_slice(self, number: int, digest: str, survivors: Mapping[int, Collection[str]]) -> bool:
        """Fetches a slice from its holder in this group, or from those in others."""
        column = self._plan.column(number, survivors)
        parts, is_asked = self._parts_of(number), False
        for holder in self._plan.fetch_order(self._own_id, number, column) * _FETCH_ROUNDS:
            if holder in self._liars or holder == self._own_id:
                continue
            try:
                found = await self._calls.parts(holder, "result", parts, self._result_codec)
                if slice_digest(found, parts) != digest:
                    if not is_asked:
                        await self._check_told(number, digest, column)
                        is_asked = True
                    self._liars[holder] = f"served another slice {number} than was agreed"
                    continue
                await asyncio.to_thread(self._decode, found)
                return True
            except (RpcError, CodecError, TimeoutError) as error:
                logger.info("round %d: slice %d from %s: %s", self._agreement.round_index, number, holder[:8], error)
        return False

    async def _check_told(self, number: int, digest: str, column: Collection[str]) -> None:
        """Asks a column what its slice is, where a holder serves another than the coordinator has named.

        Raises:
            RoundFailedError: most of those that answer have told another: it is the coordinator that lies.
        """
        voters = sorted(column)
        ballots = await asyncio.gather(*(self._calls.ballot(Stage.SLICES, number, peer_id) for peer_id in voters))
        told = zip(voters, ballots, strict=True)
        words = {peer_id: ballot.word for peer_id, ballot in told if ballot is not None and ballot.word}
        if words and agreed_word(words, voters) != digest and 2 * list(words.values()).count(digest) <= len(words):
            raise self._failed(f"slice {number}: the coordinator names another result than its column has told")

    def _decode(self, parts: Mapping[int, Payload]) -> None:
        for part, payload in parts.items():
            start, stop = self._agreement.part_bounds(part)
            values = self._result_codec.decode(payload, stop - start, out=self._values[start:stop])
            if not finite_rows([values])[0]:
                raise CodecError(f"part {part}: expected finite results, found NaN or infinity")

    async def _commit(self, table: TallyTable, missing: Sequence[int]) -> None:
        """Says whether this node holds all of the result, and returns if most members do, this node among them."""
        word = "" if missing else table.fingerprint()
        outcome = await self._calls.tally(Stage.HELD, 0, word)
        committed = outcome.words().get(0, "")
        if missing or committed != word:
            raise StateBehindError(
                f"round {self._agreement.round_index}: the others have committed a result that this node does not hold "
                f"whole ({len(missing)} slices are missing)"
            )

    async def _compare(self, table: TallyTable) -> None:
        """Compares the result's digests with members of other groups: a coordinator may have told two stories.

        Two members or more that hold another, and most of those asked, show this node that it is the one deceived; so
        does it where members answer and nobody of them holds this one, which most members hold where all is well.
        """
        group = set(self._plan.groups[self._group])
        others = [peer_id for peer_id in self._agreement.peer_ids if peer_id not in group]
        order = self._plan.seeded_order(f"compare {self._own_id}", others)[: _COMPARED * _COMPARISONS]
        words: list[str] = []
        while order and table.fingerprint() not in words:
            chosen, order = order[:_COMPARED], order[_COMPARED:]
            ballots = await asyncio.gather(*(self._calls.ballot(Stage.HELD, 0, peer_id) for peer_id in chosen))
            words += [ballot.word or "" for ballot in ballots if ballot is not None]
        num_other = sum(bool(word) and word != table.fingerprint() for word in words)
        if (num_other > 1 and 2 * num_other > len([word for word in words if word])) or (
            words and table.fingerprint() not in words
        ):
            raise StateBehindError(
                f"round {self._agreement.round_index}: {num_other} of {len(words)} members of other groups hold "
                f"another result, {words.count(table.fingerprint())} this one: the coordinator has told groups two "
                "stories; nothing is applied"
            )

    # -- what is said of it --------------------------------------------------------------------------------------------

    def _level_agreement(
        self, *, follows: str, members: Sequence[Member], reducers: Sequence[str], num_values: int, state_digest: str
    ) -> LevelAgreement:
        names = ("round_index", "attempt", "part_values", "vocabulary_rows", "change", "change_digest")
        return LevelAgreement(
            **{name: getattr(self._agreement, name) for name in names},
            coordinator=reducers[0],
            state_digest=state_digest,
            num_values=num_values,
            members=tuple(sorted(members, key=lambda member: member.peer_id)),
            follows=sha256_hex(follows.encode()),
            slice_reducers=tuple(reducers),
        )

    def _residual(
        self, group_result: RoundResult | None, survivors: Mapping[int, Collection[str]]
    ) -> torch.Tensor | None:
        """What this node brings to the next round: all of its vector, if its group is not in the result."""
        if group_result is not None and self._own_id in survivors.get(self._group, ()):
            return group_result.residual
        if self._settings.codec.name == "fp32":
            return None
        residual = self._contribution.residual
        return self._contribution.vector.clone() if residual is None else self._contribution.vector + residual

    def _report(
        self,
        group_result: RoundResult | None,
        columns: Sequence[_Column],
        survivors: Mapping[int, Collection[str]],
        table: TallyTable,
    ) -> RoundReport:
        reports = [group_result.report] if group_result is not None else []
        reports += [report for column in columns for report in column.reports]
        left_out = {peer_id: reason for report in reports for peer_id, reason in report.dropped} | self._liars
        members = sorted(peer_id for left in survivors.values() for peer_id in left)
        for peer_id in set(self._agreement.peer_ids) - set(members):
            left_out.setdefault(peer_id, "gone before the end of its group's round")
        sizes = [len(group) for group in self._plan.groups]
        notes = [f"in {len(sizes)} groups of {min(sizes)} to {max(sizes)}"]
        notes += [note for note in dict.fromkeys(report.note for report in reports) if note]
        weights = {member.peer_id: member.weight for member in self._agreement.members}
        return RoundReport(
            round_index=self._agreement.round_index,
            members=tuple(members),
            dropped=tuple(sorted(left_out.items())),
            completeness=len(members) / len(self._agreement.members),
            rule=reports[0].rule if reports else self._settings.rule.rule,
            num_passes=max((report.num_passes for report in reports), default=1),
            weights=tuple(weights[peer_id] for peer_id in members),
            validation=reports[0].validation if reports else (),
            findings=reports[0].findings if reports else (),
            note="; ".join(notes),
            num_values=self._agreement.num_values,
            result_digest=table.fingerprint(),
        )

    def _failed(self, why: str) -> RoundFailedError:
        return RoundFailedError(f"round {self._agreement.round_index}: {why}")


def _most_told(told: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...] | None:
    """Returns the digests that two witnesses or more tell alike; None: there are no such."""
    for each in told:
        if told.count(each) > 1:
            return each
    return None
