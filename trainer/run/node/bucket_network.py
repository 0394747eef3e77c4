"""A node's side of a run whose rounds go through a bucket: no port, no discovery, no peer's address.

It has the same face as `trainer.run.node.network.Network` to the rest of the node. What others would ask this node for,
it puts into the bucket after each round, in a thread of its own: what it holds, and when newcomers wait, the state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

from pydantic import Field, JsonValue, ValidationError

from genesis.errors import GenesisError
from manifests.serialisation import canonical_json
from trainer.bucket_rounds.collective import BucketCollective
from trainer.bucket_rounds.documents import Agreement
from trainer.bucket_rounds.keeping import Keeping
from trainer.bucket_rounds.object_names import RUN_KEY
from trainer.bucket_rounds.snapshots import fetch_snapshot
from trainer.collective import Terms
from trainer.errors import IncompatiblePeerError, RefusedError, StateTransferError, TrainerUsageError
from trainer.monitor.swarm import SeenMember
from trainer.network.rpc import Counters, Identity, Message
from trainer.outer.diloco import SharedState
from trainer.run.config import RunConfig
from trainer.run.node.admission import admission_client
from trainer.run.node.bucket_settings import described, settings_of
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.state_form import StateForm

if TYPE_CHECKING:
    from trainer.network.discovery import Announcement

logger = logging.getLogger(__name__)

_MAX_RUN_BYTES: Final = 1 << 20
_SETTLE_S: Final = 600.0
_LEAVE_S: Final = 20.0
_CATCH_UP_S: Final = 120.0
_MOST_UNPUBLISHED: Final = 4
_ROUNDS_SEEN: Final = 5
"""A node that was in none of the latest so many is not listed any more."""


class BucketRun(Message):
    """What all nodes of a run over a bucket have in common."""

    version: Literal[1] = 1
    run_id: Annotated[str, Field(min_length=1, max_length=128)]
    terms: dict[str, JsonValue]  # `Terms`.
    rounds: dict[str, JsonValue]  # `RoundRules`, and who may take part.


class BucketListener(Protocol):
    """The rest of the node, called in the threads that train and that publish."""

    def state(self, outer_step: int, digest: str) -> None:
        """Learns that this node holds a state."""

    def seen_in_rounds(self, members: Sequence[SeenMember]) -> None:
        """Receives who was in the latest rounds, after each."""


def seen_members(before: Mapping[str, SeenMember], agreement: Agreement, num_fragments: int) -> dict[str, SeenMember]:
    """Returns who was in the latest rounds, this node among them, after one more: all that is known of others here."""
    oldest = agreement.round_index - _ROUNDS_SEEN
    seen = {key: member for key, member in before.items() if member.last_round > oldest}
    for each in agreement.members:
        seen[each.member] = SeenMember(
            peer_id=each.member,
            last_round=agreement.round_index,
            weight=each.weight,
            outer_step=agreement.round_index // num_fragments,
            # Between the rounds of its fragments an outer step has several states.
            state_digest=agreement.state_digest if num_fragments == 1 else "",
        )
    return seen


class BucketNetwork:
    """One node among others over a bucket.

    ``vocabulary_rows`` and ``form`` are as for `Network`; ``stopping`` says whether the node has been asked to stop.
    """

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        terms: Terms,
        vocabulary_rows: Callable[[], int],
        form: StateForm[SharedState],
        stopping: Callable[[], bool],
    ) -> None:
        self._config = config
        self._terms = terms
        self._form = form
        self._stopping = stopping
        self._snapshots = Path(config.state_dir).expanduser() / "state" / config.run_id / config.node_id
        self._admission = admission_client(config, identity, "node")
        self._loop = LoopThread("genesis-admission") if self._admission is not None else None
        self._settings = settings_of(config, identity, vocabulary_rows, stopping, self._admission, self._loop)
        self.collective = BucketCollective(self._settings, self._is_snapshot_due, self._note)
        self._keeping = Keeping(self._settings, self.collective.clock)
        self._listener: BucketListener | None = None
        self._seen: dict[str, SeenMember] = {}
        self._description = b""  # What stands in the bucket under `RUN_KEY`.
        self._own = (-1, "")  # Rounds committed and digest of the state this node holds.
        self._agreements: deque[Agreement] = deque(maxlen=_MOST_UNPUBLISHED)
        self._unpublished: deque[SharedState] = deque(maxlen=_MOST_UNPUBLISHED)
        self._changed = threading.Condition()
        self._num_undigested = 0
        self._worker: threading.Thread | None = None
        self._is_stopped = False

    @property
    def peer_id(self) -> str:
        """This node's key."""
        return self._settings.own_id

    @property
    def counters(self) -> Counters:
        """Bytes to and from the bucket."""
        cost = self._settings.place.cost
        return Counters(sent_bytes=cost.sent_bytes, received_bytes=cost.received_bytes)

    @property
    def relayed_bytes(self) -> tuple[int, int]:
        """None: whoever reaches the bucket needs no relay."""
        return (0, 0)

    @property
    def state_digest(self) -> str:
        """Digest of the state this node holds, as it was published last."""
        return self._own[1]

    def gauges(self) -> Iterable[tuple[str, str, float]]:
        """Returns name, help and value of what the bucket has cost so far."""
        cost, prices = self._settings.place.cost, self._config.bucket.price_list
        yield "bucket_write_requests", "PUT and LIST requests to the bucket.", cost.num_writes
        yield "bucket_read_requests", "GET and HEAD requests to the bucket.", cost.num_reads
        yield "bucket_sent_bytes", "Bytes of objects put into the bucket.", cost.sent_bytes
        yield "bucket_received_bytes", "Bytes of objects read from the bucket.", cost.received_bytes
        yield "bucket_cost_dollars", "What these cost at list prices (bucket.prices).", cost.dollars(prices)

    def start(self, listener: BucketListener) -> None:
        """Probes the bucket, and compares the run in it with this node's.

        Raises:
            TrainerUsageError: it cannot be written, or does not honour conditional writes, or the run's authority
                refuses this node.
            AdmissionError: no authority answers, and there is no valid credential.
            IncompatiblePeerError: the nodes there train something else.
        """
        self._listener = listener
        self._join()
        self._settings.place.check()
        try:
            self._compare_run()
        except GenesisError as error:
            raise TrainerUsageError(f"--rounds: expected a bucket that can be read and written: {error}") from error
        self._worker = threading.Thread(target=self._publish_and_leave, name="bucket-publish", daemon=True)
        self._worker.start()
        logger.info("rounds go through %s", self._settings.place.url)

    def stop(self) -> None:
        """Ends what runs beside training, after what is being put is there, and tells the others that this node leaves.

        Also where `start` was never called.
        """
        self.collective.close()
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join(_LEAVE_S)
        self._settings.place.close()
        if self._loop is not None and self._admission is not None:
            if self._loop.is_running:
                self._loop.run(self._admission.stop(), _LEAVE_S)
            self._loop.stop()

    def check_fit(self) -> None:
        """Raises `AdmissionError` once the run's authority has revoked this node."""
        if self._admission is not None:
            self._admission.check()

    def _join(self) -> None:
        """Gets this node's credential, where the run has an authority, and keeps it fresh from then on."""
        admission, loop = self._admission, self._loop
        if admission is None or loop is None:
            return

        async def join() -> None:
            await admission.join("", self._stopping)
            admission.start(lambda: "", None, None)

        loop.start()
        loop.run(join(), _LEAVE_S + self._config.admission.join_timeout_s)

    def alike(self) -> list[Announcement]:
        """Returns nobody: nodes over a bucket do not announce themselves."""
        return []

    def group(self, part: str) -> BucketNetwork:
        """Returns this: models have no parts with rounds of their own here."""
        del part
        return self

    def note_catching_up(self) -> None:
        """Notes that the node fetches the others' state, until `move_to`."""
        self.collective.catch_up()

    def move_to(self, next_round: int) -> None:
        """Notes that the node has taken a state and trains towards this round."""
        self.collective.move_to(next_round)

    def announce(self) -> None:
        """Does nothing: a round tells who is there."""

    def is_on_its_own(self, num_members: int) -> bool:
        """Returns False: a round with few members waits for most of those before (`trainer.bucket_rounds.rules`)."""
        return False

    # -- state ---------------------------------------------------------------------------------------------------------

    def publish(self, shared: object, members: tuple[str, ...] = ()) -> None:
        """Says in the bucket that this node holds a state, in the background."""
        if not isinstance(shared, SharedState):
            raise TrainerUsageError("--rounds: expected the state of a common anchor, found that of averaged gradients")
        with self._changed:
            if len(self._unpublished) < _MOST_UNPUBLISHED:
                self._num_undigested += 1
            self._unpublished.append(shared)
            self._changed.notify_all()

    def settle(self, timeout_s: float = _SETTLE_S) -> None:
        """Waits until the digest of the state published last is known."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_undigested or self._is_stopped, timeout_s):
                logger.warning("the digest of this node's state is not there after %.0f s", timeout_s)

    def let_go(self) -> None:
        """Gives up this node's own state: `catch_up` takes any state the others hold."""
        self.settle()
        self._own = (self._own[0], "")

    def catch_up(
        self, *, wait_s: float = _CATCH_UP_S, stop: Callable[[], bool] = lambda: False, is_new: bool = False
    ) -> SharedState | None:
        """Fetches the others' state; None: this node holds it, or can come after them by what the bucket has of rounds.

        A node that can do neither asks for a snapshot, and waits for it for as long as a round may take.
        """
        self.collective.catch_up()
        self.settle()
        deadline_s = time.monotonic() + max(wait_s, self._config.collective.round_timeout_s)
        has_wished = False
        try:
            while not stop():
                try:
                    if not self._needs_state():
                        return None
                    shared = self._fetched(stop)
                    if shared is not None:
                        return shared
                    if not has_wished:
                        self._keeping.wish()
                        has_wished = True
                        logger.info("waiting for a snapshot of the run's state, which its next round brings")
                except (GenesisError, StateTransferError, IncompatiblePeerError) as error:
                    logger.warning("the others' state: %s", error)
                if time.monotonic() >= deadline_s:
                    return None
                time.sleep(max(1.0, self._config.bucket.poll_interval_s))
            return None
        finally:
            if has_wished:
                self._withdraw_wish()

    def _withdraw_wish(self) -> None:
        try:
            self._keeping.withdraw_wish()
        except GenesisError as error:
            logger.info("this node's wish for a snapshot stays in the bucket: %s", error)

    def _needs_state(self) -> bool:
        """Whether this node can neither take part in the next round nor make up for those it has missed."""
        place, history = self._settings.place, self._keeping.history
        newest = history.newest()
        own_round, own_digest = self._own
        if newest is None or own_round > newest.round_index + 1:
            return False
        if own_round == newest.round_index + 1:
            record = history.vouched_state(newest)
            return not own_digest or (record is not None and record.state_digest != own_digest)
        agreement = history.accepted(own_round)
        if agreement is None or agreement.state_digest != own_digest:
            return True
        there = {(each.member, each.payload_sha256) for each in place.round(own_round).contributions}
        if not {(each.member, each.payload_sha256) for each in agreement.members} <= there:
            return True
        missed = newest.round_index + 1 - own_round
        logger.info(
            "%s made without this node, which makes up for %s",
            *(("1 round was", "it") if missed == 1 else (f"{missed} rounds were", "them")),
        )
        return False

    def _fetched(self, stop: Callable[[], bool]) -> SharedState | None:
        """Returns the newest state that most members of its round vouch for and that is stored; None: there is none."""
        place, newest = self._settings.place, self._keeping.history.newest()
        if newest is None:
            return None
        for round_index, digest in self._keeping.snapshots(newest.round_index).items():
            vouched = self._keeping.vouched(round_index)
            if vouched.state_digest == self._own[1]:
                continue
            logger.info("fetching the state after round %d", round_index)
            snapshot = fetch_snapshot(place, round_index, digest, self._snapshots, self._form.expectation, stop)
            shared = self._form.unpack(snapshot.meta, snapshot.tensors)
            if shared.digest() != vouched.state_digest:
                raise StateTransferError(f"the snapshot {digest[:12]} does not hold the state that it was vouched for")
            return shared
        return None

    # -- beside training -----------------------------------------------------------------------------------------------

    def _note(self, agreement: Agreement) -> None:
        self._agreements.append(agreement)
        self._seen = seen_members(self._seen, agreement, self._config.outer.num_fragments)
        if self._listener is not None:
            self._listener.seen_in_rounds(tuple(self._seen.values()))

    def _is_snapshot_due(self, round_index: int) -> bool:
        return self._keeping.is_snapshot_due(round_index)

    def _publish_and_leave(self) -> None:
        self._publish_all()
        self.collective.leave()

    def _publish_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unpublished or self._is_stopped)
                if not self._unpublished:
                    return
                shared = self._unpublished.popleft()
            try:
                self._publish(shared)
            except Exception:
                # An error here must not end the thread: the others would take this node for one that never answers.
                logger.exception("saying what this node holds")

    def _publish(self, shared: SharedState) -> None:
        num_rounds = shared.outer_step * self._config.outer.num_fragments + shared.fragment
        digest = shared.digest()
        with self._changed:
            self._own = (num_rounds, digest)
            self._num_undigested = len(self._unpublished)
            self._changed.notify_all()
        if self._listener is not None:
            self._listener.state(shared.outer_step, digest)
        if not num_rounds:
            return
        try:
            agreement = self._agreement_of(num_rounds - 1)
            if agreement is None:
                return
            try:
                self._keeping.record(agreement, digest, lambda: self._form.pack(shared))
            finally:  # Also where the bucket is full: that makes room.
                self._keeping.remove_old(agreement)
            if agreement.member == self.peer_id:
                # Were it removed, the next node to start would describe the run by its own options.
                self._settings.place.put_once(RUN_KEY, self._description)
        except GenesisError as error:
            logger.warning("keeping the bucket after round %d: %s", num_rounds - 1, error)

    def _agreement_of(self, round_index: int) -> Agreement | None:
        for agreement in self._agreements:
            if agreement.round_index == round_index:
                return agreement
        return self._keeping.history.accepted(round_index)

    def _compare_run(self) -> None:
        place, config = self._settings.place, self._config
        rounds = described(self._settings)
        own = BucketRun(run_id=config.run_id, terms=self._terms.model_dump(mode="json"), rounds=rounds)
        wire = canonical_json(own.model_dump(mode="json"))
        body = place.get_bounded(RUN_KEY, _MAX_RUN_BYTES)
        self._description = wire
        if body is None and place.put_once(RUN_KEY, wire):
            return
        body = self._description = body or place.get_bounded(RUN_KEY, _MAX_RUN_BYTES) or b""
        try:
            found = BucketRun.model_validate_json(body)
            theirs = Terms.model_validate_json(canonical_json(found.terms))
        except ValidationError:
            raise IncompatiblePeerError(
                f"expected the description of a run at {RUN_KEY} in {place.url}, found something else; give --rounds "
                "a prefix of its own"
            ) from None
        if found.run_id != config.run_id:
            raise IncompatiblePeerError(
                f"expected run {config.run_id} in {place.url}, found {found.run_id}; give --run-id {found.run_id}, or "
                "--rounds a prefix of its own"
            )
        try:
            theirs.check(self._terms, f"the run in {place.url}")
        except RefusedError as error:
            raise IncompatiblePeerError(str(error)) from None
        for name in sorted(found.rounds.keys() | rounds.keys()):
            if found.rounds.get(name) != own.rounds.get(name):
                raise IncompatiblePeerError(
                    f"expected rounds with {name} {found.rounds.get(name)}, as the nodes in {place.url} have it, "
                    f"found {own.rounds.get(name)}"
                )
