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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trainer.collective.arithmetic import Payload
from trainer.collective.config import RoundSettings
from trainer.collective.levels.columns import (
    LEVEL_CODEC,
    ColumnReduction,
    GoThroughLevel,
    GroupResult,
    ReducedSlice,
)
from trainer.collective.levels.group_plan import survivors_mask
from trainer.collective.levels.level_arithmetic import GroupArithmetic, part_digest
from trainer.collective.levels.level_calls import LevelCalls
from trainer.collective.levels.level_service import LevelService
from trainer.collective.levels.messages import GroupedAgreement, Stage, TallyTable
from trainer.collective.levels.slice_fetching import SliceFetcher
from trainer.collective.messages import Agreement
from trainer.compression.sparse import SparseCodec
from trainer.compression.vectors import Codec, codec_named
from trainer.errors import CodecError, RoundFailedError, RpcError, StateBehindError
from trainer.outer.engine.collective import Contribution, RoundReport

logger = logging.getLogger(__name__)

_COMPARED = 5  # Members of other groups with whom the table of the result is compared at once.
_COMPARISONS = 4  # Until one of them holds it too.
_DENSE_RESULT_CODEC = "int8"  # Of sparse contributions: sums over a group are dense.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedOutcome:
    """What a round in groups has come to at this node."""

    values: torch.Tensor  # fp32[num_values]
    report: RoundReport  # Without bytes and seconds.
    residual: torch.Tensor | None


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
        self._values = torch.zeros(agreement.num_values)
        self._fetcher = SliceFetcher(self._own_id, self._state, self._calls, self._result_codec, self._values)

    async def run(self) -> GroupedOutcome:
        """Goes through the round.

        Raises:
            StateBehindError: the others have committed a result that this node does not hold.
            RoundFailedError: there is no result; nothing happened.
        """
        began_s = time.monotonic()
        group = await self._reduce_in_group()
        survivors, follows = await self._survivors(group)
        columns = await self._reduce_columns(group, survivors, follows)
        table = await self._slices(columns)
        missing = await self._fetch_missing(table, survivors)
        held_s = time.monotonic()
        await self._commit(table, missing)
        await self._compare(table)
        report = self._report(group, columns, survivors, table)
        return GroupedOutcome(
            values=self._values,
            report=replace(report, phases=(0.0, held_s - began_s, time.monotonic() - held_s)),
            residual=self._residual(group, survivors),
        )

    # -- in the group --------------------------------------------------------------------------------------------------

    async def _reduce_in_group(self) -> GroupResult | None:
        """Reduces the vector in this node's group; None: the group has no result, and the others go on without it."""
        members = self._plan.groups[self._group]
        agreement = self._agreement.level(
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
                GroupArithmetic(
                    level, self._settings.codec, rule, vector, reference, residual, result_codec=LEVEL_CODEC
                )
            )
            return made[0]

        try:
            result, commit = await self._go_through(
                agreement, self._contribution, None if self._is_sparse else make, self._settings.rule
            )
        except (RoundFailedError, RpcError, CodecError) as error:
            logger.warning("round %d: group %d: %s", self._agreement.round_index, self._group, error)
            return None
        if self._is_sparse:
            self._state.digests |= await asyncio.to_thread(self._digests_of, result.vector)
        else:
            digests = made[0].digests
            self._state.digests |= digests
            # What was lost in a pass, and reduced again by another, is not what the group holds.
            self._state.hold(
                "group", {part: kept for part, kept in made[0].kept.items() if part_digest(kept) == digests.get(part)}
            )
        return GroupResult(result=result, commit=commit, vector=result.vector if self._is_sparse else None)

    def _digests_of(self, vector: torch.Tensor) -> dict[int, bytes]:
        return {number: part_digest(self._encoded(vector, number)) for number in range(self._agreement.num_parts)}

    def _encoded(self, vector: torch.Tensor, number: int) -> Payload:
        return LEVEL_CODEC.encode(vector[slice(*self._agreement.part_bounds(number))])

    async def _survivors(self, group: GroupResult | None) -> tuple[dict[int, tuple[str, ...]], str]:
        """Returns who is left of each group that has a result, and the digest of the table that says so."""
        word = ""
        members = self._plan.groups[self._group]
        if group is not None:
            word = f"{survivors_mask(members, group.commit.members)}.{group.result.report.result_digest}"
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

    async def _reduce_columns(
        self, group: GroupResult | None, survivors: Mapping[int, Collection[str]], follows: str
    ) -> list[ReducedSlice]:
        """Reduces the slices that this node speaks for its group in: one; more in place of members that are gone."""
        columns = {number: self._plan.column(number, survivors) for number in self._state.slice_numbers()}
        self._state.set_voters(Stage.SLICES, {number: sorted(column) for number, column in columns.items()})
        own = [number for number, column in columns.items() if column.get(self._own_id) == self._group]
        reduction = ColumnReduction(
            state=self._state,
            calls=self._calls,
            settings=self._settings,
            contribution=self._contribution,
            go_through=self._go_through,
            group=group,
            survivors=survivors,
            follows=follows,
            result_codec=self._result_codec,
            values=self._values,
        )
        return list(await asyncio.gather(*(reduction.reduce(number, columns[number]) for number in own)))

    # -- the whole -----------------------------------------------------------------------------------------------------

    async def _slices(self, columns: Sequence[ReducedSlice]) -> TallyTable:
        """Returns the table of the result's slices, by digest."""
        told = [(column.number, column.digest) for column in columns] or [(-1, "")]
        tables = await asyncio.gather(*(self._calls.tally(Stage.SLICES, number, word) for number, word in told))
        words = tables[0].words()
        if any(table != tables[0] for table in tables) or set(words) != set(self._state.slice_numbers()):
            raise self._failed("the coordinator's table does not name each slice once")
        for column in columns:
            if column.digest and words[column.number] != column.digest:
                raise self._failed(f"slice {column.number}: the coordinator names another result than its column holds")
        return tables[0]

    async def _fetch_missing(self, table: TallyTable, survivors: Mapping[int, Collection[str]]) -> list[int]:
        """Fetches the slices that this node does not hold; returns those that are nowhere to be had."""
        return await self._fetcher.fetch_missing(table, survivors)

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

    def _residual(self, group: GroupResult | None, survivors: Mapping[int, Collection[str]]) -> torch.Tensor | None:
        """What this node brings to the next round: all of its vector, if its group is not in the result."""
        if group is not None and self._own_id in survivors.get(self._group, ()):
            return group.result.residual
        if self._settings.codec.name == "fp32":
            return None
        residual = self._contribution.residual
        return self._contribution.vector.clone() if residual is None else self._contribution.vector + residual

    def _report(
        self,
        group: GroupResult | None,
        columns: Sequence[ReducedSlice],
        survivors: Mapping[int, Collection[str]],
        table: TallyTable,
    ) -> RoundReport:
        reports = [group.result.report] if group is not None else []
        reports += [column.report for column in columns if column.report is not None]
        left_out = {peer_id: reason for report in reports for peer_id, reason in report.dropped} | self._fetcher.liars
        members = sorted(peer_id for left in survivors.values() for peer_id in left)
        for peer_id in set(self._agreement.peer_ids) - set(members):
            left_out.setdefault(peer_id, "gone before the end of its group's round")
        sizes = [len(each) for each in self._plan.groups]
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
