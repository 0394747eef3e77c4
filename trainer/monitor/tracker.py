"""The training status: this node's steps and rounds, and what the other nodes announce, combined.

The training thread writes, the API's thread reads; a lock is held for a copy of some 2,000 numbers at most (20 µs). A
round without other members is a failure only where another node was known: then the node trained on without them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime

from trainer.errors import CheckpointMismatchError
from trainer.monitor.facts import AnnouncedNode, RoundFacts, StepFacts
from trainer.monitor.losses import FIRST_LOSSES, TrackedLosses, has_fallen, loss_trend
from trainer.monitor.status import (
    DiLoCoStatus,
    Health,
    LastRound,
    NodeStatus,
    SpeedStatus,
    SyncSuccess,
    TrainingStatus,
)
from trainer.monitor.swarm import (
    DigestMemory,
    NodeRole,
    PlausibleNode,
    SeenMember,
    average_loss,
    holding,
    plausible_node,
)

_VERSION = 1
_MAX_PEERS = 4_096
_MAX_NODES_SHOWN = 256
_SPEED_STEPS = 50
_MIN_STEPS = 2 * FIRST_LOSSES  # With fewer losses, the latest are still among the first.
_ATTEMPTS = 100
_MIN_ROUNDS = 4  # Fewer attempted rounds do not show that a node is cut off.


class TrainingTracker:
    """One node's view of the run. Thread safe."""

    def __init__(
        self,
        node_id: str,
        *,
        peer_id: str = "",
        inner_steps: int = 0,
        clock: Callable[[], float] = time.time,
        role: NodeRole = "node",
        stage: str = "",
        stages: Sequence[str] = (),
    ) -> None:
        """Starts without steps, rounds and peers; announcements under ``peer_id`` are its own and left out.

        ``inner_steps`` lie between two outer steps, of which there are none with 0; ``clock`` is in Unix seconds.
        ``role`` and ``stage`` are the node's; ``stages`` all of the run's, where whole models train beside them.
        """
        self._role: NodeRole = role
        self._stage = stage
        self._in_stages = bool(stages)
        self._stages = frozenset(stages or ("",))  # Others may announce what they like: no other ones are compared.
        self._outer_steps = dict.fromkeys(stages if role == "node" else (), 0)  # Of the parts of a whole model.
        self._lock = threading.RLock()
        self._node_id = node_id
        self._peer_id = peer_id
        self._inner_steps = inner_steps
        self._clock = clock
        self._started_at = clock()
        self._losses = TrackedLosses()
        self._succeeded: deque[bool] = deque(maxlen=_ATTEMPTS)
        self._num_rounds = self._num_rounds_alone = self._num_rounds_failed = 0
        self._last_round: LastRound | None = None
        self._was_applied: deque[bool] = deque(maxlen=_SPEED_STEPS)
        self._ended: deque[tuple[float, int]] = deque(maxlen=_SPEED_STEPS + 1)  # When a step did, and its tokens.
        self._num_steps = self._num_skipped = 0
        self._last_step_at: float | None = None
        self._inner_step = self._outer_step = 0
        self._state_digest = ""
        self._shards: frozenset[int] = frozenset()
        self._num_rotations = 0
        self._peers: tuple[PlausibleNode, ...] = ()
        self._own_round: tuple[int, float] | None = None  # Through a bucket: the last it was in, and its weight there.
        self._digests = DigestMemory()
        self._speed: Callable[[], SpeedStatus | None] = lambda: None

    def set_speed(self, speed: Callable[[], SpeedStatus | None]) -> None:
        """Takes what measures this process's speed (`SpeedMeter.status`)."""
        self._speed = speed

    @property
    def speed(self) -> SpeedStatus | None:
        """This process's speed over its latest steps; None before the first."""
        return self._speed()

    def add_step(self, step: StepFacts) -> None:
        """Counts an inner step, in 1 µs."""
        now = self._clock()
        with self._lock:
            self._losses.add(step.loss)
            self._was_applied.append(not step.skipped)
            self._ended.append((now, step.num_tokens))
            self._num_steps += 1
            self._num_skipped += step.skipped
            self._inner_step += 1
            self._last_step_at = now

    def add_round(self, report: RoundFacts, *, outer_step: int, state_digest: str, stage: str = "") -> None:
        """Counts a round that ended with an outer step; step and digest are the state's after it.

        ``stage`` is that of the round, at a node that has several; so are step and digest then.
        """
        now = self._clock()
        with self._lock:
            is_alone = len(report.members) < 2
            self._num_rounds += 1
            self._num_rounds_alone += is_alone
            if not is_alone or any(peer.expires_at > now for peer in self._peers):
                self._succeeded.append(not is_alone)
            self._last_round = LastRound(
                round_index=report.round_index,
                stage=stage,
                num_members=len(report.members),
                num_dropped=len(report.dropped),
                completeness=report.completeness,
                sent_bytes=report.sent_bytes,
                received_bytes=report.received_bytes,
                seconds=report.seconds,
                rule=report.rule,
            )
            self.set_state(outer_step, state_digest, stage=stage)

    def add_failed_round(self) -> None:
        """Counts a round without a result; the node trains on from where it was."""
        with self._lock:
            self._num_rounds_failed += 1
            self._succeeded.append(False)

    def set_state(self, outer_step: int, state_digest: str, *, inner_step: int | None = 0, stage: str = "") -> None:
        """Records which state the node holds after it was started, restored, or took up others' state.

        ``inner_step`` None: only the digest of a state that the node has held for a while has become known. ``stage``
        is that of the state, at a node that has several.
        """
        with self._lock:
            if inner_step is not None:
                self._inner_step = inner_step
            if stage:
                self._outer_steps[stage] = max(outer_step, self._outer_steps.get(stage, 0))  # A digest comes late.
                self._outer_step, self._state_digest = min(self._outer_steps.values()), ""
            else:  # Of all parts, where there are any: each has made so many at least.
                self._outer_steps = {name: max(step, outer_step) for name, step in self._outer_steps.items()}
                self._outer_step, self._state_digest = outer_step, state_digest
            self._digests.add(holding(self._peer_id, stage or self._stage), outer_step, state_digest)

    def set_shards(self, shards: Collection[int]) -> None:
        """Records the shards this node trains on."""
        found = frozenset(shards)
        with self._lock:
            self._num_rotations += bool(self._shards) and found != self._shards
            self._shards = found

    def peers(self, announcements: Iterable[AnnouncedNode]) -> None:
        """Records what all other nodes announce now, in place of what they announced before."""
        self._know(plausible_node(found, in_stages=self._in_stages) for found in announcements)

    def seen_in_rounds(self, members: Iterable[SeenMember]) -> None:
        """Records who was in the latest rounds, where nodes announce nothing, in place of who was before."""
        found = {member.peer_id: member for member in members}
        own = found.get(self._peer_id)
        with self._lock:
            self._own_round = None if own is None else (own.last_round, own.weight)
        self._know(member.as_node() for member in found.values())

    def _know(self, nodes: Iterable[PlausibleNode]) -> None:
        known = {node.peer_id: node for node in nodes}
        known.pop(self._peer_id, None)
        kept = tuple(sorted(known.values(), key=lambda peer: -peer.expires_at)[:_MAX_PEERS])
        with self._lock:
            self._peers = kept
            held = {name: state for peer in kept for name, state in self._comparable(peer).items()}
            for name, (step, digest) in held.items():
                self._digests.add(name, step, digest)
            self._digests.keep([*self._own_holdings(), *held])

    @property
    def smoothed_loss(self) -> float | None:
        """The loss to announce: averaged over some 50 steps; None before the first."""
        with self._lock:
            return self._losses.smoothed

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over the latest 50 steps, rounds and all other waits included; 0 before the second step."""
        with self._lock:
            if len(self._ended) < 2:
                return 0.0
            seconds = self._ended[-1][0] - self._ended[0][0]
            num_tokens = sum(num_tokens for _, num_tokens in self._ended) - self._ended[0][1]
            return num_tokens / seconds if seconds > 0 else 0.0  # A clock may be set back.

    @property
    def num_steps(self) -> int:
        """Inner steps this node has done, before restarts included: what to announce."""
        with self._lock:
            return self._num_steps

    @property
    def can_judge(self) -> bool:
        """Whether there are enough losses to tell whether training works."""
        with self._lock:
            return len(self._losses.recent) >= _MIN_STEPS

    @property
    def shards(self) -> tuple[tuple[int, ...], int]:
        """The shards this node trains on, in order, and how often they have changed since its start."""
        with self._lock:
            return tuple(sorted(self._shards)), self._num_rotations

    def status(self) -> TrainingStatus:
        """Returns the status as of now."""
        with self._lock:
            now = self._clock()
            own = PlausibleNode(
                peer_id=self._peer_id,
                node_id=self._node_id,
                outer_step=self._outer_step,
                state_digest=self._state_digest,
                num_steps=self._num_steps,
                loss=self._losses.smoothed,
                tokens_per_s=self.tokens_per_s,
                shards=self._shards,
                expires_at=float("inf"),
                role=self._role,
                stage=self._stage,
                last_round=None if self._own_round is None else self._own_round[0],
                weight=None if self._own_round is None else self._own_round[1],
            )
            others = [peer for peer in self._peers if peer.expires_at > now]
            first, recent, was_applied = list(self._losses.first), list(self._losses.recent), tuple(self._was_applied)
            reason = None
            if not self._succeeded:
                reason = "no other node was there in any round" if self._num_rounds_alone else "no round yet"
            sync = SyncSuccess(num_attempted=len(self._succeeded), num_succeeded=sum(self._succeeded), reason=reason)
            num_skipped = self._num_skipped
            diloco = DiLoCoStatus(
                inner_step=self._inner_step,
                inner_steps=self._inner_steps,
                outer_step=self._outer_step,
                stages=dict(self._outer_steps),
                outer_syncs=self._num_rounds,
                rounds_alone=self._num_rounds_alone,
                rounds_failed=self._num_rounds_failed,
                last_round=self._last_round,
            )
            held = [*self._own_holdings(), *(name for peer in others for name in self._comparable(peer))]
            agreed = self._digests.agreement_of_stages(held)
        nodes = (own, *sorted(others, key=lambda peer: (peer.node_id, peer.peer_id)))
        # A stage counts each token once more: those of a pipeline are its drivers'.
        counting = [node for node in nodes if node.role != "worker" or node is own]
        reasons = _reasons_against(first, recent, was_applied, sync)
        return TrainingStatus(
            training_verified=not reasons,
            reasons=reasons,
            hash_agreement_rate=_percent(agreed.num_agreeing, agreed.num_compared),
            hash_agreement=agreed,
            loss_trend=loss_trend(recent),
            sync_success_rate=_percent(sync.num_succeeded, sync.num_attempted),
            sync_success=sync,
            training_nodes=len(nodes),
            node_id=own.node_id,
            time=datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            global_loss=average_loss([node.loss for node in nodes if node.loss is not None], own.loss),
            losses_left_out=sum(node.has_strange_loss for node in nodes),
            loss=recent[-1] if recent else None,
            total_steps=sum(node.num_steps for node in counting),
            steps_skipped=num_skipped,
            data_shards=len(frozenset[int]().union(*(node.shards for node in nodes))),
            model_convergence=_percent(agreed.num_agreeing, len(held)) if agreed.num_compared else None,
            tokens_per_s=round(sum(node.tokens_per_s for node in counting), 1),
            speed=self._speed(),
            diloco=diloco,
            nodes=tuple(_node_status(node, is_self=node is own) for node in nodes[:_MAX_NODES_SHOWN]),
        )

    def _comparable(self, peer: PlausibleNode) -> dict[str, tuple[int, str]]:
        return {name: state for name, state in peer.holdings.items() if name.rpartition("/")[2] in self._stages}

    def _own_holdings(self) -> list[str]:
        if self._role == "driver":
            return []
        return [holding(self._peer_id, stage) for stage in self._outer_steps or (self._stage,)]

    def health(self) -> Health:
        """Returns that the process answers, and when it last trained."""
        now = self._clock()
        with self._lock:
            age_s = None if self._last_step_at is None else round(now - self._last_step_at, 3)
        return Health(
            status="ok", node_id=self._node_id, uptime_s=round(now - self._started_at, 3), last_step_age_s=age_s
        )

    def state_dict(self) -> dict[str, object]:
        """Returns what a restarted node needs to be verified: 2,050 losses and two counts."""
        with self._lock:
            return {
                "version": _VERSION,
                "losses": self._losses.state_dict(),
                "num_steps": self._num_steps,
                "num_skipped": self._num_skipped,
            }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resumes from a checkpoint. Raises `CheckpointMismatchError`: another release wrote it."""
        losses, num_steps, num_skipped = (state.get(name) for name in ("losses", "num_steps", "num_skipped"))
        if (
            state.get("version") != _VERSION
            or not isinstance(losses, dict)
            or not isinstance(num_steps, int)
            or not isinstance(num_skipped, int)
        ):
            raise CheckpointMismatchError(
                f"expected the tracker's state of version {_VERSION}, found {state.get('version')!r} with "
                f"{sorted(state)}; resume with the release that wrote the checkpoint"
            )
        with self._lock:
            self._losses.load_state_dict(losses)
            self._num_steps, self._num_skipped = num_steps, num_skipped


