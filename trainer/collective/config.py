"""Options of a round, what all rounds of a node have in common, and what their tasks wait on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from trainer.compression import MAX_RANK, CodecName
from trainer.errors import TrainerUsageError

if TYPE_CHECKING:
    from trainer.aggregation import RuleConfig, Weighing
    from trainer.aggregation.config import Averaging
    from trainer.collective.messages import Terms
    from trainer.compression.vectors import Codec
    from trainer.network.rpc import CallEndpoint, Peer


MAX_ROUND_MEMBERS = 48  # An agreement of so many, with certificates, just fits a message.
MAX_GROUPED_MEMBERS = MAX_ROUND_MEMBERS**2
"""Of a round in groups (`trainer.collective.levels`): so many groups, and so many members of each, at most."""
LEAST_GROUPED_MEMBERS = 9  # Three groups of three: in each, one may die and leave a majority.


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConfig:
    """How nodes come together for a round, and how long they wait for each other."""

    compression: CodecName = "fp32"
    """How pseudo-gradients and results travel: fp32, fp16, or with error feedback int8, int4 or e3m0 (four bits: sign
    and power of two) in blocks. Strategy sparseloco has a codec of its own, sparse."""
    powersgd_rank: int = -1
    """Matrices of gradients travel as two factors with so many columns, where that saves half of their values or more;
    with error feedback. 0: as they are. -1: 64 under averaged gradients, 0 under other strategies."""
    max_group_members: int = MAX_ROUND_MEMBERS
    """A round of more members runs in groups, in two levels: √n groups of √n; 8 to 48, and the same at all nodes."""
    max_members: int = 160
    """Most members of a round; those that come later wait for the next one. Its coordinator holds a call of each open:
    for more than 160, raise rpc.max_calls to 1.5 times as many. At most 2,304, in groups of 48."""
    min_members: int = 1
    """Fewer than this and the round fails; training goes on, and the pseudo-gradient waits for the next round."""
    invite_after_s: float = 10.0
    """So long after the first node is ready, the others are asked to come with what they have."""
    gather_timeout_s: float = 60.0
    """So long after the first node is ready, the round begins without those who are missing."""
    stall_timeout_s: float = 10.0
    """A peer that is silent for so long counts as dead in this round."""
    round_timeout_s: float = 1800.0
    """A round that takes longer has failed."""
    max_passes: int = 4
    """How often slices are reduced: once, and again for what was lost with a reducer."""
    max_weight_ratio: float = 3.0
    """Limit of a member's weight, as a multiple of the median member's."""
    quorum: float = 0.0
    """Members with whose work a round closes: 1 and more, so many; below 1, that share of the members of the round
    before; 0: a round waits for all. Work that comes later counts in the next round, by its freshness."""
    max_grace_s: float = 5.0
    """With a quorum: most seconds that a round waits for further members after it; measured arrivals decide, and never
    more than an eighth of the time between rounds."""
    part_bytes: int = 1 << 20
    """Size of the parts that slices travel in."""

    @property
    def most_members(self) -> int:
        """Members that a round has at most; with a quorum one group's, whose members know each other's lags."""
        return min(self.max_members, self.max_group_members) if self.quorum else self.max_members

    def __post_init__(self) -> None:
        longest_s = self.round_timeout_s
        for field, is_valid, expected in (
            ("powersgd_rank", -1 <= self.powersgd_rank <= MAX_RANK, f"0 (off) to {MAX_RANK}, or -1 (by strategy)"),
            (
                "max_group_members",
                LEAST_GROUPED_MEMBERS - 1 <= self.max_group_members <= MAX_ROUND_MEMBERS,
                f"{LEAST_GROUPED_MEMBERS - 1} to {MAX_ROUND_MEMBERS}",
            ),
            (
                "max_members",
                1 <= self.max_members <= MAX_GROUPED_MEMBERS,
                f"1 to {MAX_GROUPED_MEMBERS}, {MAX_ROUND_MEMBERS} groups of {MAX_ROUND_MEMBERS}",
            ),
            ("min_members", self.min_members >= 1, "1 or more"),
            ("max_passes", self.max_passes >= 1, "1 or more"),
            (
                "stall_timeout_s",
                0 < self.stall_timeout_s < longest_s,
                f"more than 0 and less than round_timeout_s ({longest_s})",
            ),
            (
                "gather_timeout_s",
                0 <= self.invite_after_s <= self.gather_timeout_s < longest_s,
                f"invite_after_s (0 or more, {self.invite_after_s}) to under round_timeout_s ({longest_s})",
            ),
            ("max_weight_ratio", self.max_weight_ratio >= 1, "1 or more"),
            (
                "quorum",
                0 <= self.quorum < 1 or (1 <= self.quorum <= self.most_members and self.quorum == int(self.quorum)),
                f"a share from 0 (off) to under 1, or a whole number of members up to {self.most_members}, which is as "
                "many as a round with a quorum has (collective.max_members, collective.max_group_members)",
            ),
            ("max_grace_s", 0 <= self.max_grace_s < math.inf, "a number of seconds, 0 or more"),
            ("part_bytes", 4096 <= self.part_bytes <= 1 << 20, f"4096 to {1 << 20}, the most a message carries"),
        ):
            if not is_valid:
                raise TrainerUsageError(f"collective.{field}: expected {expected}, found {getattr(self, field)}")


class Directory(Protocol):
    """The other nodes of the run, as discovery knows them; answers are kept fresh by others and cost nothing."""

    def peers(self) -> Mapping[str, Peer]:
        """Returns the nodes that train by the same terms and seem alive, by id, without this one."""

    def holds_most_held_state(self) -> bool:
        """Returns whether the state most nodes hold, by their own word, is this node's."""


