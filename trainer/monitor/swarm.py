"""The other nodes, by what they announce: whether they hold the same state, and how the whole run goes.

What a node announces is signed but may be untrue. So a loss that no cross entropy can have is left out, the others are
limited to a range around their median, and a state counts only where several nodes hold it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from trainer.monitor.facts import AnnouncedNode
from trainer.monitor.status import HashAgreement

_MAX_LOSS = 100.0  # Nats; a model that knows nothing has ln(10,000,000) = 16.1 at most.
_MAX_COUNT = 10**9
_MAX_TOKENS_PER_S = 1e9
_MAX_SHARDS = 10_000
_MAX_NAME = 128
_MAX_PARTS = 32
_KEY_DIGITS = 12  # Of a key that stands for a name.
_REMEMBERED_STEPS = 8

NodeRole = Literal["node", "worker", "driver"]
"""``node``: it holds a whole model, ``worker``: a stage of one, ``driver``: nothing, and sends micro-batches."""


@dataclass(frozen=True, slots=True)
class PlausibleNode:
    """A node as it announces itself, without implausible values."""

    peer_id: str
    node_id: str
    outer_step: int
    state_digest: str
    num_steps: int
    loss: float | None
    tokens_per_s: float
    shards: frozenset[int]
    expires_at: float
    has_strange_loss: bool = False  # It announced a loss that was left out.
    role: NodeRole = "node"
    stage: str = ""  # Of a worker.
    part_states: tuple[tuple[str, int, str], ...] = ()
    last_round: int | None = None  # That it was in, where rounds are all that is known of it.
    weight: float | None = None  # In that round.

    @property
    def holdings(self) -> dict[str, tuple[int, str]]:
        """Outer step and digest of each state it holds, by `holding`; a driver holds none."""
        if self.part_states:
            return {holding(self.peer_id, stage): (step, digest) for stage, step, digest in self.part_states}
        return (
            {} if self.role == "driver" else {holding(self.peer_id, self.stage): (self.outer_step, self.state_digest)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMember:
    """A node that announces nothing, as the rounds of a bucket tell of it."""

    peer_id: str
    last_round: int  # The newest agreed one that it was in.
    weight: float
    outer_step: int
    state_digest: str  # Of the state that it began that round with; empty: not known.

    def as_node(self) -> PlausibleNode:
        """Returns what there is to show of it; it is there as long as it is listed."""
        return PlausibleNode(
            peer_id=self.peer_id,
            node_id=self.peer_id[:_KEY_DIGITS],
            outer_step=self.outer_step,
            state_digest=self.state_digest,
            num_steps=0,
            loss=None,
            tokens_per_s=0.0,
            shards=frozenset(),
            expires_at=math.inf,
            last_round=self.last_round,
            weight=self.weight,
        )


def holding(peer_id: str, stage: str) -> str:
    """What a node's state of a stage is remembered by, or, with no stage, of the whole model."""
    return f"{peer_id}/{stage}"


def plausible_node(announced: AnnouncedNode, *, in_stages: bool = False) -> PlausibleNode:
    """Returns an announcement without implausible values.

    ``in_stages`` says that the run's model is cut: there whoever holds neither a stage nor all of them drives.
    """
    loss = announced.loss
    is_plausible = loss is not None and math.isfinite(loss) and 0.0 <= loss <= _MAX_LOSS
    speed = announced.tokens_per_s
    return PlausibleNode(
        peer_id=announced.peer_id,
        node_id=_shown(announced.node_id),
        outer_step=max(0, announced.outer_step),
        state_digest=_shown(announced.state_digest),
        num_steps=announced.inner_step if 0 <= announced.inner_step <= _MAX_COUNT else 0,
        loss=loss if is_plausible else None,
        tokens_per_s=speed if 0.0 <= speed <= _MAX_TOKENS_PER_S else 0.0,
        shards=frozenset(announced.shards) if len(announced.shards) <= _MAX_SHARDS else frozenset(),
        expires_at=announced.expires_at,
        has_strange_loss=loss is not None and not is_plausible,
        role=_role_of(announced, in_stages=in_stages),
        stage=_shown(announced.stage_name),
        part_states=tuple(
            (_shown(stage), max(0, step), _shown(digest)) for stage, step, digest in announced.part_states[:_MAX_PARTS]
        ),
    )


