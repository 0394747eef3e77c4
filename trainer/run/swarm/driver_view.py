"""What a driver shows over HTTP: snapshots that its event loop takes, read by the API's threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainer.errors import RpcError
from trainer.monitor.status import StageStatus, SwarmAccount, SwarmStages, WorkerStatus
from trainer.network.discovery import Announcement
from trainer.network.rpc import Endpoint
from trainer.pipeline.driver.driver import PipelineDriver
from trainer.pipeline.driver.results import DriverStatus, MicroBatchResult, StepLoss
from trainer.pipeline.ledger import LEDGER_ACCOUNT, Account, LedgerClient, LedgerService
from trainer.pipeline.ledger.messages import AccountAsk
from trainer.run.config import RunConfig
from trainer.run.swarm.peer_view import DriverPeerView
from trainer.run.swarm.shape import SwarmShape, stage_of, target_tokens_of

logger = logging.getLogger(__name__)

_RATE_WINDOW_S = 30.0
_ASK_TIMEOUT_S = 5.0
_REPORTED = {"uid", "status", "version", "num_tokens", "queued", "unsaved_because"}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The driver at a moment."""

    workers: tuple[Announcement, ...] = ()  # Of all workers of this run file.
    ages_s: Mapping[str, float] = field(default_factory=dict)  # Since each was heard of, by key.
    status: DriverStatus | None = None
    tokens_per_s: float = 0.0
    keeper_away_s: float = 0.0
    num_ahead: int = 0  # Micro-batches that are leased and not begun.