class RoundChanges(Protocol):
    """What the run's owner has changed while the run goes on, as far as this node knows; for the event loop."""

    def number_at(self, round_index: int) -> int:
        """Returns the number of the newest change in force in a round; 0: none."""

    def digest_of(self, number: int) -> str:
        """Returns the digest of a known change; empty for number 0."""

    def options_at(self, round_index: int) -> tuple[RuleConfig, CollectiveConfig]:
        """Returns rule and options in force in a round."""

    def trained_by(self) -> int:
        """Returns the number of the newest change that this node's own work since its last round was done by."""

    async def fetch(self, peer: Peer) -> None:
        """Takes up what a peer knows and this node does not; a peer that does not answer is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """What all rounds of a node have in common, with rule and options as they are in force after change ``change``."""

    run_id: str
    terms: Terms
    rule: RuleConfig
    codec: Codec
    config: CollectiveConfig
    endpoint: CallEndpoint
    directory: Directory
    changes: RoundChanges | None = None
    change: int = 0
    change_digest: str = ""
    weighing: Weighing = "root"
    """What a member's claimed work weighs; the strategy decides, and is among the terms."""
    averaging: Averaging = "replicas"
    """Of sparse contributions; as the weighing."""
    cycle: int = 1
    """Rounds after which the same parameters come again: the strategy's fragments."""

    def at(self, round_index: int) -> RoundSettings:
        """Returns what is in force in a round, as far as this node knows now."""
        number = 0 if self.changes is None else self.changes.number_at(round_index)
        if self.changes is None or number == self.change:
            return self
        rule, config = self.changes.options_at(round_index)
        digest = self.changes.digest_of(number)
        return replace(self, rule=rule, config=config, change=number, change_digest=digest)

    def is_forked(self, change: int, digest: str) -> bool:
        """Whether a node that names this change goes by another one of this number: the run's owner has signed two."""
        return change == self.change and digest != self.change_digest

    @property
    def own_id(self) -> str:
        """This node."""
        return self.endpoint.peer_id

    @property
    def values_per_part(self) -> int:
        """Values that fit a message."""
        return self.codec.values_per_part(self.config.part_bytes)


class Changes:
    """Wakes the tasks of one event loop that wait for some state, which changes only between two awaits.

    `asyncio.Condition` comes with a lock. Without it a change is a plain call, also while a task is being cancelled.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Lets all who wait look at the state again."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the next change, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next.wait()

    async def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until a condition is met, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_met():
                    await self._next.wait()
