"""One slice of a round in groups, reduced among the groups: what a member does that speaks for its group there.

    own slice   what this node's group holds of it, fp32: reduced here, or fetched from who reduced it in the end
    expected    what the other groups hold of it, by the word of members that do not speak for them in the column
    column      a round like any other over the slice, each group weighing what those weigh that are left of it
    held        the encoded result stays here for the others to fetch, under one digest

Guarantees: what a group brings is left out of the slice where it is not what two witnesses in that group tell alike.
What dies in a column is made up for there; a column without a result costs this node its word on the slice, no more.

The trade-off: three witnesses of each other group are asked for their digests before anything is reduced, one more
round trip and 32 bytes a part (of 262,144 values) from each. Two that agree are believed, and where no two do, nothing
is compared: to bring another slice than its group holds, a reducer needs two of the three on its side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from trainer.aggregation import RuleConfig
from trainer.collective.arithmetic import Arithmetic, Payload
from trainer.collective.config import RoundSettings
from trainer.collective.levels.group_plan import column_rule
from trainer.collective.levels.level_arithmetic import ColumnArithmetic, part_digest, slice_digest
from trainer.collective.levels.level_calls import LevelCalls
from trainer.collective.levels.level_service import GroupedState
from trainer.collective.levels.messages import LevelAgreement
from trainer.collective.messages import Agreement, Commit
from trainer.compression.vectors import Codec, codec_named
from trainer.errors import CodecError, RoundFailedError, RpcError
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult

logger = logging.getLogger(__name__)

MakeArithmetic: TypeAlias = Callable[[Agreement, torch.Tensor, torch.Tensor | None], Arithmetic]
"""Of an agreement, this node's vector and its residual."""
GoThroughLevel: TypeAlias = Callable[
    [LevelAgreement, Contribution, MakeArithmetic | None, RuleConfig], Awaitable[tuple[RoundResult, Commit]]
]
"""Goes through the round of a group or column; RoundFailedError if it has no result."""

LEVEL_CODEC = codec_named("fp32")
"""Of what groups hold, and bring to columns: nothing is lost between the levels."""
_WITNESSES = 3  # Of a group that are asked what it holds: two that agree are believed.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What this node's group has come to."""

    result: RoundResult
    commit: Commit  # Who is left of the group, and by whom its parts were reduced in the end.
    vector: torch.Tensor | None  # fp32[P] of sparse contributions, which all of a group hold; None: in slices.