def _reasons_against(
    first: Sequence[float], recent: Sequence[float], was_applied: Sequence[bool], sync: SyncSuccess
) -> tuple[str, ...]:
    """Returns why training cannot be called verified; none if it can."""
    reasons = []
    if len(recent) < _MIN_STEPS:
        reasons.append(f"too early to judge: {len(recent)} losses of the {_MIN_STEPS} needed; wait")
    elif not has_fallen(first, recent[-FIRST_LOSSES:]):
        reasons.append("the latest losses are not below the first ones by more than their noise")
    if was_applied and 2 * sum(was_applied) < len(was_applied):
        reasons.append("most of the latest steps were skipped: loss or gradient is not finite")
    if sync.num_attempted >= _MIN_ROUNDS and 2 * sync.num_succeeded < sync.num_attempted:
        reasons.append(
            f"of the latest {sync.num_attempted} rounds {sync.num_succeeded} had another node's work in them: this "
            "node trains, but mostly apart from the others"
        )
    return tuple(reasons)


def _node_status(node: PlausibleNode, *, is_self: bool) -> NodeStatus:
    return NodeStatus(
        **{
            name: getattr(node, name)
            for name in (
                *("node_id", "peer_id", "role", "stage", "outer_step", "loss", "state_digest"),
                *("last_round", "weight"),
            )
        },
        is_self=is_self,
        inner_steps_trained=node.num_steps,
        tokens_per_s=round(node.tokens_per_s, 1),
        num_shards=len(node.shards),
    )


def _percent(part: int, whole: int) -> float | None:
    return round(100.0 * part / whole, 2) if whole else None
