"""What all rounds of one node have in common: its identity, place, rules and options, and what time it is.

`BucketSettings` is made once when a node starts (`trainer.run.node.bucket_settings`) and is passed to whatever takes
part in rounds (`collective`, `round`) or keeps the bucket in order (`keeping`, also at the run's authority). Members
must have ``rules``, ``rule``, ``form_of`` and ``refusal`` alike; the rest may differ from node to node.

Guarantees: nothing in the settings changes while the node runs, but for ``false_reducers``, which only grows. The
store's clock is never ahead of the store, so a node that closes a round by it is never too early for the others.

The trade-off: the store is not asked what time it is, which would be one more request a look. So its clock here is
behind by the age of the newest object when that was first listed: in a round at most the ``poll_interval_s`` (1 s)
between two looks and the listing itself, by which a round closes later than it might.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.aggregation import RuleConfig
from trainer.bucket_rounds.config import BucketConfig
from trainer.bucket_rounds.forms import Form
from trainer.bucket_rounds.history import Refusal, nobody_refused
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.rules import RoundRules
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import Credential


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """What all rounds of a node have in common."""

    identity: Identity
    place: Place
    rules: RoundRules
    rule: RuleConfig
    config: BucketConfig
    form_of: Callable[[int], Form]  # By the length of a vector.
    round_timeout_s: float
    invite_after_s: float
    refusal: Refusal = nobody_refused
    """Why a member may not take part, or say what it holds, by the document and when it was put; empty: it may."""
    credential: Callable[[], Credential | None] = lambda: None  # This node's, where the run has an authority.
    is_unwelcome: Callable[[str], bool] = lambda _member: False
    """Whether this node leaves a member out of rounds that it closes; it takes part in those that others close."""
    vocabulary_rows: Callable[[], int] = lambda: 0
    carried_share: float = 1.0
    """Of work that a round did not take, which goes into the next; the rest stays in the parameters by the merge."""
    stopping: Callable[[], bool] = lambda: False
    removes: bool = True
    """Whether this node removes old rounds that it has closed; where the run's authority signs requests, that does."""
    false_reducers: set[str] = field(default_factory=set)
    """Members that have said something false of a slice; grows while the node runs."""

    @property
    def own_id(self) -> str:
        """This node's key."""
        return self.identity.peer_id

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.rules.run_id


class StoreClock:
    """What time it is by the store, never ahead of it: from the times of objects when they were listed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offset_s = float("-inf")

    def observe(self, newest_at: float) -> None:
        """Notes that an object of that time (Unix; 0: there is none) is there now."""
        if newest_at:
            self._offset_s = max(self._offset_s, newest_at - self._clock())

    @property
    def now(self) -> float:
        """Unix time; minus infinity before the first observation."""
        return self._clock() + self._offset_s