def _role_of(announced: AnnouncedNode, *, in_stages: bool) -> NodeRole:
    if announced.stage_name:
        return "worker"
    return "driver" if in_stages and not announced.part_states else "node"


def _shown(text: str) -> str:
    """Limits text to a length for display, and to what UTF-8 can encode."""
    return text[:_MAX_NAME].encode("utf-8", "replace").decode()


def average_loss(losses: Collection[float], own: float | None) -> float | None:
    """Returns the mean over nodes, each loss limited to a range around the middle.

    With three nodes or more the middle is their median and the range three (normal-consistent) median absolute
    deviations, at least a quarter of the median; with fewer, the node's own loss and a quarter of that. One liar among
    n moves the mean by about a quarter of the loss, divided by n. ``losses`` are finite, this node's ``own`` included.
    """
    if not losses:
        return None
    middle = own if own is not None and len(losses) < 3 else median(losses)
    spread = 3.0 * 1.4826 * median(abs(loss - middle) for loss in losses) if len(losses) >= 3 else 0.0
    bound = max(spread, 0.25 * abs(middle))
    return math.fsum(min(max(loss, middle - bound), middle + bound) for loss in losses) / len(losses)


class DigestMemory:
    """Which state each node held after which of its last 8 outer steps.

    Announcements are some seconds old: with the newest digest alone, every round would begin with nobody to compare
    with.
    """

    def __init__(self) -> None:
        self._digests: dict[str, dict[int, str]] = {}

    def add(self, node: str, outer_step: int, digest: str) -> None:
        """Records a node's state; one that went back to an older step no longer holds the newer ones."""
        if not digest:
            return
        held = {step: known for step, known in self._digests.get(node, {}).items() if step < outer_step}
        held[outer_step] = digest
        self._digests[node] = dict(sorted(held.items())[-_REMEMBERED_STEPS:])

    def keep(self, nodes: Iterable[str]) -> None:
        """Forgets all nodes but these."""
        self._digests = {node: self._digests[node] for node in nodes if node in self._digests}

    def agreement_of_stages(self, holdings: Iterable[str]) -> HashAgreement:
        """Compares the holders of each stage as `agreement` does, and adds up; ``holdings`` are of `holding`.

        Where one stage cannot be compared, the others are.
        """
        by_stage: dict[str, list[str]] = {}
        for name in holdings:
            by_stage.setdefault(name.rpartition("/")[2], []).append(name)
        found = [self.agreement(names) for names in by_stage.values()]
        steps = [it.outer_step for it in found if it.outer_step is not None]
        if not steps:
            return found[0] if found else self.agreement(())
        return HashAgreement(
            outer_step=min(steps),
            num_compared=sum(it.num_compared for it in found),
            num_agreeing=sum(it.num_agreeing for it in found),
            num_behind=sum(it.num_behind for it in found),
            reason=None,
        )

    def agreement(self, nodes: Iterable[str]) -> HashAgreement:
        """Compares nodes at the newest outer step that more than half of them have, else at the one most have.

        A node that missed a round cannot hold the others' state and is *behind*, not different.
        """
        digests = [self._digests.get(node, {}) for node in nodes]
        nodes_at = Counter(step for held in digests for step in held)
        by_majority = [step for step, num_nodes in nodes_at.items() if 2 * num_nodes > len(digests)]
        common = max(by_majority, default=None)
        if common is None and nodes_at:
            common = max(nodes_at, key=lambda step: (nodes_at[step], step))
        if common is None or (nodes_at[common] < 2 and len(digests) > 1):
            reason = "no two nodes have the same outer step" if len(digests) > 1 else "no outer step yet"
            return HashAgreement(outer_step=None, num_compared=0, num_agreeing=0, num_behind=0, reason=reason)
        compared = [held[common] for held in digests if common in held]
        return HashAgreement(
            outer_step=common,
            num_compared=len(compared),
            num_agreeing=max(Counter(compared).values()),
            num_behind=sum(max(held, default=-1) < common for held in digests),
            reason=None,
        )