class DriverView:
    """A `trainer.monitor.app.PipelineView`: shows the newest snapshot, never what the loop is changing."""

    def __init__(self, config: RunConfig, shape: SwarmShape, peers: DriverPeerView) -> None:
        self._config = config
        self._shape = shape
        self._peers = peers
        self._driver: PipelineDriver | None = None
        self._work: LedgerClient | None = None
        self._keeper: Callable[[], LedgerService | None] = lambda: None
        self._endpoint: Endpoint | None = None
        self._account: tuple[Account, float] | None = None
        self._snapshot = _Snapshot()
        self._loss: float | None = None
        self._done: deque[tuple[float, int]] = deque(maxlen=4096)  # When micro-batches were done, and their tokens.
        self._began_s = time.monotonic()

    def begin(
        self,
        driver: PipelineDriver,
        keeper: Callable[[], LedgerService | None],
        endpoint: Endpoint,
        work: LedgerClient | None = None,
    ) -> None:
        """Shows this driver from now on; ``keeper`` returns the account, while this driver keeps it."""
        self._driver, self._keeper, self._endpoint, self._work = driver, keeper, endpoint, work
        self.look()

    def ended(self, result: MicroBatchResult) -> None:
        """Notes the end of a micro-batch."""
        if result.outcome.fate == "done":
            self._done.append((time.monotonic(), result.outcome.num_tokens))

    def stepped(self, step: StepLoss) -> None:
        """Notes a step's loss."""
        self._loss = step.loss

    @property
    def num_steps(self) -> int:
        """Of the whole run, as the keeper last said; 0 before that."""
        return 0 if self._account is None else self._account[0].trained_tokens // target_tokens_of(self._config)

    def look(self) -> None:
        """Takes a snapshot; in the driver's loop."""
        status = None if self._driver is None else self._driver.status()
        workers, now_s = tuple(self._peers.workers_heard()), time.monotonic()
        words = {said.peer_id: self._peers.last_word(said.peer_id) for said in workers}
        ages_s = {key: now_s - word.heard_s for key, word in words.items() if word is not None}
        recent = sum(tokens for ended_s, tokens in self._done if ended_s > now_s - _RATE_WINDOW_S)
        rate = round(recent / max(1e-9, min(_RATE_WINDOW_S, now_s - self._began_s)), 1)
        away_s, num_ahead = 0.0, 0
        if self._work is not None:
            away_s, num_ahead = self._work.keeper_away_s, self._work.cache.num_ahead
        self._snapshot = _Snapshot(workers, ages_s, status, rate, away_s, num_ahead)

    async def refresh(self) -> None:
        """Asks the keeper for the account."""
        peer = self._peers.keeper_peer()
        keeper = self._keeper()
        if keeper is not None:
            self._account = (await keeper.account(), time.monotonic())
        elif peer is not None and self._endpoint is not None:
            try:
                reply = await self._endpoint.call(peer, LEDGER_ACCOUNT, AccountAsk(), Account, timeout_s=_ASK_TIMEOUT_S)
            except RpcError as error:
                logger.debug("the keeper of the account: %s", error)
            else:
                self._account = (reply.body, time.monotonic())

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """Name, help and value of each metric."""
        status = self._snapshot.status
        if status is None:
            return
        yield "driver_in_flight", "Micro-batches under way.", status.in_flight
        yield "driver_done", "Micro-batches counted in every stage.", status.done
        yield "driver_lost", "Micro-batches that may not be counted in every stage.", status.lost
        yield "driver_handed_back", "Micro-batches given back uncounted.", status.handed_back
        yield "driver_failed_requests", "Requests to workers that failed.", sum(status.failures.values())
        yield "driver_stalled_seconds", "Waited for stages without a worker.", sum(status.stalls.values())
        yield (
            "driver_banned_workers",
            "Workers that get no work from this driver now.",
            sum(len(stage.banned) for stage in status.stages),
        )
        yield "driver_held", "Micro-batches leased to this driver that it has not begun.", self._snapshot.num_ahead
        yield (
            "driver_keeper_away_seconds",
            "How long the account's keeper has not answered.",
            (self._snapshot.keeper_away_s),
        )
        if self._account is not None:
            account = self._account[0].micro_batches
            yield "account_leased", "Micro-batches leased, by all drivers.", account.leased
            yield "account_done", "Of them, counted in every stage.", account.done
            yield "account_lost", "Of them, lost.", account.lost
            yield "account_open", "Of them, open.", account.open

    def account(self) -> SwarmAccount | None:
        """See `trainer.monitor.status.PipelineView`."""
        if self._account is None:
            return None
        account, heard_s = self._account
        own = {
            "node_id": self._config.node_id,
            "keeper": self._peers.keeper_name,
            "age_s": round(time.monotonic() - heard_s, 3),
        }
        return SwarmAccount.model_validate(account.model_dump(mode="json") | own)

    def stages(self) -> SwarmStages:
        """See `trainer.monitor.app.PipelineView`."""
        snapshot, stages = self._snapshot, []
        by_stage = _workers_by_stage(snapshot)
        seen = snapshot.status.stages if snapshot.status is not None else ()
        stalled = {stage.stage: stage.stalled_s for stage in seen}
        for name, layers in zip(self._shape.plan.names, self._shape.plan.ranges, strict=True):
            workers = sorted(by_stage.get(name, []), key=lambda worker: worker.uid)
            answering = [worker for worker in workers if not worker.silent_s]
            stage = StageStatus(
                stage=name,
                num_layers=len(layers),
                num_serving=sum(worker.status == "serving" and not worker.banned_for_s for worker in answering),
                version=max((worker.version for worker in workers), default=None),
                rows_per_s=round(sum(worker.rows_per_s for worker in answering), 3),
                empty_for_s=round(stalled.get(name, 0.0), 1),
                workers=tuple(workers),
            )
            stages.append(stage)
        return SwarmStages(
            node_id=self._config.node_id,
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            step=self.num_steps,
            loss=self._loss,
            tokens_per_s=snapshot.tokens_per_s,
            in_flight=snapshot.status.in_flight if snapshot.status is not None else 0,
            keeper=self._peers.keeper_name,
            keeper_away_s=round(snapshot.keeper_away_s, 1),
            held=snapshot.num_ahead,
            stages=tuple(stages),
        )


def _workers_by_stage(snapshot: _Snapshot) -> dict[str, list[WorkerStatus]]:
    status = snapshot.status
    banned: dict[str, float] = {}
    in_flight: dict[str, int] = {}
    for stage in status.stages if status is not None else ():
        banned |= stage.banned
        in_flight |= {load.worker: load.in_flight for load in stage.workers}
    silent = status.silent if status is not None else {}
    undecided = status.audit.undecided if status is not None else ()
    workers: dict[str, list[WorkerStatus]] = {}
    for said in snapshot.workers:
        report = said.stage
        if report is None:
            continue
        differing = {name for pair in undecided if report.uid in pair for name in pair if name != report.uid}
        same = report.model_dump(include=_REPORTED) | {"node_id": said.node_id, "peer_id": said.peer_id}
        workers.setdefault(stage_of(report), []).append(
            WorkerStatus(
                **same,
                rows_per_s=round(report.rows_per_s, 3),
                busy=round(report.busy, 3),
                in_flight=in_flight.get(said.peer_id, 0),
                banned_for_s=round(banned.get(said.peer_id, 0.0), 1),
                differs_from=tuple(sorted(differing)),
                age_s=round(snapshot.ages_s.get(said.peer_id, 0.0), 1),
                silent_s=round(silent.get(said.peer_id, 0.0), 1),
                unsaved_s=round(report.unsaved_s, 1),
            )
        )
    return workers
