"""Who is in which group of a large round, and who holds which slice between groups: pure functions.

The plan follows from the run, the round, the state before it and the agreed members alone: every member makes it
itself, and nobody is told its group. The state before a round is known only once the round before it has ended, so that
nobody can choose a key for a group of a round to come; and members of one round are mixed anew for the next.

n members are in √n groups of √n: of all cuts into two levels that one keeps connections fewest (2·√n a node), and lets
the rule leave out equally many in either level. See `guaranteed_liars` for what that costs in robustness.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.aggregation import RuleConfig
from trainer.aggregation.deciding import trim_count
from trainer.collective.config import LEAST_GROUPED_MEMBERS, MAX_GROUPED_MEMBERS, MAX_ROUND_MEMBERS
from trainer.collective.planning import is_majority
from trainer.errors import TrainerUsageError

NUM_LEADERS = 3  # Of a group: they pass the agreement on to the others.


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of one round: ids of their members, in an order by the seed, in which they hold slices."""

    seed: bytes
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, run_id: str, round_index: int, state_digest: str, peer_ids: Collection[str]) -> GroupPlan:
        """Returns the plan of a round; the order of ``peer_ids`` does not count.

        Raises:
            TrainerUsageError: fewer members than three groups have, or more than two levels hold.
        """
        members = set(peer_ids)
        seed = hashlib.sha256(f"groups\0{run_id}\0{round_index}\0{state_digest}".encode()).digest()
        count = num_groups(len(members))
        order = sorted(members, key=lambda peer_id: hashlib.sha256(seed + peer_id.encode()).digest())
        return cls(seed, tuple(tuple(order[number::count]) for number in range(count)))

    @property
    def num_slices(self) -> int:
        """Number of slices that the vector is cut into: so many members as the smallest group has hold one each."""
        return min(len(group) for group in self.groups)

    def group_of(self, peer_id: str) -> int:
        """Returns the number of a member's group; ValueError if it is no member."""
        for number, group in enumerate(self.groups):
            if peer_id in group:
                return number
        raise ValueError(f"expected a member of this round, found {peer_id[:8]}")

    def leaders(self, group: int) -> tuple[str, ...]:
        """Returns those who pass the agreement on to a group, in this order."""
        return self.groups[group][:NUM_LEADERS]

    def slice_parts(self, number: int, num_parts: int) -> range:
        """Returns the parts of the vector in a slice; a vector of fewer parts than slices leaves some empty."""
        return range(number * num_parts // self.num_slices, (number + 1) * num_parts // self.num_slices)

    def holder(self, group: int, number: int, survivors: Collection[str]) -> str:
        """Returns who speaks for a group in the column of a slice: its reducer, or a survivor in its place.

        ``survivors`` of the group: at least one.
        """
        members = self.groups[group]
        if members[number] in survivors:
            return members[number]
        left = [peer_id for peer_id in members if peer_id in survivors]
        return left[(number + group) % len(left)]

    def column(self, number: int, survivors: Mapping[int, Collection[str]]) -> dict[str, int]:
        """Returns the members that reduce a slice among the groups, with their groups; none of a group that is gone."""
        return {self.holder(group, number, left): group for group, left in sorted(survivors.items()) if left}

    def fetch_order(self, peer_id: str, number: int, column: Mapping[str, int]) -> list[str]:
        """Returns of whom a member fetches a slice: the holder in its own group, then the others.

        Each member has another order of those, so that where a holder is gone no other one serves two groups.
        """
        others = self.seeded_order(f"fetch {number} {peer_id}", column)
        members = self.groups[self.group_of(peer_id)]
        return sorted(others, key=lambda holder: holder not in members)

    def survivors_told(self, rows: Sequence[tuple[int, str]]) -> dict[int, tuple[str, ...]]:
        """Returns who is left of each group by the words of a table, each of which begins with a `survivors_mask`.

        Raises:
            ValueError: it does not name most groups, each once and with a majority of its members: no tally of honest
                members comes to that, and a coordinator must not be able to have a few decide for all.
        """
        numbers = [number for number, _ in rows]
        if numbers != sorted(set(numbers)) or not set(numbers) <= set(range(len(self.groups))):
            raise ValueError(f"expected groups 0 to {len(self.groups) - 1} in order, found {numbers[:8]}")
        if 2 * len(numbers) <= len(self.groups):
            raise ValueError(f"expected most of {len(self.groups)} groups, found {len(numbers)}")
        survivors = {number: survivors_in(self.groups[number], word.partition(".")[0]) for number, word in rows}
        for number, left in survivors.items():
            if not is_majority(left, sorted(self.groups[number])):
                raise ValueError(f"expected most of group {number}, found {len(left)} members of it")
        return survivors

    def seeded_order(self, purpose: str, peer_ids: Collection[str]) -> list[str]:
        """Returns ids in an order that follows from the round and a purpose."""
        salt = self.seed + purpose.encode() + b"\0"
        return sorted(peer_ids, key=lambda peer_id: hashlib.sha256(salt + peer_id.encode()).digest())


def num_groups(num_members: int) -> int:
    """Returns into how many groups so many members go; each has at most ``MAX_ROUND_MEMBERS``, as has a column.

    Raises:
        TrainerUsageError: fewer than nine members, or more than 48 groups of 48.
    """
    if not LEAST_GROUPED_MEMBERS <= num_members <= MAX_GROUPED_MEMBERS:
        raise TrainerUsageError(
            f"a round in groups: expected {LEAST_GROUPED_MEMBERS} to {MAX_GROUPED_MEMBERS} members, found {num_members}"
        )
    return min(MAX_ROUND_MEMBERS, round(math.sqrt(num_members)))


def column_rule(rule: RuleConfig) -> RuleConfig:
    """Returns the rule among groups: the same by coordinates; trimmed_mean for rules that look at whole vectors.

    A column sees one slice: Krum or centred clip would choose other groups for each. Contributions are validated in the
    groups.
    """
    name = rule.rule if rule.rule in ("mean", "median") else "trimmed_mean"
    return replace(rule, rule=name, validation="off")


def guaranteed_liars(num_members: int, rule: RuleConfig) -> int:
    """Returns how many liars a round in groups bears wherever the seed puts them; a coordinate-wise rule is meant.

    A group of m bears t(m) of them, a column of g groups t(g) groups that are all wrong. To be wrong, a group needs
    t(m) + 1 liars, and the round t(g) + 1 wrong groups: (t(m) + 1)·(t(g) + 1) liars in the worst places. That is a
    share of about t², where a single group bears t: of 1,000 with t = 0.3, 99 and not 300. Since the seed places them
    and not they, a share somewhat under t is borne with a probability that ``scripts/bench_swarm.py groups`` prints.
    """
    count = num_groups(num_members)
    if rule.rule == "mean":
        return 0
    return (_borne(num_members // count, rule) + 1) * (_borne(count, rule) + 1) - 1


def _borne(num_rows: int, rule: RuleConfig) -> int:
    """How many wrong rows of so many a rule bears; those over whole vectors what they are configured for."""
    if rule.rule == "median":
        return (num_rows - 1) // 2
    return trim_count(num_rows, rule)


def survivors_mask(members: Sequence[str], survivors: Collection[str]) -> str:
    """Returns which of a group's members are left as hexadecimal digits, the first member in the lowest bit."""
    return f"{sum(1 << place for place, peer_id in enumerate(members) if peer_id in survivors):x}"


def survivors_in(members: Sequence[str], mask: str) -> tuple[str, ...]:
    """Returns the members that a mask names, in their order; ValueError for one that is of no such group."""
    bits = int(mask, 16)
    if not 0 < bits < 1 << len(members) or mask != f"{bits:x}":
        raise ValueError(f"expected survivors among {len(members)} members, found {mask[:16]!r}")
    return tuple(peer_id for place, peer_id in enumerate(members) if bits >> place & 1)