@dataclass(frozen=True, slots=True)
class ReducedSlice:
    """One slice that this node has reduced among the groups."""

    number: int
    digest: str = ""  # Empty: it came to nothing here.
    report: RoundReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnReduction:
    """One node's part in the columns of one round in groups; for its endpoint's event loop."""

    state: GroupedState
    calls: LevelCalls
    settings: RoundSettings
    contribution: Contribution
    go_through: GoThroughLevel
    group: GroupResult | None  # None: it has come to nothing here.
    survivors: Mapping[int, Collection[str]]  # Of each group that has a result.
    follows: str  # Digest of the table that says so.
    result_codec: Codec
    values: torch.Tensor  # fp32[P]; results are written to their places.

    async def reduce(self, number: int, column: Mapping[str, int]) -> ReducedSlice:
        """Reduces a slice with those who speak for the groups in its column (`GroupPlan.column`)."""
        agreement, parts, place = self.state.agreement, self.state.parts_of(number), self.state.bounds_of(number)
        try:
            vector = await self._own_slice(number)
            expected = await self._expected(number, column)
            made: list[ColumnArithmetic] = []
            reference = self.contribution.reference[place]
            rule = column_rule(self.settings.rule)

            def make(level: Agreement, own: torch.Tensor, _residual: torch.Tensor | None) -> ColumnArithmetic:
                made.append(
                    ColumnArithmetic(
                        level, LEVEL_CODEC, rule, own, reference, result_codec=self.result_codec, expected=expected
                    )
                )
                return made[0]

            contribution = replace(
                self.contribution, vector=vector, reference=reference, residual=None, basis=None, filled=None
            )
            level = self._level_agreement(number, column, vector.numel())
            result, _ = await self.go_through(level, contribution, make, rule)
        except (RoundFailedError, RpcError, CodecError) as error:
            logger.warning("round %d: slice %d: %s", agreement.round_index, number, error)
            return ReducedSlice(number)
        self.values[place] = result.vector
        self.state.hold("result", {parts[0] + part: payload for part, payload in made[0].results.items()})
        return ReducedSlice(number, slice_digest(self.state.parts["result"], parts), result.report)

    def _level_agreement(self, number: int, column: Mapping[str, int], num_values: int) -> LevelAgreement:
        """Returns what the column goes by; a group weighs what those weigh that are left of it."""
        state = self.state
        weights = {
            group: sum(state.members[peer_id].weight for peer_id in left) for group, left in self.survivors.items()
        }
        return state.agreement.level(
            follows=f"{state.agreement.fingerprint()} {self.follows} slice {number}",
            members=[
                state.members[peer_id].model_copy(update={"weight": float(weights[group])})
                for peer_id, group in column.items()
            ],
            reducers=state.plan.seeded_order(f"column {number}", column),
            num_values=num_values,
            state_digest=self.contribution.state_digest,
        )

    async def _own_slice(self, number: int) -> torch.Tensor:
        """Returns this group's slice, fp32; what another member reduced in the end is fetched from it.

        Raises:
            RoundFailedError: parts of it are lost with their reducer.
        """
        state, parts, place = self.state, self.state.parts_of(number), self.state.bounds_of(number)
        if self.group is not None and self.group.vector is not None:
            return self.group.vector[place].clone()
        held = dict(state.parts["group"])
        missing = [part for part in parts if part not in held]
        for holder, first, last in self._holders_of(missing):
            if holder == self.settings.own_id:
                continue
            found = await self.calls.parts(holder, "group", range(first, last), LEVEL_CODEC)
            held |= {part: payload for part, payload in found.items() if self._is_of_group(part, payload)}
        if any(part not in held for part in parts):
            own_group = state.plan.group_of(self.settings.own_id)
            raise RoundFailedError(
                f"round {state.agreement.round_index}: slice {number} of group {own_group} is lost with its reducer"
            )
        out = torch.empty(place.stop - place.start)
        for part in parts:
            start, stop = state.agreement.part_bounds(part)
            LEVEL_CODEC.decode(held[part], stop - start, out=out[start - place.start : stop - place.start])
        return out

    def _is_of_group(self, part: int, payload: Payload) -> bool:
        return part_digest(payload) == self.state.digests.get(part)

    def _holders_of(self, parts: Sequence[int]) -> list[tuple[str, int, int]]:
        """By whom parts of this group were reduced in the end: (member, first part, last part)."""
        if self.group is None or not parts:
            return []
        found = []
        for task in self.group.commit.plan.tasks:
            first, last = max(task.first_part, parts[0]), min(task.last_part, parts[-1] + 1)
            if first < last:
                found.append((task.reducer, first, last))
        return found

    async def _expected(self, number: int, column: Mapping[str, int]) -> dict[tuple[str, int], bytes]:
        """Returns what groups hold of a slice by the word of members that do not speak for them in its column."""
        state, parts = self.state, self.state.parts_of(number)
        own_group = state.plan.group_of(self.settings.own_id)

        async def of_group(speaker: str, group: int) -> dict[tuple[str, int], bytes]:
            others = [peer_id for peer_id in self.survivors[group] if peer_id != speaker]
            chosen = state.plan.seeded_order(f"witness {number} {group}", others)[:_WITNESSES]
            told = await asyncio.gather(*(self.calls.digests(peer_id, parts) for peer_id in chosen))
            agreed = most_told([each for each in told if each is not None])
            return {(speaker, place): digest for place, digest in enumerate(agreed or ())}

        found = await asyncio.gather(
            *(of_group(speaker, group) for speaker, group in column.items() if group != own_group)
        )
        return {key: digest for each in found for key, digest in each.items()}


def most_told(told: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...] | None:
    """Returns the digests that two witnesses or more tell alike; None: there are no such."""
    for each in told:
        if told.count(each) > 1:
            return each
    return None
